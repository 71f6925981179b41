#include "golden/compare/logits.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "golden/compare/metrics.hpp"

namespace lockstep::golden {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Tensor float64(const Tensor& t) { return t.detach().to(at::kCPU, at::kDouble).contiguous(); }

void check_same(const Tensor& got, const Tensor& want, std::string_view name, int64_t dim) {
  LOCKSTEP_CHECK(got.defined() && want.defined() && got.sizes() == want.sizes() &&
                     (dim < 0 ? got.dim() >= 1 : got.dim() == dim) && got.is_floating_point() &&
                     want.is_floating_point(),
                 kShape,
                 "comparing {}: expected two floating tensors of one shape{}, got {} and want {}",
                 name,
                 dim < 0 ? "" : fmt::format(" with {} dimensions", dim),
                 describe(got),
                 describe(want));
}

struct Row {
  double max = -kInfinity, log_sum = 0.0;
  int64_t best = -1;
  bool bad = false;
};

Row row_of(const double* x, int64_t count) {
  Row row;
  for (int64_t i = 0; i < count; ++i) {
    row.bad = row.bad || std::isnan(x[i]) || x[i] == kInfinity;
    if (x[i] > row.max) {
      row.max = x[i];
      row.best = i;
    }
  }
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i) sum += std::exp(x[i] - row.max);
  row.log_sum = row.max + std::log(sum);
  row.bad = row.bad || !std::isfinite(row.log_sum);
  return row;
}

}  // namespace

LogitComparison compare_logits(const Tensor& got, const Tensor& want, std::string_view name) {
  check_same(got, want, name, 2);
  const Tensor g64 = float64(got), w64 = float64(want);
  const int64_t T = want.size(0), V = want.size(1);
  LogitComparison out;
  out.num_tokens = T;
  if (T == 0 || V == 0) return out;
  int64_t agree = 0;
  double sum = 0.0;
  for (int64_t t = 0; t < T; ++t) {
    const auto *g = g64.data_ptr<double>() + t * V, *w = w64.data_ptr<double>() + t * V;
    const Row a = row_of(g, V), b = row_of(w, V);
    double kl = 0.0;
    if (a.bad || b.bad) {
      kl = kInfinity;
    } else {
      for (int64_t v = 0; v < V; ++v) {
        const double lw = w[v] - b.log_sum, lg = g[v] - a.log_sum, p = std::exp(lw);
        if (p > 0.0) kl += p * (lw - lg);
      }
      kl = std::max(kl, 0.0);  // rounding can leave -1e-17
      if (a.best == b.best) ++agree;
    }
    sum += kl;
    if (out.max_kl_token < 0 || kl > out.max_kl) {
      out.max_kl = kl;
      out.max_kl_token = t;
    }
  }
  out.mean_kl = sum / static_cast<double>(T);
  out.top1_agreement = static_cast<double>(agree) / static_cast<double>(T);
  return out;
}

double mismatch_kl_term(double l) {
  // exp(l) - l - 1 loses all digits near 0; there the series to l^8 is exact to float64.
  if (std::fabs(l) < 0.03) {
    double term = 0.0;
    for (int n = 8; n >= 2; --n) term = (term + 1.0) * l / static_cast<double>(n);
    return term * l;
  }
  return std::expm1(l) - l;
}

MismatchKl mismatch_kl(const Tensor& train, const Tensor& infer, const Tensor& mask) {
  check_same(train, infer, "mismatch_kl", 1);
  LOCKSTEP_CHECK(
      !mask.defined() || (mask.scalar_type() == at::kBool && mask.sizes() == train.sizes()),
      kShape,
      "mismatch_kl: the mask must be bool and as long as the log-probabilities {}, got {}",
      describe(train),
      describe(mask));
  const Tensor a = float64(train), b = float64(infer);
  const Tensor m = mask.defined() ? mask.to(at::kCPU).contiguous() : Tensor();
  MismatchKl out;
  out.terms = at::full_like(a, std::numeric_limits<double>::quiet_NaN());
  double sum = 0.0;
  for (int64_t t = 0; t < a.numel(); ++t) {
    if (m.defined() && !m.data_ptr<bool>()[t]) continue;
    const double x = a.data_ptr<double>()[t], y = b.data_ptr<double>()[t];
    if (std::isnan(x) && std::isnan(y)) continue;
    const bool bad = std::isnan(x) || std::isnan(y) || (std::isinf(x) && x == y);
    const double term = bad ? kInfinity : mismatch_kl_term(x - y);
    out.terms.data_ptr<double>()[t] = term;
    sum += term;
    ++out.num_tokens;
    if (out.max_token < 0 || term > out.max) {
      out.max = term;
      out.max_token = t;
    }
  }
  if (out.num_tokens > 0) out.mean = sum / static_cast<double>(out.num_tokens);
  return out;
}

std::vector<PositionBin> error_by_position(const Tensor& got,
                                           const Tensor& want,
                                           const std::vector<int64_t>& cu,
                                           std::string_view name) {
  check_same(got, want, name, -1);
  LOCKSTEP_CHECK(
      !cu.empty() && cu.front() == 0 && cu.back() == got.size(0) &&
          std::is_sorted(cu.begin(), cu.end()),
      kShape,
      "comparing {} by position: document boundaries end at {}, the tensor {} has {} rows",
      name,
      cu.empty() ? -1 : cu.back(),
      describe(got),
      got.size(0));
  const Tensor g64 = float64(got), w64 = float64(want);
  const int64_t width = got.size(0) == 0 ? 0 : got.numel() / got.size(0);
  std::vector<PositionBin> bins;
  std::vector<double> want2;
  for (size_t d = 0; d + 1 < cu.size(); ++d) {
    for (int64_t t = cu[d]; t < cu[d + 1]; ++t) {
      const auto position = static_cast<uint64_t>(t - cu[d]);
      const auto bin = static_cast<size_t>(std::bit_width(position));
      while (bins.size() <= bin) {
        const int64_t first = bins.empty() ? 0 : bins.back().last + 1;
        bins.push_back({first, std::max<int64_t>(first * 2 - 1, first), 0, 0.0, 0.0});
        want2.push_back(0.0);
      }
      ++bins[bin].num_tokens;
      for (int64_t i = t * width; i < (t + 1) * width; ++i) {
        const double a = g64.data_ptr<double>()[i], b = w64.data_ptr<double>()[i];
        if (a == b || (std::isnan(a) && std::isnan(b))) {
          if (std::isfinite(b)) want2[bin] += b * b;
          continue;
        }
        const double error = std::isnan(a) || std::isnan(b) ? kInfinity : std::fabs(a - b);
        bins[bin].rel_l2 += error * error;
        bins[bin].max_abs = std::max(bins[bin].max_abs, error);
        if (!std::isnan(b)) want2[bin] += b * b;
      }
    }
  }
  for (size_t i = 0; i < bins.size(); ++i) {
    if (bins[i].rel_l2 > 0.0) bins[i].rel_l2 = std::sqrt(bins[i].rel_l2 / want2[i]);
    if (std::isnan(bins[i].rel_l2)) bins[i].rel_l2 = kInfinity;
  }
  return bins;
}

}  // namespace lockstep::golden
