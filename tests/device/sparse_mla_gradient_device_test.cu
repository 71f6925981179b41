// Checks and times the absorbed sparse MLA backward on the device, without a test framework.
//   sparse_mla_gradient_device_test check OUT.json   against float64 and the plain form
//   sparse_mla_gradient_device_test time OUT.json    timings beside a bf16 matrix product of cuBLAS
//   sparse_mla_gradient_device_test quick OUT.json   the same at one size
//   sparse_mla_gradient_device_test small OUT.json   a few small shapes once, for compute-sanitizer
//   sparse_mla_gradient_device_test profile OUT.json two calls at 2112 tokens, for a profiler
// Exit code 0 only if every check passed.

#include "tests/device/sparse_mla_inputs.hpp"

namespace lockstep::device_test {
namespace {

using model::SparseMlaBackwardArgs;

/// What a backward pass reads beside the inputs.
struct Incoming {
  DeviceArray<uint16_t> a, da;
  DeviceArray<float> lse;
  std::vector<uint16_t> da_host;
  Incoming(const Inputs& in, float scale)
      : a(in.q.count()), da(in.q.count()), lse(in.q.count() / kRank) {
    fill(da, 99, scale);
    SparseMlaForwardArgs args = in.arguments(0, in.tokens);
    args.a_THR = a.get();
    args.lse_TH = lse.get();
    DeviceArray<unsigned char> workspace(model::sparse_mla_forward_workspace_bytes(in.tokens));
    must_launch(model::sparse_mla_forward(args, workspace.get(), workspace.count(), nullptr),
                "forward");
    must(cudaDeviceSynchronize(), "forward");
    da_host = da.download();
  }
};

SparseMlaBackwardArgs arguments(const Inputs& in, const Incoming& grad, int64_t first, int64_t n) {
  SparseMlaBackwardArgs a;
  a.tokens = n;
  a.keys = in.keys;
  a.width = in.width;
  a.heads = in.heads;
  a.q_THR = in.q.get() + first * in.heads * kRank;
  a.latent_SR = in.latent.get();
  a.selection_TW = in.selection.get() + first * in.width;
  a.scale = kScale;
  a.a_THR = grad.a.get() + first * in.heads * kRank;
  a.lse_TH = grad.lse.get() + first * in.heads;
  a.da_THR = grad.da.get() + first * in.heads * kRank;
  return a;
}

struct Output {
  std::vector<uint16_t> dq;
  std::vector<float> dlatent;
  bool operator==(const Output& o) const {
    return dq == o.dq && dlatent.size() == o.dlatent.size() &&
           std::memcmp(dlatent.data(), o.dlatent.data(), dlatent.size() * 4) == 0;
  }
};

/// Runs once on poisoned outputs and workspace, with guard bands behind them.
Output run(const Inputs& in,
           const Incoming& grad,
           int64_t first,
           int64_t count,
           int64_t at_once,
           const std::string& name) {
  Poisoned<uint16_t> dq(size_t(count) * in.heads * kRank);
  Poisoned<float> dlatent(size_t(in.keys) * kRank);
  SparseMlaBackwardArgs args = arguments(in, grad, first, count);
  args.tokens_at_once = at_once;
  args.dq_THR = dq.get();
  args.dlatent_SR = dlatent.get();
  const size_t bytes = model::sparse_mla_backward_workspace_bytes(args);
  Poisoned<unsigned char> workspace(bytes);
  must_launch(model::sparse_mla_backward(args, workspace.get(), bytes, nullptr), name);
  must(cudaDeviceSynchronize(), name.c_str());
  workspace.checked(name);
  return {dq.checked(name), dlatent.checked(name)};
}

float dot(const float* x, const float* y, double* exact) {
  double lanes[8] = {};
  for (int c = 0; c < kRank; c += 8)
    for (int l = 0; l < 8; ++l) lanes[l] += double(x[c + l]) * double(y[c + l]);
  *exact = 0;
  for (const double lane : lanes) *exact += lane;
  return float(*exact);
}

/// Gradients in float64, and those of the plain form: fp32 scores and sums, bf16 P, dS, a and dq.
struct Truth {
  std::vector<double> dq, plain_dq;            // one token, [heads, rank]
  std::vector<double> dlatent, plain_dlatent;  // [keys, rank], added to
};

void differentiate(
    const Problem& p, const Inputs& in, const Incoming& grad, int64_t token, Truth& truth) {
  std::vector<int32_t> rows;
  for (int64_t j = 0; j < p.width; ++j) {
    const int32_t row = p.selection[token * p.width + j];
    if (row >= 0 && row < p.keys) rows.push_back(row);
  }
  const size_t n = rows.size();
  std::vector<float> keys(n * kRank);
  for (size_t i = 0; i < n; ++i)
    for (int c = 0; c < kRank; ++c)
      keys[i * kRank + c] = from_bf16(in.latent_host[size_t(rows[i]) * kRank + c]);
  truth.dq.assign(size_t(p.heads) * kRank, 0.0);
  truth.plain_dq = truth.dq;
  std::vector<double> score(n), dp(n), weight(n);
  std::vector<float> plain(n);
  for (int h = 0; h < p.heads; ++h) {
    const size_t at = (size_t(token) * p.heads + h) * kRank;
    float q[kRank], da[kRank];
    for (int c = 0; c < kRank; ++c) {
      q[c] = from_bf16(in.q_host[at + c]);
      da[c] = from_bf16(grad.da_host[at + c]);
    }
    double top = -std::numeric_limits<double>::infinity(), sum = 0;
    for (size_t j = 0; j < n; ++j) {
      dot(q, &keys[j * kRank], &score[j]);
      dot(da, &keys[j * kRank], &dp[j]);
      score[j] *= double(kScale);
      top = std::max(top, score[j]);
    }
    for (size_t j = 0; j < n; ++j) sum += weight[j] = std::exp(score[j] - top);
    const float lse = float(top + std::log(sum));
    double delta = 0, plain_delta = 0;
    std::vector<double> a(kRank, 0.0);
    for (size_t j = 0; j < n; ++j) {
      weight[j] /= sum;
      delta += weight[j] * dp[j];
      plain[j] = std::exp(float(score[j]) - lse);
      const double rounded = to_bf16(plain[j]);
      for (int c = 0; c < kRank; ++c) a[c] += rounded * double(keys[j * kRank + c]);
    }
    for (int c = 0; c < kRank; ++c) plain_delta += to_bf16(a[c]) * double(da[c]);
    for (size_t j = 0; j < n; ++j) {
      const double ds = double(kScale) * weight[j] * (dp[j] - delta);
      const double plain_ds =
          to_bf16(double(kScale * plain[j] * (float(dp[j]) - float(plain_delta))));
      const double plain_p = to_bf16(plain[j]);
      double* const dk = &truth.dlatent[size_t(rows[j]) * kRank];
      double* const plain_dk = &truth.plain_dlatent[size_t(rows[j]) * kRank];
      double* const dq = &truth.dq[size_t(h) * kRank];
      double* const plain_dq = &truth.plain_dq[size_t(h) * kRank];
      const float* const key = &keys[j * kRank];
      for (int c = 0; c < kRank; ++c) {
        dq[c] += ds * double(key[c]);
        plain_dq[c] += plain_ds * double(key[c]);
        dk[c] += ds * double(q[c]) + weight[j] * double(da[c]);
        plain_dk[c] += plain_ds * double(q[c]) + plain_p * double(da[c]);
      }
    }
  }
  for (double& value : truth.plain_dq) value = to_bf16(value);
}

void check_problem(const Problem& p, float da_scale = 1) {
  const Inputs in(p);
  const Incoming grad(in, da_scale);
  const Output out = run(in, grad, 0, p.tokens, 0, p.name);
  struct Part {
    Truth truth;
    Error dq, plain_dq;
  };
  std::vector<Part> parts(std::min<size_t>(cpu_threads(), size_t(p.tokens)));
  for (Part& part : parts)
    part.truth.dlatent.assign(size_t(p.keys) * kRank, 0.0),
        part.truth.plain_dlatent = part.truth.dlatent;
  on_threads(p.tokens, parts.size(), [&](size_t thread, int64_t t) {
    Part& part = parts[thread];
    differentiate(p, in, grad, t, part.truth);
    for (size_t i = 0; i < part.truth.dq.size(); ++i) {
      part.dq.add(from_bf16(out.dq[size_t(t) * p.heads * kRank + i]), part.truth.dq[i]);
      part.plain_dq.add(part.truth.plain_dq[i], part.truth.dq[i]);
    }
  });
  Error dq, plain_dq, dlatent, plain_dlatent;
  for (const Part& part : parts) dq.add(part.dq), plain_dq.add(part.plain_dq);
  std::vector<bool> used(size_t(p.keys), false);
  for (const int32_t row : p.selection)
    if (row >= 0 && row < p.keys) used[row] = true;
  bool zero = true;
  for (size_t i = 0; i < out.dlatent.size(); ++i) {
    double exact = 0, plain = 0;
    for (const Part& part : parts)
      exact += part.truth.dlatent[i], plain += part.truth.plain_dlatent[i];
    dlatent.add(out.dlatent[i], exact);
    plain_dlatent.add(plain, exact);
    if (!used[i / kRank]) zero = zero && out.dlatent[i] == 0;
  }
  expect(zero, p.name + ": keys that nobody selects get 0");
  expect(dq.not_finite + dlatent.not_finite == 0, p.name + ": not finite");
  // Where P is exactly 1, dq is the rounding of da . c in fp32.
  expect(std::sqrt(dq.difference) <= kAllowance * std::sqrt(plain_dq.difference) +
                                         1e-6 * double(da_scale) * std::sqrt(double(dq.count)),
         p.name + ": dq, error against float64");
  // What a token gives a key has 11 significant bits.
  expect(dlatent.relative() <= kAllowance * plain_dlatent.relative() + 0x1p-12,
         p.name + ": dlatent, error against float64");
  std::printf("%-36s dq %.3e plain %.3e ratio %.3f  dlatent %.3e plain %.3e ratio %.3f\n",
              p.name.c_str(),
              dq.relative(),
              plain_dq.relative(),
              dq.relative() / std::max(plain_dq.relative(), 1e-30),
              dlatent.relative(),
              plain_dlatent.relative(),
              dlatent.relative() / std::max(plain_dlatent.relative(), 1e-30));
  char text[384];
  std::snprintf(text,
                sizeof text,
                "\"check\": \"%s\", \"dq_rel_fro\": %.3e, \"plain_dq\": %.3e, "
                "\"dlatent_rel_fro\": %.3e, \"plain_dlatent\": %.3e",
                p.name.c_str(),
                dq.relative(),
                plain_dq.relative(),
                dlatent.relative(),
                plain_dlatent.relative());
  record(text);

  expect(out == run(in, grad, 0, p.tokens, 0, p.name), p.name + ": two runs give the same bytes");
  for (const int64_t at_once : {int64_t{1}, p.tokens / 3 + 1})
    if (p.tokens / at_once < 100)
      expect(out == run(in, grad, 0, p.tokens, at_once, p.name),
             p.name + ": the number of tokens at once changes nothing");
  for (const int64_t t : {int64_t{0}, p.tokens / 2, p.tokens - 1})
    expect(same_rows(
               run(in, grad, t, 1, 0, p.name + " alone").dq, 0, out.dq, size_t(t), p.heads * kRank),
           p.name + ": a token alone gives the dq it gives in the batch");
  std::fflush(stdout);
}

void check_small() {
  for (const Problem& problem : small_problems()) check_problem(problem);
}

void check_refusals() {
  const Inputs in(full("refusals", 2, 64, 8, 1));
  const Incoming grad(in, 1);
  DeviceArray<uint16_t> dq(2 * 64 * kRank);
  DeviceArray<float> dlatent(64 * kRank);
  DeviceArray<unsigned char> workspace(1 << 20);
  const auto status = [&](auto change, size_t bytes = 1 << 20) {
    SparseMlaBackwardArgs args = arguments(in, grad, 0, 2);
    args.dq_THR = dq.get();
    args.dlatent_SR = dlatent.get();
    change(args);
    return model::sparse_mla_backward(args, workspace.get(), bytes, nullptr).status;
  };
  const auto none = [](SparseMlaBackwardArgs&) {};
  expect(status(none) == MlaCudaStatus::kOk, "a good call");
  expect(status(none, 4) == MlaCudaStatus::kWorkspaceTooSmall, "workspace");
  const auto refused = [&](auto change, const char* what) {
    expect(status(change) == MlaCudaStatus::kBadArgument, what);
  };
  refused([](auto& x) { x.heads = 65; }, "65 heads");
  refused([](auto& x) { x.scale = 0; }, "scale 0");
  refused([](auto& x) { x.latent_SR = nullptr; }, "null latent");
  refused([](auto& x) { x.lse_TH = nullptr; }, "null lse");
  refused([](auto& x) { x.da_THR += 1; }, "misaligned da");
  refused([](auto& x) { x.keys = int64_t{1} << 31; }, "too many keys");
  refused([](auto& x) { x.tokens = -1; }, "negative tokens");
  const auto zeroed = [&](auto change, const char* what) {
    dlatent.fill_bytes(0xff);
    expect(status(change) == MlaCudaStatus::kOk, what);
    for (const float value : dlatent.download()) expect(value == 0, what);
  };
  zeroed([](auto& x) { x.tokens = 0; }, "no tokens: dlatent is 0");
  zeroed([](auto& x) { x.width = 0; }, "no entries: dlatent is 0");
  for (const uint16_t value : dq.download()) expect(value == 0, "no entries: dq is 0");
}

void check_all() {
  check_refusals();
  check_small();
  check_problem(full("1 token, 2048 keys", 1, 4096, 2048, 1));
  check_problem(full("1 token, 1 key", 1, 4, 1, 1));
  check_problem(full("300 tokens, 63 keys", 300, 500, 63, 1));
  check_problem(full("300 tokens, 65 keys", 300, 500, 65, 1));
  check_problem(full("140 tokens, 2048 of 4096 keys", 140, 4096, 2048, 1));
  Problem same = full("300 tokens, the same key", 300, 100, 1, 1);
  std::fill(same.selection.begin(), same.selection.end(), 77);
  check_problem(same);
  Problem same_all = full("300 tokens, the same 64 keys", 300, 200, 64, 1);
  for (size_t i = 0; i < same_all.selection.size(); ++i)
    same_all.selection[i] = int32_t(i % 64) + 100;
  check_problem(same_all);
  check_problem(documents(
      "packed documents", {0, 1, 2, 3, 4, 5, 0, 63, 64, 65, 130, 257, 0, 7, 0}, 256, 259));
  check_problem(scattered(60, 1000, 700));
  Problem heads = full("33 heads", 150, 1024, 320, 3);
  heads.heads = 33;
  check_problem(heads);
  Problem peaked = full("large scores", 32, 4096, 2048, 9);
  peaked.q_scale = 16;
  check_problem(peaked);
  Problem equal = full("equal scores", 32, 4096, 2048, 9);
  equal.q_scale = 0;
  check_problem(equal);
  check_problem(full("small gradients", 32, 1024, 256, 9), 1e-12f);
  check_problem(full("large gradients", 32, 1024, 256, 9), 1e12f);
}

void time_one(const std::string& name,
              int64_t tokens,
              int64_t keys,
              int64_t width,
              const Rows& rows,
              int64_t at_once,
              double gemm,
              int count) {
  DeviceArray<uint16_t> q(size_t(tokens) * 64 * kRank), da0(q.count()), da1(q.count()),
      a(q.count()), dq(q.count()), latent(size_t(keys) * kRank);
  fill(q, 1, 1);
  fill(da0, 2, 1);
  fill(da1, 3, 1);
  fill(latent, 4, 1);
  DeviceArray<int32_t> selection(rows);
  DeviceArray<float> lse(size_t(tokens) * 64), dlatent(latent.count());
  {
    SparseMlaForwardArgs args;
    args.tokens = tokens, args.keys = keys, args.width = width, args.heads = 64;
    args.q_THR = q.get(), args.latent_SR = latent.get(), args.selection_TW = selection.get();
    args.scale = kScale, args.a_THR = a.get(), args.lse_TH = lse.get();
    DeviceArray<unsigned char> workspace(model::sparse_mla_forward_workspace_bytes(tokens));
    must_launch(model::sparse_mla_forward(args, workspace.get(), workspace.count(), nullptr), name);
    must(cudaDeviceSynchronize(), "forward");
  }
  SparseMlaBackwardArgs args;
  args.tokens = tokens, args.keys = keys, args.width = width, args.heads = 64;
  args.tokens_at_once = at_once;
  args.q_THR = q.get(), args.latent_SR = latent.get(), args.selection_TW = selection.get();
  args.scale = kScale, args.a_THR = a.get(), args.lse_TH = lse.get();
  args.da_THR = da0.get(), args.dq_THR = dq.get(), args.dlatent_SR = dlatent.get();
  DeviceArray<unsigned char> workspace(model::sparse_mla_backward_workspace_bytes(args));
  const auto call = [&](int i) {
    args.da_THR = (i % 2 ? da1 : da0).get();
    must_launch(model::sparse_mla_backward(args, workspace.get(), workspace.count(), nullptr),
                name);
  };
  const double ms = median_ms(count, 1, call), again = median_ms(count, 1, call);
  const int64_t used =
      std::count_if(rows.begin(), rows.end(), [](int32_t row) { return row >= 0; });
  const double rate = 10.0 * 64 * kRank * double(used) / ms * 1e-9;
  const double gigabytes = double(workspace.count()) * 1e-9;
  std::printf("%-36s %9.4f ms (again %.4f) %6.1f TFLOP/s, cuBLAS %.1f, share %.3f, %.2f GB\n",
              name.c_str(),
              ms,
              again,
              rate,
              gemm,
              rate / gemm,
              gigabytes);
  char text[256];
  std::snprintf(text,
                sizeof text,
                "\"time\": \"%s\", \"ms\": %.4f, \"ms_again\": %.4f, \"tflops\": %.1f, "
                "\"cublas_tflops\": %.1f, \"workspace_gb\": %.2f",
                name.c_str(),
                ms,
                again,
                rate,
                gemm,
                gigabytes);
  record(text);
  std::fflush(stdout);
}

void time_full(int64_t tokens, int64_t keys, int64_t at_once, double gemm, int count) {
  const std::string name = std::to_string(tokens) + " tokens, 2048 of " + std::to_string(keys) +
                           (at_once > 0 ? ", " + std::to_string(at_once) + " at once" : "");
  time_one(name, tokens, keys, 2048, anywhere(tokens, keys, 2048, 1), at_once, gemm, count);
}

void time_all() {
  const double gemm = cublas_rate();
  time_full(8192, 8192, 0, gemm, 12);
  for (const int64_t at_once : {1056, 2112, 4096}) time_full(8192, 8192, at_once, gemm, 12);
  time_full(1, 8192, 0, gemm, 20);
  time_full(132, 8192, 0, gemm, 20);
  time_full(1056, 8192, 0, gemm, 20);
  time_full(4096, 131072, 0, gemm, 12);
  time_one(
      "8192 tokens, one document", 8192, 8192, 2051, causal({8192}, 2048, 2051, 3), 0, gemm, 12);
  time_one("32768 tokens, one document",
           32768,
           32768,
           2051,
           causal({32768}, 2048, 2051, 3),
           8192,
           gemm,
           5);
  time_full(8192, 8192, 0, cublas_rate(), 12);
}

void time_quick() { time_full(8192, 8192, 0, cublas_rate(), 8); }

void profile() { time_full(2112, 8192, 0, 1, 1); }

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
