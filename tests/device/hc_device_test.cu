// Checks and times the hyper-connection boundary on the device, without a test framework.
//   hc_device_test check OUT.json     correctness on awkward sizes and adversarial inputs
//   hc_device_test time OUT.json      timings beside a device copy
//   hc_device_test quick OUT.json     timings at two sizes
//   hc_device_test small OUT.json     a few small sizes once, for compute-sanitizer
//   hc_device_test profile OUT.json   two calls each of two kinds at 8192 tokens, for a profiler
// Exit code 0 only if every check passed.

#include <cinttypes>
#include <memory>

#include "model/ops/hc_cuda.hpp"
#include "tests/device/device_support.hpp"
#include "tests/device/hc_reference.hpp"

namespace lockstep::device_test {
namespace {

using model::HcForwardArgs;
using model::HcForwardRounding;

/// Stream i of X scaled by `scale` * `step`^i (period 4096 values).
__global__ void fill_streams(uint16_t* to, size_t count, uint32_t stream, float scale, float step) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    float value = normal(i, stream) * scale;
    for (size_t k = 0; k < i / kWidth % kStreams; ++k) value *= step;
    const __nv_bfloat16_raw bits = __float2bfloat16_rn(value);
    to[i] = bits.x;
  }
}
enum class Boundary { kMiddle, kFirst, kLast };

struct Problem {
  std::string name;
  int64_t tokens;
  Boundary boundary = Boundary::kMiddle;
  float x_scale = 1, x_step = 1, y_scale = 1, logit_scale = 1;
  HcForwardRounding rounding = {};
  uint32_t seed = 1;
};

class Inputs {
 public:
  explicit Inputs(const Problem& p)
      : tokens(p.tokens),
        boundary(p.boundary),
        rounding(p.rounding),
        x(size_t(tokens) * kRow),
        y(size_t(tokens) * kWidth),
        post(tokens * 4),
        comb(tokens * 16),
        fn(size_t{kLogits} * kRow),
        base(kLogits),
        scale(3),
        norm_weight(kWidth) {
    const uint32_t s = p.seed * 16;
    fill_streams<<<1024, 256>>>(x.get(), x.count(), s, p.x_scale, p.x_step);
    fill(y, s + 1, p.y_scale);
    fill(post, s + 2, 0.3f, 1);
    fill(comb, s + 3, 0.1f, 0.25f);
    fill(fn, s + 4, 1.0f / 128, 0);
    fill(base, s + 5, 1, 0);
    fill(scale, s + 6, 0.1f * p.logit_scale, p.logit_scale);
    fill(norm_weight, s + 7, 0.2f, 1);
    must(cudaDeviceSynchronize(), "inputs");
  }
  /// `tokens` rows from `first` on.
  HcForwardArgs arguments(int64_t first, int64_t count) const {
    HcForwardArgs a;
    a.tokens = count;
    a.rounding = rounding;
    a.x = x.get() + first * kRow;
    if (boundary != Boundary::kFirst) {
      a.y = y.get() + first * kWidth;
      a.post = post.get() + first * 4;
      a.comb = comb.get() + first * 16;
    }
    if (boundary != Boundary::kLast) {
      a.fn = fn.get();
      a.base = base.get();
      a.scale = scale.get();
      a.norm_weight = norm_weight.get();
    }
    return a;
  }

  int64_t tokens;
  Boundary boundary;
  HcForwardRounding rounding;
  DeviceArray<uint16_t> x, y;
  DeviceArray<float> post, comb, fn, base, scale, norm_weight;
};

struct Output {
  std::vector<uint16_t> x_next, x_normed;
  std::vector<float> pre, post, comb, m, r;
};
bool same_token(const Output& a, int64_t t, const Output& b, int64_t other) {
  return same_rows(a.x_next, t, b.x_next, other, kRow) &&
         same_rows(a.x_normed, t, b.x_normed, other, kWidth) &&
         same_rows(a.pre, t, b.pre, other, 4) && same_rows(a.post, t, b.post, other, 4) &&
         same_rows(a.comb, t, b.comb, other, 16) && same_rows(a.m, t, b.m, other, kLogits) &&
         same_rows(a.r, t, b.r, other, 1);
}

