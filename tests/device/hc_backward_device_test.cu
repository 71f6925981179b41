// Checks and times the hyper-connection boundary backward on the device, without a test framework.
//   hc_backward_device_test check OUT.json     correctness on awkward sizes and inputs
//   hc_backward_device_test time OUT.json      timings beside a device copy
//   hc_backward_device_test small OUT.json     a few small sizes once, for compute-sanitizer
//   hc_backward_device_test profile OUT.json   two calls at 8192 tokens, for a profiler
// Exit code 0 only if every check passed.

#include <cinttypes>
#include <memory>

#include "model/ops/hc_cuda.hpp"
#include "tests/device/device_support.hpp"
#include "tests/device/hc_backward_reference.hpp"

namespace lockstep::device_test {
namespace {

using model::HcBackwardArgs;
using model::HcForwardArgs;
using model::HcForwardRounding;

enum class Boundary { kMiddle, kFirst, kLast };

struct Problem {
  std::string name;
  int64_t tokens;
  Boundary boundary = Boundary::kMiddle;
  float x_scale = 1, y_scale = 1, logit_scale = 1, gradient_scale = 1;
  HcForwardRounding rounding = {};
  int sinkhorn_iters = 20;
  uint32_t seed = 1;
};

/// Inputs of the backward call; m and r come from the forward kernel.
class Inputs {
 public:
  explicit Inputs(const Problem& p)
      : problem(p),
        tokens(p.tokens),
        x(size_t(tokens) * kRow),
        y(size_t(tokens) * kWidth),
        dx_next(size_t(tokens) * kRow),
        dx_normed(size_t(tokens) * kWidth),
        post(tokens * 4),
        comb(tokens * 16),
        dpost_next(tokens * 4),
        dcomb_next(tokens * 16),
        m(tokens * kLogits),
        r(tokens),
        fn(size_t{kLogits} * kRow),
        base(kLogits),
        scale(3),
        norm_weight(kWidth) {
    const uint32_t s = p.seed * 16;
    fill(x, s, p.x_scale);
    fill(y, s + 1, p.y_scale);
    fill(post, s + 2, 0.3f, 1);
    fill(comb, s + 3, 0.1f, 0.25f);
    fill(fn, s + 4, 1.0f / 128, 0);
    fill(base, s + 5, 1, 0);
    fill(scale, s + 6, 0.1f * p.logit_scale, p.logit_scale);
    fill(norm_weight, s + 7, 0.2f, 1);
    fill(dx_next, s + 8, p.gradient_scale);
    fill(dx_normed, s + 9, p.gradient_scale);
    fill(dpost_next, s + 10, 40 * p.gradient_scale, 0);  // sums over 4096 channels
    fill(dcomb_next, s + 11, 40 * p.gradient_scale, 0);
    if (mixes() && projects()) {
      DeviceArray<uint16_t> x_next(x.count());
      forward(x_next.get());
    } else if (projects()) {
      forward(nullptr);
    }
    must(cudaDeviceSynchronize(), "inputs");
  }
  bool mixes() const { return problem.boundary != Boundary::kFirst; }
  bool projects() const { return problem.boundary != Boundary::kLast; }
  /// `count` rows from `first` on.
  HcBackwardArgs arguments(int64_t first, int64_t count) const {
    HcBackwardArgs a;
    a.tokens = count;
    a.rounding = problem.rounding;
    a.sinkhorn_iters = problem.sinkhorn_iters;
    a.x = x.get() + first * kRow;
    a.dx_next = dx_next.get() + first * kRow;
    if (mixes()) {
      a.y = y.get() + first * kWidth;
      a.post = post.get() + first * 4;
      a.comb = comb.get() + first * 16;
    }
    if (!projects()) return a;
    a.dx_normed = dx_normed.get() + first * kWidth;
    a.fn = fn.get(), a.base = base.get(), a.scale = scale.get();
    a.norm_weight = norm_weight.get();
    a.m = m.get() + first * kLogits;
    a.r = r.get() + first;
    a.dpost_next = dpost_next.get() + first * 4;
    a.dcomb_next = dcomb_next.get() + first * 16;
    return a;
  }

