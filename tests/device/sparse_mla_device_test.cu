// Checks and times the absorbed sparse MLA on the device, without a test framework.
//   sparse_mla_device_test check OUT.json     against float64 and the plain form, awkward shapes
//   sparse_mla_device_test time OUT.json      timings beside a bf16 matrix product of cuBLAS
//   sparse_mla_device_test quick OUT.json     the same at two sizes
//   sparse_mla_device_test small OUT.json     a few small shapes once, for compute-sanitizer
//   sparse_mla_device_test profile OUT.json   two calls at 4096 tokens, for a profiler
// Exit code 0 only if every check passed.

#include "tests/device/sparse_mla_inputs.hpp"

namespace lockstep::device_test {
namespace {

struct Output {
  std::vector<uint16_t> a;
  std::vector<float> lse;
};

/// Runs once on poisoned outputs and workspace, with guard bands behind them.
Output run(const Inputs& in, int64_t first, int64_t count, const std::string& name) {
  const size_t rows = size_t(count) * in.heads;
  Poisoned<uint16_t> a(rows * kRank);
  Poisoned<float> lse(rows);
  const size_t bytes = model::sparse_mla_forward_workspace_bytes(count);
  Poisoned<unsigned char> workspace(bytes);
  SparseMlaForwardArgs args = in.arguments(first, count);
  args.a_THR = a.get();
  args.lse_TH = lse.get();
  must_launch(model::sparse_mla_forward(args, workspace.get(), bytes, nullptr), name);
  must(cudaDeviceSynchronize(), name.c_str());
  workspace.checked(name);
  return {a.checked(name), lse.checked(name)};
}

/// One head of one token: float64, and the plain form (fp32 scores, bf16 of exp, unrounded sum).
struct Truth {
  double exact[kRank], plain[kRank], lse;
};
void attend(const uint16_t* q, const std::vector<float>& keys, int64_t count, Truth& truth) {
  float query[kRank];
  for (int c = 0; c < kRank; ++c) query[c] = from_bf16(q[c]);
  std::vector<double> score(count), weight(count), rounded(count);
  double top = -std::numeric_limits<double>::infinity();
  float plain_top = -std::numeric_limits<float>::infinity();
  for (int64_t j = 0; j < count; ++j) {
    const float* key = keys.data() + j * kRank;
    double lanes[8] = {};
    for (int c = 0; c < kRank; c += 8)
      for (int l = 0; l < 8; ++l) lanes[l] += double(query[c + l]) * double(key[c + l]);
    for (int l = 0; l < 8; ++l) score[j] += lanes[l];
    score[j] *= double(kScale);
    top = std::max(top, score[j]);
    plain_top = std::max(plain_top, float(score[j]));
  }
  double sum = 0, plain_sum = 0;
  for (int64_t j = 0; j < count; ++j) {
    weight[j] = std::exp(score[j] - top);
    const float e = std::exp(float(score[j]) - plain_top);
    sum += weight[j];
    plain_sum += double(e);
    rounded[j] = to_bf16(e);
  }
  std::fill_n(truth.exact, kRank, 0.0);
  std::fill_n(truth.plain, kRank, 0.0);
  for (int64_t j = 0; j < count; ++j) {
    const float* key = keys.data() + j * kRank;
    for (int c = 0; c < kRank; ++c) truth.exact[c] += weight[j] * double(key[c]);
    for (int c = 0; c < kRank; ++c) truth.plain[c] += rounded[j] * double(key[c]);
  }
  for (int c = 0; c < kRank; ++c) {
    truth.exact[c] = count > 0 ? truth.exact[c] / sum : 0;
    truth.plain[c] = count > 0 ? to_bf16(truth.plain[c] / plain_sum) : 0;
  }
  truth.lse = count > 0 ? top + std::log(sum) : top;
}

void check_problem(const Problem& p) {
  const Inputs in(p);
  const Output out = run(in, 0, p.tokens, p.name);
  const int64_t samples = std::min<int64_t>(p.samples, p.tokens);
  const int64_t step = std::max<int64_t>(1, p.tokens / std::max<int64_t>(samples, 1));
  struct Part {
    Error a, plain, lse;
    double lse_worst = 0;
    bool empty_good = true;
  };
  std::vector<Part> parts(cpu_threads());
  on_threads(samples, parts.size(), [&](size_t thread, int64_t i) {
    Part& part = parts[thread];
    const int64_t t = i + 1 == samples ? p.tokens - 1 : i * step;
    std::vector<float> keys;
    for (int64_t j = 0; j < p.width; ++j) {
      const int32_t row = p.selection[t * p.width + j];
      if (row < 0 || row >= p.keys) continue;
      for (int c = 0; c < kRank; ++c)
        keys.push_back(from_bf16(in.latent_host[size_t(row) * kRank + c]));
    }
    const int64_t count = int64_t(keys.size()) / kRank;
    for (int h = 0; h < p.heads; ++h) {
      const size_t at = size_t(t) * p.heads + h;
      Truth truth;
      attend(&in.q_host[at * kRank], keys, count, truth);
      for (int c = 0; c < kRank; ++c) {
        part.a.add(from_bf16(out.a[at * kRank + c]), truth.exact[c]);
        part.plain.add(truth.plain[c], truth.exact[c]);
        if (count == 0) part.empty_good = part.empty_good && out.a[at * kRank + c] == 0;
      }
      if (count == 0) {
        part.empty_good = part.empty_good && std::isinf(out.lse[at]) && out.lse[at] < 0;
      } else {
        part.lse.add(out.lse[at], truth.lse);
        part.lse_worst = std::max(part.lse_worst,
                                  std::fabs(out.lse[at] - truth.lse) / (1 + std::fabs(truth.lse)));
      }
    }
  });
  Part all;
  for (const Part& part : parts) {
    all.a.add(part.a), all.plain.add(part.plain), all.lse.add(part.lse);
    all.lse_worst = std::max(all.lse_worst, part.lse_worst);
    all.empty_good = all.empty_good && part.empty_good;
  }
  expect(all.a.not_finite + all.lse.not_finite == 0, p.name + ": not finite");
  expect(all.a.relative() <= kAllowance * all.plain.relative() + 1e-6,
         p.name + ": a, error against float64");
  expect(all.lse_worst <= 1e-5, p.name + ": lse, error against float64");
  expect(all.empty_good, p.name + ": tokens without keys give 0 and -inf");
  std::printf("%-44s a %.3e plain %.3e ratio %.3f lse %.1e\n",
              p.name.c_str(),
              all.a.relative(),
              all.plain.relative(),
              all.a.relative() / std::max(all.plain.relative(), 1e-30),
              all.lse_worst);
  char text[256];
  std::snprintf(text,
                sizeof text,
                "\"check\": \"%s\", \"a_rel_fro\": %.3e, \"plain_rel_fro\": %.3e, \"lse\": %.2e",
                p.name.c_str(),
                all.a.relative(),
                all.plain.relative(),
                all.lse_worst);
  record(text);

  bool finite = true;  // every token, not only the sampled ones
  for (const uint16_t bits : out.a) finite = finite && (bits & 0x7f80) != 0x7f80;
  expect(finite, p.name + ": every output is written and finite");
  const Output again = run(in, 0, p.tokens, p.name);
  expect(out.a == again.a && std::memcmp(out.lse.data(), again.lse.data(), out.lse.size() * 4) == 0,
         p.name + ": two runs give the same bytes");
  for (const int64_t t : {int64_t{0}, p.tokens / 2, p.tokens - 1}) {
    const Output alone = run(in, t, 1, p.name + " alone");
    expect(same_rows(alone.a, 0, out.a, t, p.heads * kRank) &&
               same_rows(alone.lse, 0, out.lse, t, p.heads),
           p.name + ": a token alone gives the bytes it gives in the batch");
  }
  std::fflush(stdout);
}

void check_small() {
  for (const Problem& problem : small_problems()) check_problem(problem);
}

void check_refusals() {
  const Inputs in(full("refusals", 2, 64, 8, 1));
  DeviceArray<uint16_t> a(2 * 64 * kRank);
  DeviceArray<unsigned char> workspace(1024);
  const auto status = [&](auto change, size_t bytes = 1024) {
    SparseMlaForwardArgs args = in.arguments(0, 2);
    args.a_THR = a.get();
    change(args);
    return model::sparse_mla_forward(args, workspace.get(), bytes, nullptr).status;
  };
  const auto none = [](SparseMlaForwardArgs&) {};
  expect(status(none) == MlaCudaStatus::kOk, "a good call");
  expect(status(none, 4) == MlaCudaStatus::kWorkspaceTooSmall, "workspace");
  const auto refused = [&](auto change, const char* what) {
    expect(status(change) == MlaCudaStatus::kBadArgument, what);
  };
  refused([](auto& x) { x.heads = 65; }, "65 heads");
  refused([](auto& x) { x.scale = 0; }, "scale 0");
  refused([](auto& x) { x.latent_SR = nullptr; }, "null latent");
  refused([](auto& x) { x.q_THR += 1; }, "misaligned q");
  refused([](auto& x) { x.keys = int64_t{1} << 31; }, "too many keys");
  refused([](auto& x) { x.tokens = -1; }, "negative tokens");
  expect(status([](auto& x) { x.tokens = 0; }) == MlaCudaStatus::kOk, "no tokens");
  must(cudaDeviceSynchronize(), "refusals");
}

/// More than 2^31 elements of q, a and the latent: the last token gives the bytes it gives alone
/// with its keys moved to the front.
void check_offsets() {
  const std::string name = "beyond 2^31 elements";
  const int64_t tokens = 65600, keys = 4200000, width = 64;
  DeviceArray<uint16_t> q(size_t(tokens) * 64 * kRank), latent(size_t(keys) * kRank);
  fill(q, 1, 1);
  fill(latent, 2, 1);
  Rows rows(size_t(tokens) * width, -1), front(width);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t j = 0; j < width; ++j)
      rows[t * width + j] = int32_t(t % 400 == 0 ? keys - 1 - j * 3 : -1);
  for (int64_t j = 0; j < width; ++j) {
    rows[(tokens - 1) * width + j] = int32_t(keys - 1 - j * 3);
    front[j] = int32_t(width * 3 - 1 - j * 3);
  }
  DeviceArray<int32_t> selection(rows), selection_front(front);
  DeviceArray<uint16_t> a(size_t(tokens) * 64 * kRank), a_front(64 * kRank);
  a.fill_bytes(0xff);
  DeviceArray<unsigned char> workspace(model::sparse_mla_forward_workspace_bytes(tokens));
  SparseMlaForwardArgs args;
  args.tokens = tokens;
  args.keys = keys;
  args.width = width;
  args.heads = 64;
  args.q_THR = q.get();
  args.latent_SR = latent.get();
  args.selection_TW = selection.get();
  args.scale = kScale;
  args.a_THR = a.get();
  must_launch(model::sparse_mla_forward(args, workspace.get(), workspace.count(), nullptr), name);
  args.tokens = 1;
  args.keys = width * 3;
  args.q_THR += size_t(tokens - 1) * 64 * kRank;
  args.latent_SR += size_t(keys - width * 3) * kRank;
  args.selection_TW = selection_front.get();
  args.a_THR = a_front.get();
  must_launch(model::sparse_mla_forward(args, workspace.get(), workspace.count(), nullptr), name);
  must(cudaDeviceSynchronize(), name.c_str());
  const std::vector<uint16_t> last = a.download(size_t(tokens - 1) * 64 * kRank, 64 * kRank);
  expect(last == a_front.download(), name + ": the last token");
  bool some = false;
  for (const uint16_t bits : last) some = some || (bits != 0 && bits != 0xffff);
  expect(some, name + ": values");
  std::printf("%s: done\n", name.c_str());
}

void check_all() {
  check_refusals();
  check_small();
  check_problem(full("1 token, 2048 keys", 1, 4096, 2048, 1));
  check_problem(full("1 token, 1 key", 1, 4, 1, 1));
  check_problem(full("300 tokens, 63 keys", 300, 500, 63, 1));
  check_problem(full("300 tokens, 65 keys", 300, 500, 65, 1));
  check_problem(full("1000 tokens, 2048 of 8192 keys", 1000, 8192, 2048, 1));
  check_problem(documents("2600 tokens, one document", {2600}, 2048, 2051));
  Problem packed = documents(
      "packed documents", {0, 1, 2, 3, 4, 5, 0, 63, 64, 65, 130, 257, 0, 1030, 7, 0}, 512, 515);
  packed.samples = 64;
  check_problem(packed);
  check_problem(scattered(60, 1000, 700));
  Problem heads = full("33 heads", 150, 1024, 320, 3);
  heads.heads = 33;
  check_problem(heads);
  Problem peaked = full("large scores", 64, 4096, 2048, 9);
  peaked.q_scale = 16;
  check_problem(peaked);
  Problem equal = full("equal scores", 32, 4096, 2048, 9);
  equal.q_scale = 0;
  check_problem(equal);
  // The maximum grows from group to group: key j is parallel to q and longer than the ones before.
  Problem growing = {"growing scores", 20, 2048, 2048, {}};
  for (int64_t i = 0; i < 20 * 2048; ++i) growing.selection.push_back(int32_t(i % 2048));
  growing.change = [](std::vector<uint16_t>& q, std::vector<uint16_t>& latent) {
    for (size_t i = 0; i < q.size(); ++i)
      q[i] = __nv_bfloat16_raw(__float2bfloat16_rn(0.05f * from_bf16(q[i]) + 0.5f)).x;
    for (size_t i = 0; i < latent.size(); ++i)
      latent[i] = __nv_bfloat16_raw(
                      __float2bfloat16_rn(0.3f * from_bf16(latent[i]) + 0.004f * float(i / kRank)))
                      .x;
  };
  check_problem(growing);
  check_offsets();
}

struct Timing {
  std::string name;
  int64_t tokens, keys, width;
  Rows selection;
};

void time_one(const Timing& timing, double gemm, int count) {
  DeviceArray<uint16_t> q0(size_t(timing.tokens) * 64 * kRank), q1(q0.count()), a(q0.count()),
      latent0(size_t(timing.keys) * kRank), latent1(latent0.count());
  fill(q0, 1, 1);
  fill(q1, 2, 1);
  fill(latent0, 3, 1);
  fill(latent1, 4, 1);
  DeviceArray<int32_t> selection(timing.selection);
  DeviceArray<float> lse(size_t(timing.tokens) * 64);
  DeviceArray<unsigned char> workspace(model::sparse_mla_forward_workspace_bytes(timing.tokens));
  const auto call = [&](int i) {
    SparseMlaForwardArgs args;
    args.tokens = timing.tokens;
    args.keys = timing.keys;
    args.width = timing.width;
    args.heads = 64;
    args.q_THR = (i % 2 ? q1 : q0).get();
    args.latent_SR = (i % 2 ? latent1 : latent0).get();
    args.selection_TW = selection.get();
    args.scale = kScale;
    args.a_THR = a.get();
    args.lse_TH = lse.get();
    must_launch(model::sparse_mla_forward(args, workspace.get(), workspace.count(), nullptr),
                timing.name);
  };
  const double ms = median_ms(count, 1, call), again = median_ms(count, 1, call);
  const int64_t used = std::count_if(
      timing.selection.begin(), timing.selection.end(), [](int32_t row) { return row >= 0; });
  const double flops = 4.0 * 64 * kRank * double(used), rate = flops / ms * 1e-9;
  std::printf("%-36s %9.4f ms (again %.4f) %6.1f TFLOP/s, cuBLAS %.1f, share %.3f\n",
              timing.name.c_str(),
              ms,
              again,
              rate,
              gemm,
              rate / gemm);
  char text[256];
  std::snprintf(text,
                sizeof text,
                "\"time\": \"%s\", \"ms\": %.4f, \"ms_again\": %.4f, \"tflops\": %.1f, "
                "\"cublas_tflops\": %.1f",
                timing.name.c_str(),
                ms,
                again,
                rate,
                gemm);
  record(text);
  std::fflush(stdout);
}

Timing full_timing(int64_t tokens, int64_t keys) {
  return {std::to_string(tokens) + " tokens, 2048 of " + std::to_string(keys),
          tokens,
          keys,
          2048,
          anywhere(tokens, keys, 2048, 1)};
}

void time_all() {
  const double gemm = cublas_rate();
  time_one(full_timing(8192, 8192), gemm, 20);
  time_one(full_timing(1, 8192), gemm, 20);
  time_one(full_timing(132, 8192), gemm, 20);
  time_one(full_timing(1056, 8192), gemm, 20);
  time_one(full_timing(4096, 131072), gemm, 20);
  const auto documents = [&](const std::string& name, const std::vector<int64_t>& lengths) {
    const int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    time_one({name, tokens, tokens, 2051, causal(lengths, 2048, 2051, 3)}, gemm, 20);
  };
  documents("8192 tokens, one document", {8192});
  documents("32 documents x 256", std::vector<int64_t>(32, 256));
  documents("32768 tokens, one document", {32768});
  time_one(full_timing(8192, 8192), cublas_rate(), 20);
}

void time_quick() {
  const double gemm = cublas_rate();
  for (const int64_t tokens : {1056, 8192}) time_one(full_timing(tokens, 8192), gemm, 20);
}

void profile() { time_one(full_timing(2112, 8192), 1, 1); }

}  // namespace
}  // namespace lockstep::device_test

int main(int argc, char** argv) {
  using namespace lockstep::device_test;
  return device_main(argc, argv, "check|time|quick|small|profile", [](const std::string& mode) {
    if (mode == "check") check_all();
    if (mode == "small") check_small();
    if (mode == "time") time_all();
    if (mode == "quick") time_quick();
    if (mode == "profile") profile();
  });
}
