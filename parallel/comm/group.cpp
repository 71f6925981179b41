#include "parallel/comm/group.hpp"

#include <algorithm>
#include <utility>

#include "model/base/tensor_memory.hpp"
#include "parallel/comm/group_impl.hpp"
#include "parallel/comm/mpi_transport.hpp"

namespace lockstep::parallel {

namespace {

/// Larger sums go in parts, so that the copies beside the tensor stay small.
constexpr int64_t kChunkElements = int64_t{1} << 26;

/// Device memory travels through the host when NCCL does not carry it.
bool through_host(const Tensor& tensor) {
  return tensor.is_cuda() && comm_backend() == CommBackend::kMpi;
}

Transport& transport_of(const GroupImpl& g, const Tensor& tensor) {
  if (comm_backend() == CommBackend::kMpi) return *g.host;
  return g.nccl(!tensor.is_cuda());
}

/// Transports do not follow the streams of the tensor library.
void finish_device_work(const Tensor& tensor) {
  if (!tensor.is_cuda()) return;
  const c10::impl::VirtualGuardImpl device(tensor.device().type());
  device.synchronizeStream(device.getStream(tensor.device()));
}

int64_t row_bytes(const Tensor& tensor) {
  auto bytes = static_cast<int64_t>(tensor.element_size());
  for (int64_t d = 1; d < tensor.dim(); ++d) bytes *= tensor.size(d);
  return bytes;
}

Tensor with_rows(const Tensor& like, int64_t rows) {
  std::vector<int64_t> sizes = like.sizes().vec();
  sizes[0] = rows;
  return at::empty(sizes, like.options().requires_grad(false));
}

/// dtype in which sums over ranks are formed before one rounding back.
at::ScalarType sum_dtype(const Tensor& tensor) {
  return tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf
             ? at::kFloat
             : tensor.scalar_type();
}

void check_tensor(const Tensor& tensor, const GroupImpl& g, std::string_view what) {
  LOCKSTEP_CHECK(
      tensor.defined() && tensor.is_contiguous() && (tensor.device().is_cpu() || tensor.is_cuda()),
      kShape,
      "{}: needs a contiguous tensor on the CPU or a CUDA device, got {}{}",
      Call{g, CommOp::kBarrier, what}.where(),
      lockstep::describe(tensor),
      tensor.defined() && !tensor.is_contiguous() ? " (strided)" : "");
}

void check_rows(
    bool holds, const GroupImpl& g, std::string_view what, int64_t have, const Rows& plan) {
  LOCKSTEP_CHECK(holds,
                 kInternal,
                 "{}: the tensor has {} rows, the plan says {} for {} ranks",
                 Call{g, CommOp::kBarrier, what}.where(),
                 have,
                 plan.total,
                 plan.count.size());
}

std::vector<int64_t> even_slices(int64_t count, int64_t size) {
  std::vector<int64_t> slices;
  for (int64_t r = 0; r < size; ++r) slices.push_back(count * (r + 1) / size - count * r / size);
  return slices;
}

uint64_t hash_of(std::initializer_list<int64_t> values) {
  uint64_t hash = kHashStart;
  for (const int64_t value : values) hash = hash_value(hash, value);
  return hash;
}

/// Enters a call into the ledger and makes it known.
Call begin(const GroupImpl& g,
           CommOp op,
           std::string_view what,
           int64_t bytes_sent,
           int64_t bytes_received,
           uint64_t size_hash,
           int64_t peer = -1) {
  const LedgerEntry& entry = g.ledger.record(op, what, bytes_sent, bytes_received, size_hash, peer);
  const Call call{g, op, what, static_cast<int>(peer), entry.sequence, entry.hash};
  announce(call);
  return call;
}

template <typename Start>
WorkPtr start(const Call& call, const Start& body) {
  const CallTime time(call);
  try {
    return body(call.until());
  } catch (const TransportError& error) {
    tell_failure(error, call);
  }
}

// The building blocks, already recorded by their caller.

Tensor gather_start(const Call& call, const Tensor& local, const Rows& rows, WorkPtr& work) {
  finish_device_work(local);
  Tensor all = with_rows(local, rows.total);
  if (all.numel() == 0) return all;
  work = start(call, [&](const Until& until) {
    return transport_of(call.g, local)
        .all_gather(local.const_data_ptr(), all.mutable_data_ptr(), rows, row_bytes(local), until);
  });
  return all;
}

Tensor gather(const Call& call, const Tensor& local, const Rows& rows) {
  WorkPtr work;
  Tensor all = gather_start(call, local, rows, work);
  if (work) wait(*work, call);
  return all;
}

Tensor exchange(const Call& call, const Tensor& rows, const Rows& out, const Rows& in) {
  finish_device_work(rows);
  Tensor received = with_rows(rows, in.total);
  const WorkPtr work = start(call, [&](const Until& until) {
    return transport_of(call.g, rows)
        .all_to_all(
            rows.const_data_ptr(), out, received.mutable_data_ptr(), in, row_bytes(rows), until);
  });
  wait(*work, call);
  return received;
}

/// All ranks' copies of this rank's rows, then their sum in ascending rank order.
Tensor scatter_sum(const Call& call, const Tensor& global, const Rows& rows) {
  const GroupImpl& g = call.g;
  const int64_t mine = rows.count[static_cast<size_t>(g.rank)];
  const Rows in(std::vector<int64_t>(static_cast<size_t>(g.size), mine));
  const Tensor parts = [&] {
    const MemoryScope memory(MemoryKind::kExchange);
    return global.numel() > 0 ? exchange(call, global, rows, in) : with_rows(global, in.total);
  }();
  Tensor sum = parts.narrow(0, 0, mine).to(sum_dtype(global), false, true);
  for (int64_t r = 1; r < g.size; ++r) sum.add_(parts.narrow(0, r * mine, mine));
  return sum.to(global.scalar_type());
}

}  // namespace

Group Group::single() { return Group(std::make_shared<GroupImpl>()); }

int64_t Group::rank() const { return impl_->rank; }
int64_t Group::size() const { return impl_->size; }
const std::string& Group::name() const { return impl_->name; }

Group Group::split(int64_t color, int64_t key, std::string name) const {
  const GroupImpl& g = *impl_;
  if (g.comm == MPI_COMM_NULL || g.size == 1) {
    auto part = std::make_shared<GroupImpl>();
    part->name = std::move(name);
    return Group(std::move(part));
  }
  // A split itself has no deadline; a rank that is missing shows here. Its parts may have different
  // names.
  const Call call = begin(g, CommOp::kSplit, "the group into parts", 0, 0, kHashStart);
  const WorkPtr all_here = start(call, [&](const Until& until) { return g.host->barrier(until); });
  wait(*all_here, call);
  MPI_Comm comm = MPI_COMM_NULL;
  const int wanted = color < 0 ? MPI_UNDEFINED : static_cast<int>(color);
  try {
    check_mpi(MPI_Comm_split(g.comm, wanted, static_cast<int>(key), &comm), "split");
  } catch (const TransportError& error) {
    tell_failure(error, call);
  }
  const uint64_t part_key =
      hash_value(hash_value(hash_value(kHashStart, g.key), ++g.splits), color);
  if (comm == MPI_COMM_NULL) {
    auto part = std::make_shared<GroupImpl>();
    part->name = std::move(name);
    return Group(std::move(part));
  }
  return Group(std::make_shared<GroupImpl>(comm, true, part_key, std::move(name)));
}

void Group::all_reduce_sum(Tensor& tensor, std::string_view what) const {
  const GroupImpl& g = *impl_;
  if (g.size == 1) return;
  check_tensor(tensor, g, what);
  const at::NoGradGuard no_grad;
  const MemoryScope memory(MemoryKind::kExchange);
  const int64_t numel = tensor.numel(), element = tensor.element_size();
  // Each rank sums one slice over the ranks in ascending order, then all gather the slices: the
  // same bytes everywhere.
  int64_t own = 0;
  std::vector<Rows> slices;
  for (int64_t first = 0; first < numel; first += kChunkElements) {
    slices.emplace_back(even_slices(std::min(kChunkElements, numel - first), g.size));
    own += slices.back().count[static_cast<size_t>(g.rank)];
  }
  const int64_t moved = (numel - own + own * (g.size - 1)) * element;
  const Call call = begin(g, CommOp::kAllReduce, what, moved, moved, hash_of({numel, element}));
  const Tensor work = through_host(tensor) ? tensor.cpu() : tensor;
  const Tensor flat = work.view({-1});
  int64_t first = 0;
  for (const Rows& rows : slices) {
    const Tensor part = flat.narrow(0, first, rows.total);
    part.copy_(gather(call, scatter_sum(call, part, rows), rows));
    first += rows.total;
  }
  if (!work.is_same(tensor)) tensor.copy_(work);
}

int64_t Group::all_reduce_max(int64_t value, std::string_view what) const {
  const std::vector<int64_t> all = all_gather(value, what);
  return *std::max_element(all.begin(), all.end());
}

struct Pending::Impl {
  std::shared_ptr<GroupImpl> group;
  Tensor local, all;
  at::Device device = at::kCPU;  ///< where the caller wants it
  WorkPtr work;
  std::string what;
  int64_t sequence = 0;
  uint64_t hash = 0;