void must_run(const HcForwardArgs& a, void* workspace, const std::string& name) {
  must_launch(model::hc_forward(a, workspace, model::hc_forward_workspace_bytes(), nullptr), name);
}

/// Runs once on poisoned outputs and workspace, with guard bands behind the outputs.
Output run(HcForwardArgs a, const std::string& name) {
  const size_t t = static_cast<size_t>(a.tokens);
  const size_t mixed = a.y != nullptr ? t : 0, projected = a.fn != nullptr ? t : 0;
  Poisoned<uint16_t> x_next(mixed * kRow), x_normed(projected * kWidth);
  Poisoned<float> pre(projected * 4), post(projected * 4), comb(projected * 16),
      m(projected * kLogits), r(projected);
  Poisoned<unsigned char> workspace(model::hc_forward_workspace_bytes());
  if (a.y != nullptr) a.x_next = x_next.get();
  if (a.fn != nullptr) {
    a.x_normed = x_normed.get();
    a.pre_next = pre.get();
    a.post_next = post.get();
    a.comb_next = comb.get();
    a.m_next = m.get();
    a.r_next = r.get();
  }
  must_run(a, workspace.get(), name);
  must(cudaDeviceSynchronize(), name.c_str());
  workspace.checked(name);
  return {x_next.checked(name),
          x_normed.checked(name),
          pre.checked(name),
          post.checked(name),
          comb.checked(name),
          m.checked(name),
          r.checked(name)};
}

/// Against float64 without roundings (exact) and with the same rounding points (emulated).
struct Errors {
  Error x_exact, x_emulated, normed_exact, normed_emulated, mixing, products, statistic;
  void add(const Errors& e) {
    x_exact.add(e.x_exact), x_emulated.add(e.x_emulated), normed_exact.add(e.normed_exact);
    normed_emulated.add(e.normed_emulated), mixing.add(e.mixing);
    products.add(e.products), statistic.add(e.statistic);
  }
  size_t not_finite() const {
    return x_exact.not_finite + normed_exact.not_finite + mixing.not_finite + products.not_finite +
           statistic.not_finite;
  }
};

Errors errors(const Inputs& in, const Output& out) {
  const auto x = in.x.download(), y = in.y.download();
  const auto post = in.post.download(), comb = in.comb.download();
  const HcForwardArgs defaults;
  const HcParameters p{in.fn.download(),
                       in.base.download(),
                       in.scale.download(),
                       in.norm_weight.download(),
                       defaults.norm_eps,
                       defaults.eps,
                       defaults.sinkhorn_iters,
                       in.rounding};
  const auto work = [&](int64_t t, Errors& e) {
    std::vector<double> exact(kRow), stored(kRow);
    for (int k = 0; k < kRow; ++k) exact[k] = from_bf16(x[t * kRow + k]);
    stored = exact;
    if (in.boundary != Boundary::kFirst) {
      const auto mix = [&](bool rounded, double* to) {
        hc_mix(&x[t * kRow], &y[t * kWidth], &post[t * 4], &comb[t * 16], in.rounding, rounded, to);
      };
      mix(false, exact.data());
      mix(true, stored.data());
      for (int k = 0; k < kRow; ++k) {
        const double value = from_bf16(out.x_next[t * kRow + k]);
        e.x_exact.add(value, exact[k]);
        e.x_emulated.add(value, stored[k]);
        stored[k] = value;  // what follows reads the stored streams
      }
    }
    if (in.boundary == Boundary::kLast) return;
    const HcToken plain = hc_collapse(exact.data(), p, false);
    const HcToken same = hc_collapse(stored.data(), p, true);
    for (int i = 0; i < 4; ++i) e.mixing.add(out.pre[t * 4 + i], same.pre[i]);
    for (int i = 0; i < 4; ++i) e.mixing.add(out.post[t * 4 + i], same.post[i]);
    for (int i = 0; i < 16; ++i) e.mixing.add(out.comb[t * 16 + i], same.comb[i]);
    for (int i = 0; i < kLogits; ++i) e.products.add(out.m[t * kLogits + i], same.m[i]);
    e.statistic.add(out.r[t], same.r);
    for (int d = 0; d < kWidth; ++d) {
      const double value = from_bf16(out.x_normed[t * kWidth + d]);
      e.normed_exact.add(value, plain.x_normed[d]);
      e.normed_emulated.add(value, same.x_normed[d]);
    }
  };
  std::vector<Errors> parts(cpu_threads());
  on_threads(in.tokens, parts.size(), [&](size_t w, int64_t t) { work(t, parts[w]); });
  Errors sum;
  for (const auto& e : parts) sum.add(e);
  return sum;
}

