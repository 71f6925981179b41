#include "parallel/fsdp/sharded_parameters.hpp"

#include <cstring>
#include <utility>

#include "model/base/exact_sum.hpp"
#include "model/base/tensor_memory.hpp"

namespace lockstep::parallel {
namespace {

int64_t row_elements(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (size_t d = 1; d < shape.size(); ++d) count *= shape[d];
  return count;
}

/// Gives a tensor's storage memory again, or takes it away, under every tensor that shares it.
void set_storage(const Tensor& tensor, bool filled) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  const size_t bytes =
      filled ? static_cast<size_t>(tensor.numel()) * tensor.element_size() : size_t{0};
  if (storage->nbytes() == bytes) return;
  storage->set_data_ptr_noswap(storage->allocator()->allocate(bytes));
  storage->set_nbytes(bytes);
}

MemoryKind gathered_kind(const ParamSpec& spec) {
  return spec.expert ? MemoryKind::kGatheredExperts : MemoryKind::kGathered;
}

}  // namespace

ShardedParameters::ShardedParameters(std::vector<ParamSpec> specs,
                                     const Mesh& mesh,
                                     ShardOptions options)
    : mesh_(mesh), options_(options) {
  LOCKSTEP_CHECK(options_.device.is_cpu() || (mesh.all().size() == 1 && !options_.exact),
                 kConfig,
                 "parameters: a CUDA device serves one rank and sums that are not exact; leave the "
                 "device, the topology or the invariant policy out");
  const at::NoGradGuard no_grad;
  for (ParamSpec& spec : specs) {
    Shard shard;
    shard.spec = std::move(spec);
    const ParamSpec& s = shard.spec;
    const std::vector<int64_t> mine = cuts(shard);
    const auto rank = static_cast<size_t>(group_of(shard).rank());
    shard.begin = mine[rank];
    shard.end = mine[rank + 1];
    const at::ScalarType kept = options_.masters && s.trainable ? options_.wide : s.compute_dtype;
    const Tensor rows = s.load_rows(shard.begin, shard.end);
    {
      // Always a copy: a view of the checkpoint's mapping would change with the file.
      const MemoryScope memory(options_.masters && s.trainable ? MemoryKind::kMasters
                                                               : MemoryKind::kWeights);
      shard.value =
          rows.to(options_.device, kept, /*non_blocking=*/false, /*copy=*/true).contiguous();
    }
    shard.spec.load_rows = nullptr;

    const size_t i = shards_.size();
    const auto join = [&](int64_t unit) {
      std::vector<Bucket>& list = units_[unit];
      const Group* group = &group_of(shard);
      Bucket* bucket = nullptr;
      for (Bucket& b : list) {
        if (b.group == group && b.dtype == s.compute_dtype) bucket = &b;
      }
      if (bucket == nullptr) {
        list.push_back({group,
                        s.compute_dtype,
                        {},
                        std::vector<int64_t>(static_cast<size_t>(group->size()), 0),
                        std::nullopt});
        bucket = &list.back();
      }
      bucket->params.push_back(i);
      for (size_t r = 0; r < bucket->elements.size(); ++r)
        bucket->elements[r] += (mine[r + 1] - mine[r]) * row_elements(s.shape);
    };
    join(s.unit);
    by_name_.emplace(s.name, i);
    if (!s.alias.empty()) {
      join(options_.head_unit);
      by_name_.emplace(s.alias, i);
    }
    // A group of one with equal dtypes computes with the shard itself.
    const bool same = group_of(shard).size() == 1 && kept == s.compute_dtype;
    gathered_.push_back(same ? shard.value
                             : at::empty(s.shape, shard.value.options().dtype(s.compute_dtype)));
    if (!same) set_storage(gathered_.back(), false);
    shards_.push_back(std::move(shard));
  }
}

size_t ShardedParameters::index(const std::string& name) const {
  const auto found = by_name_.find(name);
  LOCKSTEP_CHECK(found != by_name_.end(), kInternal, "parameters: the model has no {}", name);
  return found->second;
}

std::vector<int64_t> ShardedParameters::cuts(const Shard& shard) const {
  return even_cuts(shard.spec.shape[0], group_of(shard).size());
}

