// Checks and times the indexer on the device, without a test framework.
//   indexer_device_test check OUT.json   against the CPU's operations and float64, awkward shapes
//   indexer_device_test time OUT.json    timings beside their floors
//   indexer_device_test small OUT.json   a few small shapes once, for compute-sanitizer
// Exit code 0 only if every check passed.

#include <atomic>
#include <iterator>

#include "model/ops/indexer_cuda.hpp"
#include "tests/device/device_support.hpp"
#include "tests/device/indexer_reference.hpp"

namespace lockstep::device_test {
namespace {

using model::IndexerCudaStatus;
using model::IndexerDocuments;
using model::IndexerPoolArgs;
using model::IndexerQueryArgs;
using model::IndexerScoreArgs;
using model::IndexerSelectArgs;

enum class Form { kFp8, kBf16, kRounded };

struct Problem {
  std::string name;
  std::vector<int64_t> lengths;
  int64_t kpool = 4, topk = 2048;
  Form form = Form::kFp8;
  bool tail = true, own_first = false;
  bool rotate = true, pow2 = true, bf16_weights = false;
  float weight_scale = 1, weight_shift = 0.5f;
  int coarse = 0;  // q and k in steps, so that scores repeat
};

/// Device inputs and everything that follows from them, each output poisoned before.
struct Run {
  Problem p;
  int64_t tokens, max_pools, pools = 0;
  std::vector<int64_t> cu_host{0}, first_pool{0};
  DeviceArray<uint16_t> k, gate, q;
  DeviceArray<float> ape, weight;
  DeviceArray<int64_t> cu;
  Poisoned<int64_t> offsets;
  Poisoned<uint16_t> pooled;
  Poisoned<uint8_t> pool_bytes, q_bytes;
  Poisoned<float> pool_scale, scaled;