/// Sizes of the errors a correct kernel has: X' and x_normed differ from the emulated roundings
/// only where float32 lands on the other side of a tie; the coefficients are float32 sums.
void check_problem(const Problem& p, int repeats) {
  const Inputs in(p);
  const HcForwardArgs whole = in.arguments(0, in.tokens);
  const Output out = run(whole, p.name);
  const Errors e = errors(in, out);
  const double bound = 3e-6 * std::max(1.0f, p.logit_scale);
  const bool good = e.not_finite() == 0 && e.mixing.largest <= bound &&
                    e.x_emulated.flip_rate() <= 1e-3 && e.x_emulated.relative() <= 4e-4 &&
                    e.normed_emulated.flip_rate() <= 1e-3 + bound * 30 &&
                    e.normed_emulated.relative() <= 5e-4 && e.products.relative() <= 2e-6 &&
                    e.statistic.relative() <= 1e-6 && e.x_exact.relative() <= 6e-3;
  expect(good, p.name + ": error against float64");
  char text[512];
  std::snprintf(text,
                sizeof text,
                "\"x_exact\": %.2e, \"x_emulated\": %.2e, \"x_flips\": %.2e, \"normed_exact\": "
                "%.2e, \"normed_emulated\": %.2e, \"normed_flips\": %.2e, \"mixing_max\": %.2e, "
                "\"mixing_rel\": %.2e, \"not_finite\": %zu",
                e.x_exact.relative(),
                e.x_emulated.relative(),
                e.x_emulated.flip_rate(),
                e.normed_exact.relative(),
                e.normed_emulated.relative(),
                e.normed_emulated.flip_rate(),
                e.mixing.largest,
                e.mixing.relative(),
                e.not_finite());
  std::printf("%-34s X' %.1e (flips %.0e) normed %.1e (flips %.0e) coefficients max %.1e%s\n",
              p.name.c_str(),
              e.x_exact.relative(),
              e.x_emulated.flip_rate(),
              e.normed_exact.relative(),
              e.normed_emulated.flip_rate(),
              e.mixing.largest,
              good ? "" : "  FAIL");
  record("\"check\": \"" + p.name + "\", " + text);
  for (int i = 0; i < repeats; ++i) {
    const Output again = run(whole, p.name);
    bool same = true;
    for (int64_t t = 0; t < in.tokens; ++t) same = same && same_token(out, t, again, t);
    expect(same, p.name + ": runs must give the same bytes");
  }
  for (const int64_t t : {int64_t{0}, in.tokens / 2, in.tokens - 1})
    expect(same_token(run(in.arguments(t, 1), p.name), 0, out, t),
           p.name + ": a token alone must give the bytes it has in the batch");
  if (in.tokens > 21) {
    const Output moved = run(in.arguments(5, in.tokens - 5), p.name);
    bool same = true;
    for (int64_t t = 5; t < in.tokens; ++t) same = same && same_token(moved, t - 5, out, t);
    expect(same, p.name + ": tokens at other places must give the same bytes");
  }
  std::fflush(stdout);
}