  Problem problem;
  int64_t tokens;
  DeviceArray<uint16_t> x, y, dx_next, dx_normed;
  DeviceArray<float> post, comb, dpost_next, dcomb_next, m, r, fn, base, scale, norm_weight;

 private:
  void forward(uint16_t* x_next) {
    if (tokens == 0) return;
    DeviceArray<uint16_t> x_normed(y.count());
    DeviceArray<float> post_next(tokens * 4), comb_next(tokens * 16);
    DeviceArray<unsigned char> workspace(model::hc_forward_workspace_bytes());
    HcForwardArgs a;
    a.tokens = tokens;
    a.rounding = problem.rounding;
    a.sinkhorn_iters = problem.sinkhorn_iters;
    a.x = x.get();
    if (mixes()) a.y = y.get(), a.post = post.get(), a.comb = comb.get(), a.x_next = x_next;
    a.fn = fn.get(), a.base = base.get(), a.scale = scale.get(), a.norm_weight = norm_weight.get();
    a.x_normed = x_normed.get(), a.post_next = post_next.get(), a.comb_next = comb_next.get();
    a.m_next = m.get(), a.r_next = r.get();
    must_launch(model::hc_forward(a, workspace.get(), workspace.count(), nullptr), "forward");
    must(cudaDeviceSynchronize(), "forward");
  }
};

struct Output {
  std::vector<uint16_t> dx, dy;
  std::vector<float> dpost, dcomb, dfn, dbase, dscale, dnorm_weight;
};
bool same_token(const Output& a, int64_t t, const Output& b, int64_t other) {
  return same_rows(a.dx, t, b.dx, other, kRow) && same_rows(a.dy, t, b.dy, other, kWidth) &&
         same_rows(a.dpost, t, b.dpost, other, 4) && same_rows(a.dcomb, t, b.dcomb, other, 16);
}
bool same(const Output& a, const Output& b) {
  return a.dx == b.dx && a.dy == b.dy && a.dpost == b.dpost && a.dcomb == b.dcomb &&
         a.dfn == b.dfn && a.dbase == b.dbase && a.dscale == b.dscale &&
         a.dnorm_weight == b.dnorm_weight;
}

/// Runs once on poisoned outputs and workspace, with guard bands behind them.
Output run(HcBackwardArgs a, const std::string& name) {
  const size_t t = static_cast<size_t>(a.tokens);
  const bool mixes = a.y != nullptr, projects = a.fn != nullptr;
  const size_t mixed = mixes ? t : 0, once = projects ? 1 : 0;
  Poisoned<uint16_t> dx(t * kRow), dy(mixed * kWidth);
  Poisoned<float> dpost(mixed * 4), dcomb(mixed * 16), dfn(once * kLogits * kRow),
      dbase(once * kLogits), dscale(once * 3), dnorm_weight(once * kWidth);
  const size_t bytes = model::hc_backward_workspace_bytes(a.tokens);
  Poisoned<unsigned char> workspace(bytes);
  a.dx = dx.get();
  if (mixes) a.dy = dy.get(), a.dpost = dpost.get(), a.dcomb = dcomb.get();
  if (projects) {
    a.dfn = dfn.get(), a.dbase = dbase.get(), a.dscale = dscale.get();
    a.dnorm_weight = dnorm_weight.get();
  }
  must_launch(model::hc_backward(a, workspace.get(), bytes, nullptr), name);
  must(cudaDeviceSynchronize(), name.c_str());
  workspace.checked(name);
  return {dx.checked(name),
          dy.checked(name),
          dpost.checked(name),
          dcomb.checked(name),
          dfn.checked(name),
          dbase.checked(name),
          dscale.checked(name),
          dnorm_weight.checked(name)};
}

/// Against exact gradients: the kernel's, and those of operators that round every gradient.
struct Errors {
  Error dx, dy, dpost, dcomb, plain_dx, plain_dy, plain_dpost, plain_dcomb;
  Error dfn, dbase, dscale, dnorm_weight, m;
  HcParameterGradients sums;
  void add(const Errors& e) {
    dx.add(e.dx), dy.add(e.dy), dpost.add(e.dpost), dcomb.add(e.dcomb);
    plain_dx.add(e.plain_dx), plain_dy.add(e.plain_dy);
    plain_dpost.add(e.plain_dpost), plain_dcomb.add(e.plain_dcomb);
    sums.add(e.sums);
  }
};

Errors errors(const Inputs& in, const Output& out) {
  const auto x = in.x.download(), y = in.y.download(), dx_next = in.dx_next.download(),
             dx_normed = in.dx_normed.download();
  const auto post = in.post.download(), comb = in.comb.download(),
             dpost_next = in.dpost_next.download(), dcomb_next = in.dcomb_next.download();
  const HcBackwardArgs defaults;
  const HcParameters p{in.fn.download(),
                       in.base.download(),
                       in.scale.download(),
                       in.norm_weight.download(),
                       defaults.norm_eps,
                       defaults.eps,
                       in.problem.sinkhorn_iters,
                       in.problem.rounding};
  const size_t threads = std::min<size_t>(cpu_threads(), size_t(in.tokens));
  std::vector<Errors> parts(threads);
  on_threads(in.tokens, threads, [&](size_t thread, int64_t t) {
    Errors& e = parts[thread];
    HcTokenGradients exact, plain;
    hc_backward_token({&x[t * kRow],
                       in.mixes() ? &y[t * kWidth] : nullptr,
                       &dx_next[t * kRow],
                       in.projects() ? &dx_normed[t * kWidth] : nullptr,
                       &post[t * 4],
                       &comb[t * 16],
                       &dpost_next[t * 4],
                       &dcomb_next[t * 16]},
                      p,
                      true,
                      exact,
                      plain,
                      e.sums);
    const auto compare = [&](const std::vector<double>& truth,
                             const std::vector<double>& other,
                             const auto& value,
                             Error& own,
                             Error& others) {
      for (size_t k = 0; k < truth.size(); ++k) {
        own.add(value(t * truth.size() + k), truth[k]);
        others.add(other[k], truth[k]);
      }
    };
    compare(
        exact.dx, plain.dx, [&](size_t k) { return from_bf16(out.dx[k]); }, e.dx, e.plain_dx);
    if (!in.mixes()) return;
    compare(
        exact.dy, plain.dy, [&](size_t k) { return from_bf16(out.dy[k]); }, e.dy, e.plain_dy);
    compare(
        exact.dpost,
        plain.dpost,
        [&](size_t k) { return double(out.dpost[k]); },
        e.dpost,
        e.plain_dpost);
    compare(
        exact.dcomb,
        plain.dcomb,
        [&](size_t k) { return double(out.dcomb[k]); },
        e.dcomb,
        e.plain_dcomb);
  });
  Errors sum;
  for (const auto& e : parts) sum.add(e);
  const auto parameters =
      [](const std::vector<float>& v, const std::vector<double>& truth, Error& e) {
        for (size_t k = 0; k < v.size(); ++k) e.add(v[k], truth[k]);
      };
  parameters(out.dfn, sum.sums.fn, sum.dfn);
  parameters(out.dbase, sum.sums.base, sum.dbase);
  parameters(out.dscale, sum.sums.scale, sum.dscale);
  parameters(out.dnorm_weight, sum.sums.norm_weight, sum.dnorm_weight);
  return sum;
}

/// The reference against differences of the forward reference, without roundings.
void check_reference() {
  const Inputs in({"reference", 1});
  auto x = in.x.download(), y = in.y.download(), dx_next = in.dx_next.download(),
       dx_normed = in.dx_normed.download();
  auto post = in.post.download(), comb = in.comb.download(), dpost = in.dpost_next.download(),
       dcomb = in.dcomb_next.download();
  HcParameters p{in.fn.download(),
                 in.base.download(),
                 in.scale.download(),
                 in.norm_weight.download(),
                 1e-5f,
                 1e-6f,
                 20,
                 {}};
  const auto loss = [&] {
    std::vector<double> z(kRow);
    hc_mix(x.data(), y.data(), post.data(), comb.data(), p.rounding, false, z.data());
    const HcToken token = hc_collapse(z.data(), p, false);
    double sum = 0;
    for (int k = 0; k < kRow; ++k) sum += z[k] * from_bf16(dx_next[k]);
    for (int k = 0; k < kWidth; ++k) sum += token.x_normed[k] * from_bf16(dx_normed[k]);
    for (int k = 0; k < 4; ++k) sum += token.post[k] * dpost[k];
    for (int k = 0; k < 16; ++k) sum += token.comb[k] * dcomb[k];
    return sum;
  };
  HcTokenGradients exact, plain;
  HcParameterGradients sums;
  hc_backward_token({x.data(),
                     y.data(),
                     dx_next.data(),
                     dx_normed.data(),
                     post.data(),
                     comb.data(),
                     dpost.data(),
                     dcomb.data()},
                    p,
                    false,
                    exact,
                    plain,
                    sums);
  double worst = 0;
  const auto compare = [&](auto& value, double step, double gradient) {
    const auto kept = value;
    const auto at = [&](double by) {
      value = static_cast<std::remove_reference_t<decltype(value)>>(kept + by);
      const std::pair<double, double> result{double(value), loss()};
      value = kept;
      return result;
    };
    const auto up = at(step), down = at(-step);
    const double slope = (up.second - down.second) / (up.first - down.first);
    worst = std::max(worst, std::fabs(slope - gradient) / (1e-2 + std::fabs(gradient)));
  };
  // A bf16 value moves by one unit in the last place either way.
  const auto compare_bf16 = [&](uint16_t& bits, double gradient) {
    const uint16_t kept = bits;
    const double middle = from_bf16(kept);
    bits = kept + 1;
    const double up = from_bf16(bits), loss_up = loss();
    bits = kept - 1;
    const double down = from_bf16(bits), loss_down = loss();
    bits = kept;
    if (middle != 0)
      worst = std::max(
          worst,
          std::fabs((loss_up - loss_down) / (up - down) - gradient) / (1e-2 + std::fabs(gradient)));
  };
  for (const int k : {3, 4099, 9000, 16383}) compare_bf16(x[k], exact.dx[k]);
  for (const int k : {0, 777, 4095}) compare_bf16(y[k], exact.dy[k]);
  for (int k = 0; k < 4; ++k) compare(post[k], 1e-3, exact.dpost[k]);
  for (int k = 0; k < 16; ++k) compare(comb[k], 1e-3, exact.dcomb[k]);
  for (int row = 0; row < kLogits; row += 5)
    compare(p.fn[size_t(row) * kRow + 123 * row], 1e-3, sums.fn[size_t(row) * kRow + 123 * row]);
  for (int k = 0; k < kLogits; ++k) compare(p.base[k], 1e-3, sums.base[k]);
  for (int k = 0; k < 3; ++k) compare(p.scale[k], 1e-3, sums.scale[k]);
  for (const int k : {1, 4000}) compare(p.norm_weight[k], 1e-2, sums.norm_weight[k]);
  std::printf("reference against differences: worst %.1e\n", worst);
  expect(worst < 2e-3, "the reference disagrees with differences of the forward reference");
}

/// `parameter_bound`: relative error of the sums over tokens.
void check_problem(const Problem& p, int repeats, double parameter_bound = 1e-4) {
  const Inputs in(p);
  const HcBackwardArgs whole = in.arguments(0, in.tokens);
  const Output out = run(whole, p.name);
  const Errors e = errors(in, out);
  bool good = true;
  const auto within = [&](const Error& own, const Error& plain) {
    good = good && own.not_finite == 0 && own.relative() <= 1.25 * plain.relative() + 1e-6;
  };
  within(e.dx, e.plain_dx), within(e.dy, e.plain_dy), within(e.dpost, e.plain_dpost);
  within(e.dcomb, e.plain_dcomb);
  for (const Error* s : {&e.dfn, &e.dbase, &e.dscale, &e.dnorm_weight})
    good = good && s->not_finite == 0 && s->relative() <= parameter_bound;
  expect(good, p.name + ": error against float64");
  char text[640];
  std::snprintf(
      text,
      sizeof text,
      "\"dx\": %.2e, \"dx_plain\": %.2e, \"dy\": %.2e, \"dy_plain\": %.2e, \"dpost\": %.2e, "
      "\"dpost_plain\": %.2e, \"dcomb\": %.2e, \"dcomb_plain\": %.2e, \"dfn\": %.2e, "
      "\"dbase\": %.2e, \"dscale\": %.2e, \"dnorm_weight\": %.2e",
      e.dx.relative(),
      e.plain_dx.relative(),
      e.dy.relative(),
      e.plain_dy.relative(),
      e.dpost.relative(),
      e.plain_dpost.relative(),
      e.dcomb.relative(),
      e.plain_dcomb.relative(),
      e.dfn.relative(),
      e.dbase.relative(),
      e.dscale.relative(),
      e.dnorm_weight.relative());
  std::printf(
      "%-32s dx %.1e (plain %.1e) dy %.1e (%.1e) dpost %.1e (%.1e) dcomb %.1e (%.1e) dfn %.1e "
      "dbase "
      "%.1e dscale %.1e dw %.1e%s\n",
      p.name.c_str(),
      e.dx.relative(),
      e.plain_dx.relative(),
      e.dy.relative(),
      e.plain_dy.relative(),
      e.dpost.relative(),
      e.plain_dpost.relative(),
      e.dcomb.relative(),
      e.plain_dcomb.relative(),
      e.dfn.relative(),
      e.dbase.relative(),
      e.dscale.relative(),
      e.dnorm_weight.relative(),
      good ? "" : "  FAIL");
  record("\"check\": \"" + p.name + "\", " + text);
  for (int i = 0; i < repeats; ++i)
    expect(same(run(whole, p.name), out), p.name + ": runs must give the same bytes");
  for (const int64_t t : {int64_t{0}, in.tokens / 2, in.tokens - 1})
    expect(same_token(run(in.arguments(t, 1), p.name), 0, out, t),
           p.name + ": a token alone must give the bytes it has in the batch");
  if (in.tokens > 21) {
    const Output moved = run(in.arguments(5, in.tokens - 5), p.name);
    bool equal = true;
    for (int64_t t = 5; t < in.tokens; ++t) equal = equal && same_token(moved, t - 5, out, t);
    expect(equal, p.name + ": tokens at other places must give the same bytes");
  }
  std::fflush(stdout);
}

/// Bad arguments come back as a status with an explanation, before anything is launched.
void check_refusals() {
  const Inputs in({"refusals", 3});
  DeviceArray<uint16_t> dx(3 * kRow), dy(3 * kWidth);
  DeviceArray<float> dpost(12), dcomb(48), dfn(kLogits * kRow), dbase(kLogits), dscale(3),
      dweight(kWidth);
  const size_t bytes = model::hc_backward_workspace_bytes(3);
  DeviceArray<unsigned char> workspace(bytes);
  HcBackwardArgs good = in.arguments(0, 3);
  good.dx = dx.get(), good.dy = dy.get(), good.dpost = dpost.get(), good.dcomb = dcomb.get();
  good.dfn = dfn.get(), good.dbase = dbase.get(), good.dscale = dscale.get();
  good.dnorm_weight = dweight.get();
  using model::HcCudaStatus;
  const auto refused = [&](const char* what,
                           const auto& change,
                           size_t size,
                           HcCudaStatus wanted = HcCudaStatus::kBadArgument) {
    HcBackwardArgs a = good;
    change(a);
    const auto result = model::hc_backward(a, workspace.get(), size, nullptr);
    expect(result.status == wanted, std::string("refusals: ") + what);
    expect(result || result.detail[0] != '\0', "a refusal must say why");
  };
  refused(
      "good arguments", [](auto&) {}, bytes, HcCudaStatus::kOk);
  refused(
      "small workspace", [](auto&) {}, bytes - 1, HcCudaStatus::kWorkspaceTooSmall);
  refused(
      "no y", [](auto& a) { a.y = nullptr; }, bytes);
  refused(
      "no dfn", [](auto& a) { a.dfn = nullptr; }, bytes);
  refused(
      "no dx_next", [](auto& a) { a.dx_next = nullptr; }, bytes);
  refused(
      "in place", [](auto& a) { a.dx = const_cast<uint16_t*>(a.dx_next); }, bytes);
  refused(
      "misaligned", [](auto& a) { a.x += 1; }, bytes);
  refused(
      "no Sinkhorn round", [](auto& a) { a.sinkhorn_iters = 0; }, bytes);
  refused(
      "too many Sinkhorn rounds", [](auto& a) { a.sinkhorn_iters = 65; }, bytes);
  dfn.fill_bytes(0xff), dbase.fill_bytes(0xff), dscale.fill_bytes(0xff), dweight.fill_bytes(0xff);
  refused(
      "no tokens", [](auto& a) { a.tokens = 0; }, bytes, HcCudaStatus::kOk);
  must(cudaDeviceSynchronize(), "refusals");
  bool zero = true;
  for (const auto* v : {&dfn, &dbase, &dscale, &dweight})
    for (const float f : v->download()) zero = zero && f == 0;
  expect(zero, "no tokens: gradients of parameters must be zero");
}

/// More than 2^31 elements of x: the last tokens have the bytes they have alone.
void check_offsets() {
  const int64_t tokens = 131072 + 50, tail = 66;
  const Inputs in({"offsets", tokens});
  DeviceArray<uint16_t> dx(in.x.count()), dy(in.y.count());
  DeviceArray<float> dpost(tokens * 4), dcomb(tokens * 16), dfn(kLogits * kRow), dbase(kLogits),
      dscale(3), dweight(kWidth);
  const size_t bytes = model::hc_backward_workspace_bytes(tokens);
  DeviceArray<unsigned char> workspace(bytes);
  HcBackwardArgs a = in.arguments(0, tokens);
  a.dx = dx.get(), a.dy = dy.get(), a.dpost = dpost.get(), a.dcomb = dcomb.get();
  a.dfn = dfn.get(), a.dbase = dbase.get(), a.dscale = dscale.get(), a.dnorm_weight = dweight.get();
  must_launch(model::hc_backward(a, workspace.get(), bytes, nullptr), "offsets");
  must(cudaDeviceSynchronize(), "offsets");
  const int64_t first = tokens - tail;
  const Output alone = run(in.arguments(first, tail), "offsets");
  expect(alone.dx == dx.download(first * kRow, tail * kRow) &&
             alone.dy == dy.download(first * kWidth, tail * kWidth) &&
             alone.dpost == dpost.download(first * 4, tail * 4) &&
             alone.dcomb == dcomb.download(first * 16, tail * 16),
         "offsets: tokens beyond 2^31 elements must give the bytes they have alone");
}

void check_all() {
  check_reference();
  check_refusals();
  for (const int64_t n : {1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 1000})
    check_problem({"T " + std::to_string(n), n}, n == 1000 ? 20 : 1);
  for (const int64_t n : {1, 33, 300}) {
    check_problem({"first boundary, T " + std::to_string(n), n, Boundary::kFirst}, 1);
    check_problem({"last boundary, T " + std::to_string(n), n, Boundary::kLast}, 1);
  }
  constexpr auto kMiddle = Boundary::kMiddle;
  check_problem({"streams 1e6", 130, kMiddle, 1e6f, 1e6f}, 0);
  check_problem({"streams 1e-6 (below norm_eps)", 130, kMiddle, 1e-6f, 1e-6f}, 0);
  check_problem({"zero y", 130, kMiddle, 1, 0}, 0);
  check_problem({"y 1e6 times the streams", 130, kMiddle, 1, 1e6f}, 0, 1e-3);
  check_problem({"logits 8 times", 130, kMiddle, 1, 1, 8}, 0, 2e-3);
  check_problem({"gradients 1e-6", 130, kMiddle, 1, 1, 1, 1e-6f}, 0);
  check_problem({"one Sinkhorn round", 130, kMiddle, 1, 1, 1, 1, {}, 1}, 0);
  check_problem({"64 Sinkhorn rounds", 130, kMiddle, 1, 1, 1, 1, {}, 64}, 0);
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
  check_problem({"T 8229, two passes", 8229}, 2);
  check_offsets();
}

void check_small() {
  check_problem({"small", 35}, 0);
  check_problem({"small, first boundary", 17, Boundary::kFirst}, 0);
  check_problem({"small, last boundary", 17, Boundary::kLast}, 0);
  check_problem({"small, round the stages", 16 * 4 * 4 + 5}, 0);
}

struct Timed {
  Inputs in;
  DeviceArray<uint16_t> dx, dy;
  DeviceArray<float> dpost, dcomb, dfn, dbase, dscale, dweight;
  explicit Timed(const Problem& p)
      : in(p),
        dx(in.x.count()),
        dy(in.y.count()),
        dpost(p.tokens * 4),
        dcomb(p.tokens * 16),
        dfn(kLogits * kRow),
        dbase(kLogits),
        dscale(3),
        dweight(kWidth) {}
  HcBackwardArgs arguments() const {
    HcBackwardArgs a = in.arguments(0, in.tokens);
    a.dx = dx.get();
    if (in.mixes()) a.dy = dy.get(), a.dpost = dpost.get(), a.dcomb = dcomb.get();
    if (!in.projects()) return a;
    a.dfn = dfn.get(), a.dbase = dbase.get(), a.dscale = dscale.get();
    a.dnorm_weight = dweight.get();
    return a;
  }
};

void time_all() {
  struct Row {
    int64_t tokens;
    Boundary boundary;
    const char* name;
    double rows;  // of 8192 bytes a token: each stream, y and x_normed gradient once
  };
  for (const Row& row : {Row{1, Boundary::kMiddle, "middle", 15},
                         Row{1024, Boundary::kMiddle, "middle", 15},
                         Row{8192, Boundary::kMiddle, "middle", 15},
                         Row{32768, Boundary::kMiddle, "middle", 15},
                         Row{131072, Boundary::kMiddle, "middle", 15},
                         Row{8192, Boundary::kFirst, "first", 13},
                         Row{8192, Boundary::kLast, "last", 14}}) {
    std::vector<std::unique_ptr<Timed>> sets;
    for (uint32_t seed = 1; seed <= 2; ++seed) {
      Problem p{row.name, row.tokens, row.boundary};
      p.seed = seed;
      sets.push_back(std::make_unique<Timed>(p));
    }
    const size_t bytes = model::hc_backward_workspace_bytes(row.tokens);
    DeviceArray<unsigned char> workspace(bytes);
    time_beside_copy(
        "hc backward T " + std::to_string(row.tokens) + " " + row.name,
        row.rows * 8192 * double(row.tokens),
        row.tokens > 20000 ? 15 : 50,
        [&](int i) {
          must_launch(model::hc_backward(sets[static_cast<size_t>(i) % sets.size()]->arguments(),
                                         workspace.get(),
                                         bytes,
                                         nullptr),
                      row.name);
        });
  }
}

void profile() {
  const Timed set({"profile", 8192});
  const size_t bytes = model::hc_backward_workspace_bytes(8192);
  DeviceArray<unsigned char> workspace(bytes);
  for (int i = 0; i < 2; ++i)
    must_launch(model::hc_backward(set.arguments(), workspace.get(), bytes, nullptr), "profile");
  must(cudaDeviceSynchronize(), "profile");
}

}  // namespace
}  // namespace lockstep::device_test

int main(int argc, char** argv) {
  using namespace lockstep::device_test;
  return device_main(argc, argv, "check|time|small|profile", [](const std::string& mode) {
    if (mode == "check") check_all();
    if (mode == "small") check_small();
    if (mode == "profile") profile();
    if (mode == "time") time_all();
  });
}