  static std::vector<int64_t> bounds(const std::vector<int64_t>& lengths) {
    std::vector<int64_t> cu{0};
    for (const int64_t n : lengths) cu.push_back(cu.back() + n);
    return cu;
  }
  explicit Run(const Problem& problem)
      : p(problem),
        tokens(bounds(p.lengths).back()),
        max_pools(tokens / p.kpool),
        k(size_t(tokens) * kDim),
        gate(size_t(tokens) * kDim),
        q(size_t(tokens) * kHeads * kDim),
        ape(size_t(p.kpool) * kDim),
        weight(size_t(tokens) * kHeads),
        cu(bounds(p.lengths)),
        offsets(p.lengths.size() + 1),
        pooled(size_t(max_pools) * kDim),
        pool_bytes(size_t(max_pools) * kDim),
        q_bytes(size_t(tokens) * kHeads * kDim),
        pool_scale(size_t(max_pools)),
        scaled(size_t(tokens) * kHeads) {
    cu_host = bounds(p.lengths);
    for (const int64_t n : p.lengths) first_pool.push_back(first_pool.back() + n / p.kpool);
    pools = first_pool.back();
    fill(k, 1, 1);
    fill(gate, 2, 1);
    fill(q, 3, 1);
    fill(ape, 4, 0.3f, 0);
    fill(weight, 5, p.weight_scale, p.weight_shift);
    if (p.coarse > 0) {
      const auto steps = [&](const DeviceArray<uint16_t>& x) {
        std::vector<uint16_t> host = x.download();
        for (size_t i = 0; i < host.size(); ++i) {
          const size_t row = i / kDim;  // few different rows
          host[i] = bf16_bits(float(int((row / size_t(p.kpool) * 7 + i % kDim) % p.coarse)) - 1);
        }
        must(cudaMemcpy(x.get(), host.data(), host.size() * 2, cudaMemcpyHostToDevice), "upload");
      };
      steps(k);
    }
    IndexerDocuments d = documents();
    d.pool_offsets = nullptr;
    must_launch(model::indexer_pool_offsets(d, offsets.get(), nullptr), p.name);
    IndexerPoolArgs pool;
    pool.documents = documents();
    pool.quantisation = {p.rotate, p.pow2};
    pool.bf16_weights = p.bf16_weights;
    pool.k = k.get(), pool.gate = gate.get(), pool.ape = ape.get();
    pool.pooled = pooled.get(), pool.bytes = pool_bytes.get(), pool.scale = pool_scale.get();
    must_launch(model::indexer_pool(pool, nullptr), p.name);
    must_launch(model::indexer_queries(query_args(), nullptr), p.name);
    must(cudaDeviceSynchronize(), p.name.c_str());
  }
  IndexerDocuments documents() const {
    return {tokens, int64_t(p.lengths.size()), p.kpool, cu.get(), offsets.get()};
  }
  IndexerQueryArgs query_args() const {
    return {{p.rotate, p.pow2}, tokens, q.get(), weight.get(), q_bytes.get(), scaled.get()};
  }
  IndexerScoreArgs score_args(int64_t first, int64_t count) const {
    IndexerScoreArgs a;
    a.documents = documents();
    a.first = first, a.count = count;
    a.fp8 = p.form == Form::kFp8;
    a.round_dots = p.form == Form::kRounded;
    const size_t row = size_t(first) * kHeads;
    a.q = a.fp8 ? static_cast<const void*>(q_bytes.get() + row * kDim) : q.get() + row * kDim;
    a.weight = (a.fp8 ? scaled.get() : weight.get()) + row;
    a.pooled = a.fp8 ? static_cast<const void*>(pool_bytes.get()) : pooled.get();
    a.pool_scale = pool_scale.get();
    a.topk = p.topk;
    return a;
  }
  int64_t width() const { return p.tail ? p.topk + p.kpool - 1 : p.topk; }
  std::vector<int32_t> select(int64_t first, int64_t count, int64_t rows) const {
    IndexerSelectArgs a;
    a.score = score_args(first, count);
    a.select_tail = p.tail;
    a.own_pool_first = p.own_first;
    Poisoned<int32_t> selection(size_t(count * width()));
    a.selection = selection.get();
    const size_t bytes = model::indexer_select_workspace_bytes(documents(), rows);
    Poisoned<unsigned char> workspace(bytes);
    must_launch(model::indexer_select(a, workspace.get(), bytes, nullptr), p.name);
    must(cudaDeviceSynchronize(), p.name.c_str());
    workspace.checked(p.name);
    return selection.checked(p.name);
  }
  size_t document_of(int64_t token) const {
    return size_t(std::upper_bound(cu_host.begin(), cu_host.end(), token) - cu_host.begin()) - 1;
  }
};

void check_quantised(const Run& r) {
  const Problem& p = r.p;
  const std::vector<uint16_t> k = r.k.download(), gate = r.gate.download(), q = r.q.download();
  const std::vector<float> ape = r.ape.download(), weight = r.weight.download();
  const std::vector<uint16_t> pooled = r.pooled.checked(p.name);
  const std::vector<uint8_t> bytes = r.pool_bytes.checked(p.name),
                             q_bytes = r.q_bytes.checked(p.name);
  const std::vector<float> scale = r.pool_scale.checked(p.name), scaled = r.scaled.checked(p.name);
  expect(r.offsets.checked(p.name) == r.first_pool, p.name + ": first pools");
  std::atomic<int64_t> wrong_pooled{0}, wrong_bytes{0}, wrong_scale{0}, wrong_q{0}, wrong_weight{0};
  on_threads(int64_t(p.lengths.size()), cpu_threads(), [&](size_t, int64_t d) {
    for (int64_t i = 0; i < p.lengths[d] / p.kpool; ++i) {
      const int64_t row = r.cu_host[d] + i * p.kpool, pool = r.first_pool[d] + i;
      float x[kDim];
      uint8_t want[kDim];
      pool_row(&k[row * kDim], &gate[row * kDim], ape.data(), p.kpool, p.bf16_weights, x);
      for (int c = 0; c < kDim; ++c) wrong_pooled += bf16_bits(x[c]) != pooled[pool * kDim + c];
      wrong_scale += quantise_row(x, p.rotate, p.pow2, want) != scale[pool];
      for (int c = 0; c < kDim; ++c) wrong_bytes += want[c] != bytes[pool * kDim + c];
    }
  });
  const float constant = static_cast<float>(std::pow(128.0, -0.5) * std::pow(32.0, -0.5));
  on_threads(r.tokens, cpu_threads(), [&](size_t, int64_t t) {
    for (int64_t row = t * kHeads; row < (t + 1) * kHeads; ++row) {
      float x[kDim];
      uint8_t want[kDim];
      for (int c = 0; c < kDim; ++c) x[c] = bf16_value(q[row * kDim + c]);
      const float s = quantise_row(x, p.rotate, p.pow2, want);
      for (int c = 0; c < kDim; ++c) wrong_q += want[c] != q_bytes[row * kDim + c];
      wrong_weight += (weight[row] * s) * constant != scaled[row];
    }
  });
  expect(wrong_pooled == 0, p.name + ": pooled keys, bytes");
  expect(wrong_bytes == 0, p.name + ": quantised pools, bytes");
  expect(wrong_scale == 0, p.name + ": scales of pools");
  expect(wrong_q == 0, p.name + ": quantised queries, bytes");
  expect(wrong_weight == 0, p.name + ": weights times scales");
  bool untouched = true;
  for (size_t i = size_t(r.pools) * kDim; i < bytes.size(); ++i)
    untouched = untouched && bytes[i] == 0xff;
  expect(untouched, p.name + ": pools that do not exist stay unwritten");
  std::printf("%-40s differing: pooled %lld bytes %lld scales %lld q %lld weights %lld\n",
              p.name.c_str(),
              static_cast<long long>(wrong_pooled),
              static_cast<long long>(wrong_bytes),
              static_cast<long long>(wrong_scale),
              static_cast<long long>(wrong_q),
              static_cast<long long>(wrong_weight));
}

/// Scores of one token against the pools that it sees, from the operands as they are multiplied.
std::vector<double> true_scores(const Problem& p,
                                const uint8_t* q8,
                                const uint16_t* q16,
                                const float* weight,
                                const uint8_t* k8,
                                const uint16_t* k16,
                                const float* scale,
                                int64_t n) {
  std::vector<double> scores(static_cast<size_t>(n));
  const double constant = std::pow(128.0, -0.5) * std::pow(32.0, -0.5);
  std::vector<double> q(kHeads * kDim), key(kDim);
  for (int i = 0; i < kHeads * kDim; ++i)
    q[i] = p.form == Form::kFp8 ? e4m3_value(q8[i]) : double(bf16_value(q16[i]));
  for (int64_t j = 0; j < n; ++j) {
    for (int c = 0; c < kDim; ++c)
      key[c] = p.form == Form::kFp8 ? e4m3_value(k8[j * kDim + c])
                                    : double(bf16_value(k16[j * kDim + c]));
    double sum = 0;
    for (int h = 0; h < kHeads; ++h) {
      double dot = 0;
      for (int c = 0; c < kDim; ++c) dot += q[h * kDim + c] * key[c];
      if (p.form == Form::kRounded) dot = double(model::round_bf16(float(dot)));
      const double w = p.form == Form::kFp8 ? double(weight[h]) : double(weight[h]) * constant;
      sum += w * std::max(dot, 0.0);
    }
    scores[j] = p.form == Form::kFp8 ? sum * double(scale[j]) : sum;
  }
  return scores;
}

void check_problem(const Problem& p) {
  const Run r(p);
  check_quantised(r);
  if (r.tokens == 0) return;
  const int64_t stride = model::indexer_score_stride(r.documents()), budget = p.topk / p.kpool;
  Poisoned<float> scores_device(size_t(r.tokens * stride));
  must_launch(model::indexer_scores(r.score_args(0, r.tokens), scores_device.get(), nullptr),
              p.name);
  must(cudaDeviceSynchronize(), p.name.c_str());
  const std::vector<float> scores = scores_device.checked(p.name);
  const int64_t width = r.width();
  const std::vector<int32_t> selection = r.select(0, r.tokens, r.tokens);

  const std::vector<uint8_t> q8 = r.q_bytes.download(), k8 = r.pool_bytes.download();
  const std::vector<uint16_t> q16 = r.q.download(), k16 = r.pooled.download();
  const std::vector<float> weight =
                               p.form == Form::kFp8 ? r.scaled.download() : r.weight.download(),
                           scale = r.pool_scale.download();
  struct Part {
    Error error;
    int64_t wrong_rows = 0, common = 0, chosen = 0;
  };
  std::vector<Part> parts(cpu_threads());
  const int64_t step = std::max<int64_t>(1, r.tokens / 97);  // scores in float64 of some tokens
  on_threads(r.tokens, parts.size(), [&](size_t thread, int64_t t) {
    Part& part = parts[thread];
    const size_t d = r.document_of(t);
    const int64_t position = t - r.cu_host[d], full = (position + 1) / p.kpool;
    const float* row = scores.data() + t * stride + r.first_pool[d];
    const int64_t forced = p.own_first && (position + 1) % p.kpool == 0 ? full - 1 : -1;
    const std::vector<int64_t> chosen = best(row, full, budget, forced);
    std::vector<int32_t> want;
    for (const int64_t pool : chosen)
      for (int64_t j = 0; j < p.kpool; ++j)
        want.push_back(int32_t(r.cu_host[d] + pool * p.kpool + j));
    if (p.tail)
      for (int64_t j = full * p.kpool; j <= position; ++j)
        want.push_back(int32_t(r.cu_host[d] + j));
    want.resize(size_t(width), -1);
    part.wrong_rows += std::memcmp(want.data(), &selection[t * width], size_t(width) * 4) != 0;
    if (full <= budget || (t % step != 0 && t + 1 != r.tokens)) return;
    const std::vector<double> truth = true_scores(p,
                                                  &q8[size_t(t) * kHeads * kDim],
                                                  &q16[size_t(t) * kHeads * kDim],
                                                  &weight[size_t(t) * kHeads],
                                                  &k8[size_t(r.first_pool[d]) * kDim],
                                                  &k16[size_t(r.first_pool[d]) * kDim],
                                                  &scale[size_t(r.first_pool[d])],
                                                  full);
    std::vector<float> exact(truth.begin(), truth.end());
    for (int64_t j = 0; j < full; ++j) part.error.add(row[j], truth[j]);
    const std::vector<int64_t> other = best(exact.data(), full, budget, forced);
    std::vector<int64_t> common;
    std::set_intersection(
        chosen.begin(), chosen.end(), other.begin(), other.end(), std::back_inserter(common));
    part.common += int64_t(common.size());
    part.chosen += budget;
  });
  Part all;
  for (const Part& part : parts) {
    all.error.add(part.error);
    all.wrong_rows += part.wrong_rows, all.common += part.common, all.chosen += part.chosen;
  }
  const double limit = p.form == Form::kFp8 ? 1e-3 : p.form == Form::kBf16 ? 1e-5 : 1e-3;
  expect(all.error.not_finite == 0, p.name + ": scores are finite");
  expect(all.error.relative() <= limit, p.name + ": scores, error against float64");
  expect(all.wrong_rows == 0, p.name + ": selection is that of the scores");
  const double overlap = all.chosen > 0 ? double(all.common) / double(all.chosen) : 1;
  expect(overlap >= 0.99 || p.coarse > 0, p.name + ": selection beside that of float64 scores");
  std::printf("%-40s scores %.2e, rows wrong %lld, common with float64 %.5f\n",
              p.name.c_str(),
              all.error.relative(),
              static_cast<long long>(all.wrong_rows),
              overlap);
  char text[256];
  std::snprintf(text,
                sizeof text,
                "\"check\": \"%s\", \"scores_rel_fro\": %.3e, \"wrong_rows\": %lld, "
                "\"overlap_float64\": %.5f",
                p.name.c_str(),
                all.error.relative(),
                static_cast<long long>(all.wrong_rows),
                overlap);
  record(text);

  expect(r.select(0, r.tokens, 1) == selection, p.name + ": any workspace gives the same bytes");
  for (const int64_t t : {int64_t{0}, r.tokens / 2, r.tokens - 1}) {
    const std::vector<int32_t> alone = r.select(t, 1, 1);
    expect(same_rows(alone, 0, selection, size_t(t), int(width)), p.name + ": a token alone");
  }
  std::fflush(stdout);
}

Problem problem(const std::string& name, const std::vector<int64_t>& lengths, Form form) {
  Problem p;
  p.name = name, p.lengths = lengths, p.form = form;
  return p;
}

void check_small() {
  for (const Form form : {Form::kFp8, Form::kBf16, Form::kRounded}) {
    Problem p = problem("small, form " + std::to_string(int(form)), {0, 1, 3, 4, 131, 0, 77}, form);
    p.topk = 32;
    check_problem(p);
  }
}

void check_refusals() {
  const Run r(problem("refusals", {64}, Form::kFp8));
  DeviceArray<int32_t> selection(size_t(64 * r.width()));
  DeviceArray<unsigned char> workspace(1 << 16);
  const auto status = [&](auto change, size_t bytes = 1 << 16) {
    IndexerSelectArgs a;
    a.score = r.score_args(0, 64);
    a.selection = selection.get();
    change(a);
    return model::indexer_select(a, workspace.get(), bytes, nullptr).status;
  };
  expect(status([](auto&) {}) == IndexerCudaStatus::kOk, "a good call");
  expect(status([](auto&) {}, 16) == IndexerCudaStatus::kWorkspaceTooSmall, "workspace");
  const auto refused = [&](auto change, const char* what) {
    expect(status(change) == IndexerCudaStatus::kBadArgument, what);
  };
  refused([](auto& a) { a.score.topk = 2050; }, "topk between pools");
  refused([](auto& a) { a.score.topk = 4096; }, "too many pools");
  refused([](auto& a) { a.score.count = 65; }, "tokens beyond the row");
  refused([](auto& a) { a.score.pooled = nullptr; }, "null pools");
  refused([](auto& a) { a.score.documents.pool_offsets = nullptr; }, "null offsets");
  refused([](auto& a) { a.score.round_dots = true; }, "rounded dots of fp8");
  expect(status([](auto& a) { a.score.count = 0; }) == IndexerCudaStatus::kOk, "no tokens");
  must(cudaDeviceSynchronize(), "refusals");
}

/// More than 2^31 elements of q: the last document gives what it gives alone.
void check_offsets() {
  const std::string name = "beyond 2^31 elements";
  const int64_t length = 4096, count = 132;
  const Run r(problem(name, std::vector<int64_t>(count, length), Form::kBf16));
  const int64_t first = (count - 1) * length, tokens = count * length, rows = 512;
  IndexerSelectArgs a;
  a.score = r.score_args(0, tokens);
  DeviceArray<int32_t> selection(size_t(tokens * r.width()));
  a.selection = selection.get();
  DeviceArray<unsigned char> workspace(model::indexer_select_workspace_bytes(r.documents(), 4096));
  must_launch(model::indexer_select(a, workspace.get(), workspace.count(), nullptr), name);
  const std::vector<int32_t> last =
      selection.download(size_t((tokens - rows) * r.width()), size_t(rows * r.width()));
  // Alone: a row of one document with the same operands.
  a.score.documents = {length, 1, 4, nullptr, nullptr};
  DeviceArray<int64_t> cu(std::vector<int64_t>{0, length}),
      offsets(std::vector<int64_t>{0, length / 4});
  a.score.documents.cu = cu.get(), a.score.documents.pool_offsets = offsets.get();
  a.score.first = 0, a.score.count = length;
  a.score.q = r.q.get() + size_t(first) * kHeads * kDim;
  a.score.weight = r.weight.get() + size_t(first) * kHeads;
  a.score.pooled = r.pooled.get() + size_t(first / 4) * kDim;
  DeviceArray<int32_t> one(size_t(length * r.width()));
  a.selection = one.get();
  must_launch(model::indexer_select(a, workspace.get(), workspace.count(), nullptr), name);
  std::vector<int32_t> alone =
      one.download(size_t((length - rows) * r.width()), size_t(rows * r.width()));
  for (int32_t& i : alone) i = i < 0 ? i : i + int32_t(first);
  expect(alone == last, name + ": the last document");
  std::printf("%s: done\n", name.c_str());
}

void check_all() {
  check_refusals();
  check_small();
  const std::vector<int64_t> packed = {0, 1, 2, 3, 4, 5, 2047, 0, 2600, 700, 3, 3100, 0};
  for (const Form form : {Form::kFp8, Form::kBf16, Form::kRounded}) {
    const std::string suffix = ", form " + std::to_string(int(form));
    check_problem(problem("6000 tokens" + suffix, {6000}, form));
    check_problem(problem("packed documents" + suffix, packed, form));
    Problem own = problem("own pool first" + suffix, {3001, 2500}, form);
    own.own_first = true, own.tail = false, own.topk = 256;
    check_problem(own);
    Problem ties = problem("few different keys" + suffix, {5000}, form);
    ties.coarse = 5, ties.topk = 1024;
    check_problem(ties);
    Problem zero = problem("all scores 0" + suffix, {4000}, form);
    zero.weight_scale = 0, zero.weight_shift = 0, zero.topk = 512;
    check_problem(zero);
    Problem negative = problem("negative weights" + suffix, {4000}, form);
    negative.weight_shift = -2;
    check_problem(negative);
  }
  Problem wide = problem("pools of 16", {9000, 40, 700}, Form::kFp8);
  wide.kpool = 16;
  check_problem(wide);
  Problem exact = problem("exact scales, bf16 weights, not rotated", {3000}, Form::kFp8);
  exact.rotate = false, exact.pow2 = false, exact.bf16_weights = true;
  check_problem(exact);
  check_problem(problem("40000 tokens", {40000}, Form::kFp8));
  check_offsets();
}

void record_time(const std::string& name, double ms, double again, double floor) {
  std::printf("%-44s %9.4f ms (again %.4f), floor %.4f, share %.3f\n",
              name.c_str(),
              ms,
              again,
              floor,
              floor / ms);
  char text[256];
  std::snprintf(text,
                sizeof text,
                "\"time\": \"%s\", \"ms\": %.4f, \"ms_again\": %.4f, \"floor_ms\": %.4f",
                name.c_str(),
                ms,
                again,
                floor);
  record(text);
  std::fflush(stdout);
}

/// Floors: e4m3 products at 1400 and bf16 at 790 TFLOP/s; bytes at 4.23 TB/s.
void time_one(const std::string& name, const std::vector<int64_t>& lengths, Form form, int count) {
  const Run r(problem(name, lengths, form));
  const double tokens = double(r.tokens), rate = form == Form::kFp8 ? 1400e9 : 790e9;
  double flops = 0;
  for (const int64_t n : lengths) flops += 1024.0 * double(n) * double(n);
  const auto timed = [&](const std::string& what, double floor, auto call) {
    const double ms = median_ms(count, 1, call);
    record_time(name + ": " + what, ms, median_ms(count, 1, call), floor);
  };
  if (form == Form::kFp8) {
    IndexerPoolArgs pool;
    pool.documents = r.documents();
    pool.k = r.k.get(), pool.gate = r.gate.get(), pool.ape = r.ape.get();
    pool.bytes = r.pool_bytes.get(), pool.scale = r.pool_scale.get();
    timed("pools", tokens * 545 / 4.23e9, [&](int) {
      must_launch(model::indexer_pool(pool, nullptr), name);
    });
    timed("queries", tokens * 32 * 392 / 4.23e9, [&](int) {
      must_launch(model::indexer_queries(r.query_args(), nullptr), name);
    });
  }
  const int64_t rows = std::min<int64_t>(r.tokens, 32768);
  DeviceArray<unsigned char> workspace(model::indexer_select_workspace_bytes(r.documents(), rows));
  DeviceArray<int32_t> selection(size_t(r.tokens * r.width()));
  IndexerSelectArgs a;
  a.score = r.score_args(0, r.tokens);
  a.selection = selection.get();
  timed("scores", flops / rate, [&](int) {
    for (int64_t first = 0; first < r.tokens; first += rows)
      must_launch(model::indexer_scores(r.score_args(first, std::min(rows, r.tokens - first)),
                                        reinterpret_cast<float*>(workspace.get()),
                                        nullptr),
                  name);
  });
  for (const int64_t part : {rows, int64_t{4096}})
    timed("scores and selection, " + std::to_string(part) + " at once", flops / rate, [&](int) {
      must_launch(model::indexer_select(a,
                                        workspace.get(),
                                        model::indexer_select_workspace_bytes(r.documents(), part),
                                        nullptr),
                  name);
    });
}

void time_all() {
  time_one("8192 tokens, fp8", {8192}, Form::kFp8, 20);
  time_one("8192 tokens, bf16", {8192}, Form::kBf16, 20);
  time_one("32768 tokens, fp8", {32768}, Form::kFp8, 10);
  time_one("131072 tokens, fp8", {131072}, Form::kFp8, 5);
  time_one("131072 tokens, bf16", {131072}, Form::kBf16, 5);
  time_one("131072 tokens, rounded bf16", {131072}, Form::kRounded, 5);
  time_one("16 documents x 8192, fp8", std::vector<int64_t>(16, 8192), Form::kFp8, 10);
}

}  // namespace
}  // namespace lockstep::device_test

int main(int argc, char** argv) {
  using namespace lockstep::device_test;
  return device_main(argc, argv, "check|time|small", [](const std::string& mode) {
    if (mode == "check") check_all();
    if (mode == "small") check_small();
    if (mode == "time") time_all();
  });
}