/// Bad arguments come back as a status with an explanation, before anything is launched.
void check_refusals() {
  const Inputs in({"refusals", 3});
  const Output good = run(in.arguments(0, 3), "refusals");
  DeviceArray<uint16_t> x_next(3 * kRow), x_normed(3 * kWidth);
  DeviceArray<float> post(12), comb(48);
  const size_t bytes = model::hc_forward_workspace_bytes();
  DeviceArray<unsigned char> workspace(bytes);
  HcForwardArgs base = in.arguments(0, 3);
  base.x_next = x_next.get(), base.x_normed = x_normed.get();
  base.post_next = post.get(), base.comb_next = comb.get();
  const auto status = [&](const HcForwardArgs& a, size_t size) {
    const auto result = model::hc_forward(a, workspace.get(), size, nullptr);
    expect(result || result.detail[0] != '\0', "a refusal must say why");
    return result.status;
  };
  using model::HcCudaStatus;
  expect(status(base, bytes) == HcCudaStatus::kOk, "good arguments must be accepted");
  expect(status(base, bytes - 1) == HcCudaStatus::kWorkspaceTooSmall, "small workspace");
  HcForwardArgs a = base;
  a.y = nullptr;
  expect(status(a, bytes) == HcCudaStatus::kBadArgument, "mix without y");
  a = base;
  a.x_next = const_cast<uint16_t*>(a.x);
  expect(status(a, bytes) == HcCudaStatus::kBadArgument, "mix in place");
  a = base;
  a.x += 1;
  expect(status(a, bytes) == HcCudaStatus::kBadArgument, "misaligned x");
  a = base;
  a.comb_next = nullptr;
  expect(status(a, bytes) == HcCudaStatus::kBadArgument, "null comb_next");
  a = base;
  a.sinkhorn_iters = 0;
  expect(status(a, bytes) == HcCudaStatus::kBadArgument, "no Sinkhorn round");
  a = base;
  a.tokens = 0;
  expect(status(a, bytes) == HcCudaStatus::kOk, "no tokens");
  must(cudaDeviceSynchronize(), "refusals");
}

void check_all() {
  check_refusals();
  for (const int64_t n : {1, 2, 31, 32, 33, 63, 64, 65, 127, 1000})
    check_problem({"T " + std::to_string(n), n}, n == 1000 ? 20 : 2);
  for (const int64_t n : {1, 33, 300}) {
    check_problem({"first boundary, T " + std::to_string(n), n, Boundary::kFirst}, 1);
    check_problem({"last boundary, T " + std::to_string(n), n, Boundary::kLast}, 1);
  }
  constexpr auto kMiddle = Boundary::kMiddle;
  check_problem({"streams 1e12", 130, kMiddle, 1e12f, 1, 1e12f}, 0);
  check_problem({"streams 1e-12 (below norm_eps)", 130, kMiddle, 1e-12f, 1, 1e-12f}, 0);
  check_problem({"zero streams, y alone", 130, kMiddle, 0}, 0);
  check_problem({"zero y", 130, kMiddle, 1, 1, 0}, 0);
  check_problem({"streams 1e6 apart", 130, kMiddle, 1e9f, 1e-6f}, 0);
  check_problem({"y 1e6 times the streams", 130, kMiddle, 1, 1, 1e6f}, 0);
  check_problem({"logits saturated", 130, kMiddle, 1, 1, 1, 40}, 0);
  HcForwardRounding r;
  r.bf16_fn = r.bf16_base_scale = true;
  check_problem({"bf16 fn, base, scale", 130, kMiddle, 1, 1, 1, 1, r}, 0);
  r = {};
  r.three_mix_roundings = r.two_norm_roundings = true;
  check_problem({"three and two roundings", 130, kMiddle, 1, 1, 1, 1, r}, 1);
  r = {};
  r.bf16_coefficients = r.bf16_norm_weight = false;
  r.unrounded_statistic = true;
  check_problem({"fp32 coefficients and statistic", 130, kMiddle, 1, 1, 1, 1, r}, 1);
  check_problem({"T 8192", 8192}, 5);
}