  Impl() = default;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    if (work) work->abandon();
  }
};

Pending::Pending(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Pending::Pending(Pending&&) noexcept = default;
Pending& Pending::operator=(Pending&&) noexcept = default;
Pending::~Pending() = default;

Tensor Pending::wait() {
  LOCKSTEP_CHECK(impl_ != nullptr, kInternal, "a pending call was waited for twice");
  const std::unique_ptr<Impl> p = std::move(impl_);
  if (p->work) {
    lockstep::parallel::wait(
        *p->work, Call{*p->group, CommOp::kAllGather, p->what, -1, p->sequence, p->hash});
    p->work.reset();
  }
  return p->all.to(p->device);
}

Pending Group::all_gather_rows_start(const Tensor& local,
                                     const std::vector<int64_t>& rows,
                                     std::string_view what) const {
  const GroupImpl& g = *impl_;
  auto pending = std::make_unique<Pending::Impl>();
  pending->group = impl_;
  pending->local = pending->all = local;
  pending->what = what;
  pending->device = local.device();
  if (g.size == 1) return Pending(std::move(pending));
  check_tensor(local, g, what);
  const Rows plan(rows);
  check_rows(
      static_cast<int>(rows.size()) == g.size && local.size(0) == rows[static_cast<size_t>(g.rank)],
      g,
      what,
      local.size(0),
      plan);
  const int64_t bytes = row_bytes(local);
  const Call call = begin(g,
                          CommOp::kAllGather,
                          what,
                          local.size(0) * bytes * (g.size - 1),
                          (plan.total - local.size(0)) * bytes,
                          hash_of({plan.total, bytes}));
  pending->sequence = call.sequence;
  pending->hash = call.hash;
  if (through_host(local)) pending->local = local.cpu();
  pending->all = gather_start(call, pending->local, plan, pending->work);
  return Pending(std::move(pending));
}

Tensor Group::all_gather_rows(const Tensor& local,
                              const std::vector<int64_t>& rows,
                              std::string_view what) const {
  return all_gather_rows_start(local, rows, what).wait();
}

Tensor Group::all_to_all_rows(const Tensor& rows,
                              const std::vector<int64_t>& send_rows,
                              const std::vector<int64_t>& recv_rows,
                              std::string_view what) const {
  const GroupImpl& g = *impl_;
  if (g.size == 1) return rows;
  check_tensor(rows, g, what);
  const Rows out(send_rows), in(recv_rows);
  check_rows(static_cast<int>(send_rows.size()) == g.size &&
                 static_cast<int>(recv_rows.size()) == g.size && rows.size(0) == out.total,
             g,
             what,
             rows.size(0),
             out);
  const auto own = static_cast<size_t>(g.rank);
  const int64_t bytes = row_bytes(rows);
  const Call call = begin(g,
                          CommOp::kAllToAll,
                          what,
                          (out.total - out.count[own]) * bytes,
                          (in.total - in.count[own]) * bytes,
                          hash_of({bytes}));
  if (through_host(rows)) return exchange(call, rows.cpu(), out, in).to(rows.device());
  return exchange(call, rows, out, in);
}

Tensor Group::reduce_scatter_rows(const Tensor& global,
                                  const std::vector<int64_t>& rows,
                                  std::string_view what) const {
  const GroupImpl& g = *impl_;
  if (g.size == 1) return global;
  check_tensor(global, g, what);
  const at::NoGradGuard no_grad;
  const Rows plan(rows);
  check_rows(static_cast<int>(rows.size()) == g.size && global.size(0) == plan.total,
             g,
             what,
             global.size(0),
             plan);
  const int64_t bytes = row_bytes(global), mine = rows[static_cast<size_t>(g.rank)];
  const Call call = begin(g,
                          CommOp::kReduceScatter,
                          what,
                          (plan.total - mine) * bytes,
                          mine * bytes * (g.size - 1),
                          hash_of({plan.total, bytes}));
  if (through_host(global)) return scatter_sum(call, global.cpu(), plan).to(global.device());
  return scatter_sum(call, global, plan);
}

std::vector<int64_t> Group::all_gather(int64_t value, std::string_view what) const {
  const Tensor all = all_gather_rows(at::full({1}, value, at::kLong),
                                     std::vector<int64_t>(static_cast<size_t>(impl_->size), 1),
                                     what);
  const int64_t* data = all.const_data_ptr<int64_t>();
  return {data, data + all.numel()};
}

void Group::send(const Tensor& tensor, int64_t to, int tag, std::string_view what) const {
  const GroupImpl& g = *impl_;
  check_tensor(tensor, g, what);
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  const Call call = begin(g, CommOp::kSend, what, bytes, 0, kHashStart, to);
  const Tensor data = through_host(tensor) ? tensor.cpu() : tensor;
  finish_device_work(data);
  const WorkPtr work = start(call, [&](const Until& until) {
    return transport_of(g, data).send(
        data.const_data_ptr(), bytes, static_cast<int>(to), tag, until);
  });
  wait(*work, call);
}

void Group::recv(Tensor& tensor, int64_t from, int tag, std::string_view what) const {
  const GroupImpl& g = *impl_;
  check_tensor(tensor, g, what);
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  const Call call = begin(g, CommOp::kReceive, what, 0, bytes, kHashStart, from);
  const Tensor data = through_host(tensor) ? at::empty_like(tensor, at::kCPU) : tensor;
  finish_device_work(data);
  const WorkPtr work = start(call, [&](const Until& until) {
    return transport_of(g, data).receive(
        data.mutable_data_ptr(), bytes, static_cast<int>(from), tag, until);
  });
  wait(*work, call);
  if (!data.is_same(tensor)) tensor.copy_(data);
}

void Group::broadcast(Tensor& tensor, int64_t root, std::string_view what) const {
  const GroupImpl& g = *impl_;
  if (g.size == 1) return;
  check_tensor(tensor, g, what);
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  const bool is_root = root == g.rank;
  const Call call = begin(g,
                          CommOp::kBroadcast,
                          what,
                          is_root ? bytes * (g.size - 1) : 0,
                          is_root ? 0 : bytes,
                          hash_of({bytes, root}));
  const Tensor data = through_host(tensor) ? tensor.cpu() : tensor;
  finish_device_work(data);
  const WorkPtr work = start(call, [&](const Until& until) {
    return transport_of(g, data).broadcast(
        data.mutable_data_ptr(), bytes, static_cast<int>(root), until);
  });
  wait(*work, call);
  if (!data.is_same(tensor)) tensor.copy_(data);
}

void Group::barrier(std::string_view what) const {
  const GroupImpl& g = *impl_;
  if (g.size == 1) return;
  const Call call = begin(g, CommOp::kBarrier, what, 0, 0, kHashStart);
  const WorkPtr work = start(call, [&](const Until& until) {
    return (comm_backend() == CommBackend::kMpi ? *g.host : g.nccl(true)).barrier(until);
  });
  wait(*work, call);
}

}  // namespace lockstep::parallel