std::vector<ShardedParameters::Bucket>* ShardedParameters::buckets(int64_t unit) {
  const auto found = units_.find(unit);
  return found == units_.end() ? nullptr : &found->second;
}

Tensor ShardedParameters::get(const std::string& name) { return gathered_[index(name)]; }

bool ShardedParameters::wants_grad(const std::string& name) const {
  return options_.grads && shards_[index(name)].spec.trainable;
}

/// Starts to gather what is not here already.
void ShardedParameters::start(Bucket& bucket) {
  if (bucket.pending || bucket.group->size() == 1) return;
  const at::NoGradGuard no_grad;
  const MemoryScope memory(MemoryKind::kExchange);
  const Tensor mine = at::empty({bucket.elements[static_cast<size_t>(bucket.group->rank())]},
                                at::TensorOptions(bucket.dtype));
  int64_t at = 0;
  for (const size_t i : bucket.params) {
    const Tensor& value = shards_[i].value;
    mine.narrow(0, at, value.numel()).copy_(value.view({-1}));
    at += value.numel();
  }
  const ParamSpec& first = shards_[bucket.params[0]].spec;
  const MemoryScope arriving(gathered_kind(first));
  bucket.pending = bucket.group->all_gather_rows_start(
      mine, bucket.elements, fmt::format("parameters of unit {} ({} ...)", first.unit, first.name));
}

void ShardedParameters::finish(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  const MemoryScope memory(gathered_kind(shards_[bucket.params[0]].spec));
  if (bucket.group->size() == 1) {
    for (const size_t i : bucket.params) {
      if (gathered_[i].is_same(shards_[i].value)) continue;
      set_storage(gathered_[i], true);
      // A version of its own: graphs that saved this tensor expect these values again.
      gathered_[i].variable_data().copy_(shards_[i].value);
    }
    return;
  }
  const Tensor all = bucket.pending->wait();
  bucket.pending.reset();
  const auto* from = static_cast<const char*>(all.const_data_ptr());
  std::vector<char*> to;
  for (const size_t i : bucket.params) {
    set_storage(gathered_[i], true);
    to.push_back(static_cast<char*>(gathered_[i].mutable_data_ptr()));
  }
  for (int64_t r = 0; r < bucket.group->size(); ++r) {
    for (size_t p = 0; p < bucket.params.size(); ++p) {
      const Shard& shard = shards_[bucket.params[p]];
      const std::vector<int64_t> rows = cuts(shard);
      const auto rank = static_cast<size_t>(r);
      const auto bytes =
          static_cast<size_t>((rows[rank + 1] - rows[rank]) * row_elements(shard.spec.shape)) *
          gathered_[bucket.params[p]].element_size();
      if (bytes > 0) std::memcpy(to[p], from, bytes);
      to[p] += bytes;
      from += bytes;
    }
  }
}

void ShardedParameters::enter(int64_t unit, model::Pass pass) {
  std::vector<Bucket>* now = buckets(unit);
  if (now != nullptr) {
    // The head is still here from forward.
    if (!(unit == options_.head_unit && pass == model::Pass::kBackward)) {
      for (Bucket& bucket : *now) start(bucket);
      for (Bucket& bucket : *now) finish(bucket);
    }
  }
  if (!options_.prefetch) return;
  std::vector<Bucket>* next = buckets(pass == model::Pass::kForward ? unit + 1 : unit - 1);
  if (next == nullptr) return;
  for (Bucket& bucket : *next) start(bucket);
}

void ShardedParameters::leave(int64_t unit, model::Pass pass) {
  if (options_.grads && unit == options_.head_unit && pass == model::Pass::kForward) return;
  std::vector<Bucket>* now = buckets(unit);
  if (now == nullptr) return;
  for (const Bucket& bucket : *now) {
    for (const size_t i : bucket.params) {
      if (!gathered_[i].is_same(shards_[i].value)) set_storage(gathered_[i], false);
    }
  }
}