void check_small() {
  check_problem({"small", 35}, 0);
  check_problem({"small, first boundary", 17, Boundary::kFirst}, 0);
  check_problem({"small, last boundary", 17, Boundary::kLast}, 0);
  check_problem({"small, three times round the ring", 16 * 16 * 3 + 5}, 0);
}

/// Inputs and outputs of one call, more than one set so that none stays in L2.
struct Timed {
  Inputs in;
  DeviceArray<uint16_t> x_next, x_normed;
  DeviceArray<float> pre, post, comb;
  explicit Timed(const Problem& p)
      : in(p),
        x_next(size_t(p.tokens) * kRow),
        x_normed(size_t(p.tokens) * kWidth),
        pre(p.tokens * 4),
        post(p.tokens * 4),
        comb(p.tokens * 16) {}
  HcForwardArgs arguments() const {
    HcForwardArgs a = in.arguments(0, in.tokens);
    if (a.y != nullptr) a.x_next = x_next.get();
    if (a.fn == nullptr) return a;
    a.x_normed = x_normed.get();
    a.pre_next = pre.get();
    a.post_next = post.get();
    a.comb_next = comb.get();
    return a;
  }
};

void time_all(bool quick) {
  DeviceArray<unsigned char> workspace(model::hc_forward_workspace_bytes());
  struct Row {
    int64_t tokens;
    Boundary boundary;
    const char* name;
    double bytes;  // per token: each stream, y and x_normed once
    int sinkhorn_iters = 20;
  };
  const std::vector<Row> rows = {{1, Boundary::kMiddle, "middle", 81920},
                                 {64, Boundary::kMiddle, "middle", 81920},
                                 {1024, Boundary::kMiddle, "middle", 81920},
                                 {8192, Boundary::kMiddle, "middle", 81920},
                                 {32768, Boundary::kMiddle, "middle", 81920},
                                 {131072, Boundary::kMiddle, "middle", 81920},
                                 {8192, Boundary::kFirst, "first", 40960},
                                 {8192, Boundary::kLast, "last", 73728},
                                 {8192, Boundary::kMiddle, "1 Sinkhorn round", 81920, 1}};
  for (const Row& row : rows) {
    if (quick && row.tokens != 8192 && row.tokens != 131072) continue;
    std::vector<std::unique_ptr<Timed>> sets;
    for (uint32_t seed = 1; seed <= 2; ++seed) {
      Problem p{row.name, row.tokens, row.boundary};
      p.seed = seed;
      sets.push_back(std::make_unique<Timed>(p));
    }
    const auto call = [&](int i) {
      HcForwardArgs a = sets[static_cast<size_t>(i) % sets.size()]->arguments();
      a.sinkhorn_iters = row.sinkhorn_iters;
      must_run(a, workspace.get(), row.name);
    };
    time_beside_copy("hc forward T " + std::to_string(row.tokens) + " " + row.name,
                     row.bytes * double(row.tokens),
                     row.tokens > 20000 ? 15 : 50,
                     call);
  }
}

void profile(Boundary boundary) {
  DeviceArray<unsigned char> workspace(model::hc_forward_workspace_bytes());
  const Timed set({"profile", 8192, boundary});
  for (int i = 0; i < 2; ++i) must_run(set.arguments(), workspace.get(), "profile");
  must(cudaDeviceSynchronize(), "profile");
}

}  // namespace
}  // namespace lockstep::device_test

int main(int argc, char** argv) {
  using namespace lockstep::device_test;
  return device_main(argc, argv, "check|time|quick|small|profile", [](const std::string& mode) {
    if (mode == "check") check_all();
    if (mode == "small") check_small();
    if (mode == "profile") profile(Boundary::kMiddle), profile(Boundary::kLast);
    if (mode == "time" || mode == "quick") time_all(mode == "quick");
  });
}