void ShardedParameters::reduce(const Bucket& bucket,
                               const std::map<size_t, model::NamedGrad>& grads) {
  const at::NoGradGuard no_grad;
  const MemoryScope memory(MemoryKind::kExchange);
  const int64_t size = bucket.group->size();
  const int64_t parts = options_.exact ? 2 : 1;  // of every element: high and low, or the gradient
  // By rank, then by parameter, like the gathered values; then by part.
  std::vector<int64_t> elements(static_cast<size_t>(size), 0);
  std::vector<size_t> params;
  for (const size_t i : bucket.params) {
    if (!shards_[i].spec.trainable) continue;
    params.push_back(i);
    const std::vector<int64_t> rows = cuts(shards_[i]);
    for (size_t r = 0; r < elements.size(); ++r)
      elements[r] += parts * (rows[r + 1] - rows[r]) * row_elements(shards_[i].spec.shape);
  }
  if (params.empty()) return;
  int64_t total = 0;
  for (const int64_t e : elements) total += e;
  const Tensor send = at::zeros(
      {total},
      at::TensorOptions(options_.exact ? at::kDouble : options_.wide).device(options_.device));
  int64_t at = 0;
  for (size_t r = 0; r < elements.size(); ++r) {
    for (const size_t i : params) {
      const std::vector<int64_t> rows = cuts(shards_[i]);
      const int64_t count = (rows[r + 1] - rows[r]) * row_elements(shards_[i].spec.shape);
      const auto found = grads.find(i);
      for (int64_t part = 0; part < parts; ++part, at += count) {
        if (found == grads.end() || count == 0) continue;
        const model::NamedGrad& g = found->second;
        LOCKSTEP_CHECK(g.pairs.defined() == options_.exact,
                       kInternal,
                       "parameters: the gradient of {} must {}come as an exact sum",
                       g.name,
                       options_.exact ? "" : "not ");
        const Tensor whole = options_.exact ? g.pairs.select(0, part) : g.grad;
        send.narrow(0, at, count)
            .copy_(whole.narrow(0, rows[r], rows[r + 1] - rows[r]).reshape({-1}));
      }
    }
  }
  const std::string what = fmt::format(
      "gradients of unit {} ({} ...)", shards_[params[0]].spec.unit, shards_[params[0]].spec.name);
  Tensor mine = bucket.group->reduce_scatter_rows(send, elements, what);
  mesh_.dp().all_reduce_sum(mine, what);
  at = 0;
  for (const size_t i : params) {
    Shard& shard = shards_[i];
    const int64_t count = parts * shard.value.numel();
    add_to_shard(shard, mine.narrow(0, at, count));
    at += count;
  }
}

/// part: the flat gradient of the shard, or both parts of it one after the other.
void ShardedParameters::add_to_shard(Shard& shard, const Tensor& part) const {
  const MemoryScope memory(MemoryKind::kGradients);
  if (!options_.exact) {
    const Tensor grad = part.view(shard.value.sizes());
    if (shard.grad.defined()) {
      shard.grad.add_(grad);
    } else {
      shard.grad = grad.clone();
    }
    return;
  }
  std::vector<int64_t> sizes{2};
  sizes.insert(sizes.end(), shard.value.sizes().begin(), shard.value.sizes().end());
  const Tensor pairs = part.view(sizes);
  shard.pairs = shard.pairs.defined() ? shard.pairs + pairs : pairs.clone();
  ExactSum::carry(shard.pairs);
  shard.grad = ExactSum::value_of(shard.pairs, "gradient of " + shard.spec.name);
}

void ShardedParameters::add_grads(int64_t unit, std::vector<model::NamedGrad> grads) {
  std::map<size_t, model::NamedGrad> by_index;
  for (model::NamedGrad& g : grads) {
    if (g.pairs.defined()) ExactSum::carry(g.pairs);
    by_index.emplace(index(g.name), std::move(g));
  }
  std::vector<Bucket>* now = buckets(unit);
  if (now == nullptr) return;
  for (const Bucket& bucket : *now) reduce(bucket, by_index);
}

void ShardedParameters::zero_grads() {
  for (Shard& shard : shards_) shard.grad = shard.pairs = Tensor();
}

Tensor ShardedParameters::gather(const Shard& shard, const Tensor& rows) const {
  const std::vector<int64_t> bounds = cuts(shard);
  std::vector<int64_t> counts;
  for (size_t r = 0; r + 1 < bounds.size(); ++r) counts.push_back(bounds[r + 1] - bounds[r]);
  return group_of(shard).all_gather_rows(rows.contiguous(), counts, shard.spec.name);
}

}  // namespace lockstep::parallel
