#include "golden/compare/metrics.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <set>

#include "model/base/same_bytes.hpp"

namespace lockstep::golden {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kPiece = 1 << 18;

int mantissa_bits(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 53;
    case at::kFloat:
      return 24;
    case at::kHalf:
      return 11;
    default:
      return 8;
  }
}

bool is_float(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kHalf ||
         dtype == at::kBFloat16;
}

// Bits of a value that is exact in `dtype`, in the low end.
uint64_t bits_of(double value, at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return std::bit_cast<uint64_t>(value);
    case at::kFloat:
      return std::bit_cast<uint32_t>(static_cast<float>(value));
    case at::kHalf:
      return c10::Half(static_cast<float>(value)).x;
    default:
      return c10::BFloat16(static_cast<float>(value)).x;
  }
}

int width_of(at::ScalarType dtype) {
  return dtype == at::kDouble ? 64 : dtype == at::kFloat ? 32 : 16;
}

// Place of a value in the order of all values of its dtype; both zeros share a place.
int64_t place_of(double value, at::ScalarType dtype) {
  const uint64_t bits = bits_of(value, dtype), sign = uint64_t{1} << (width_of(dtype) - 1);
  const auto magnitude = static_cast<int64_t>(bits & (sign - 1));
  return (bits & sign) != 0 ? -magnitude : magnitude;
}

std::vector<int64_t> coordinates_of(int64_t index, at::IntArrayRef sizes) {
  std::vector<int64_t> out(sizes.size());
  for (size_t d = sizes.size(); d-- > 0;) {
    out[d] = index % sizes[d];
    index /= sizes[d];
  }
  return out;
}

std::string hex_of(double value, at::ScalarType dtype) {
  if (!is_float(dtype)) return fmt::format("{:#x}", static_cast<int64_t>(value));
  return fmt::format("0x{:0{}x}", bits_of(value, dtype), width_of(dtype) / 4);
}

/// Running sums of one comparison. Squares of large or small float64 values leave the range of
/// float64, so the sums have the wider exponent of long double.
struct Sums {
  long double error2 = 0.0L, want2 = 0.0L, got2 = 0.0L, dot = 0.0L, abs = 0.0L;
};

bool over(const Threshold& threshold, bool different, double abs, double want, uint64_t ulp) {
  switch (threshold.metric) {
    case Threshold::Metric::kBits:
      return different;
    case Threshold::Metric::kUlp:
      return static_cast<double>(ulp) > threshold.limit;
    case Threshold::Metric::kAbs:
      return abs > threshold.limit;
    default:
      return abs > threshold.limit * std::fabs(want);
  }
}

struct Pair {
  Tensor got, want;  // flat, dense
  at::ScalarType got_dtype, want_dtype;
  bool integers;
};

Pair checked(const Tensor& got, const Tensor& want, std::string_view name) {
  LOCKSTEP_CHECK(got.defined() && want.defined() && got.sizes() == want.sizes(),
                 kShape,
                 "comparing {}: shapes differ: got {}, want {}",
                 name,
                 describe(got),
                 describe(want));
  const auto a = got.scalar_type(), b = want.scalar_type();
  const bool floats = is_float(a) && is_float(b);
  const bool integers = at::isIntegralType(a, true) && at::isIntegralType(b, true);
  LOCKSTEP_CHECK(floats || integers,
                 kShape,
                 "comparing {}: dtypes cannot be compared: got {}, want {}",
                 name,
                 describe(got),
                 describe(want));
  const auto flat = [](const Tensor& t) { return t.detach().to(at::kCPU).contiguous().view(-1); };
  return {flat(got), flat(want), a, b, integers};
}

}  // namespace

uint64_t ulp_distance(double a, double b, at::ScalarType dtype) {
  const int64_t x = place_of(a, dtype), y = place_of(b, dtype);
  return x > y ? static_cast<uint64_t>(x) - static_cast<uint64_t>(y)
               : static_cast<uint64_t>(y) - static_cast<uint64_t>(x);
}

size_t UlpHistogram::bin_of(uint64_t ulp) {
  return ulp == 0 ? 0 : 1 + static_cast<size_t>(std::bit_width(ulp - 1));
}

std::string UlpHistogram::label(size_t bin) {
  if (bin < 3) return std::to_string(bin);
  const uint64_t low = (uint64_t{1} << (bin - 2)) + 1;
  return fmt::format(
      "{}-{}", low, bin == kBins - 1 ? std::numeric_limits<uint64_t>::max() : (low - 1) * 2);
}

Comparison compare(const Tensor& got,
                   const Tensor& want,
                   std::string_view name,
                   const Threshold& threshold) {
  const Pair pair = checked(got, want, name);
  Comparison out;
  out.num_elements = pair.got.numel();
  out.got_dtype = pair.got_dtype;
  out.want_dtype = pair.want_dtype;
  out.same_bytes = pair.got_dtype == pair.want_dtype && same_bytes(pair.got, pair.want);
  out.ulp_dtype = pair.integers ? at::kLong
                  : mantissa_bits(pair.got_dtype) <= mantissa_bits(pair.want_dtype)
                      ? pair.got_dtype
                      : pair.want_dtype;
  Sums sums;
  for (int64_t begin = 0; begin < out.num_elements; begin += kPiece) {
    const int64_t count = std::min(kPiece, out.num_elements - begin);
    const Tensor got_piece = pair.got.narrow(0, begin, count);
    const Tensor want_piece = pair.want.narrow(0, begin, count);
    const Tensor g64 = got_piece.to(at::kDouble), w64 = want_piece.to(at::kDouble);
    const auto *g = g64.data_ptr<double>(), *w = w64.data_ptr<double>();
    // The two sides in the coarser dtype (floats), or exact (integers).
    const auto coarse = [&](const Tensor& t) { return t.to(out.ulp_dtype); };
    const Tensor gc = coarse(got_piece), wc = coarse(want_piece);
    const Tensor gd = pair.integers ? Tensor() : gc.to(at::kDouble);
    const Tensor wd = pair.integers ? Tensor() : wc.to(at::kDouble);
    for (int64_t i = 0; i < count; ++i) {
      const bool got_nan = std::isnan(g[i]), want_nan = std::isnan(w[i]);
      if (got_nan && want_nan) {
        ++out.num_nan_equal;
        continue;
      }
      uint64_t ulp = 0;
      double abs = 0.0;
      bool different = false;
      if (got_nan || want_nan) {
        ++out.num_nan_different;
        ulp = std::numeric_limits<uint64_t>::max();
        abs = kInfinity;
        different = true;
      } else if (pair.integers) {
        const int64_t a = gc.data_ptr<int64_t>()[i], b = wc.data_ptr<int64_t>()[i];
        ulp = a > b ? static_cast<uint64_t>(a) - static_cast<uint64_t>(b)
                    : static_cast<uint64_t>(b) - static_cast<uint64_t>(a);
        abs = static_cast<double>(ulp);
        different = ulp != 0;
      } else {
        const double a = gd.data_ptr<double>()[i], b = wd.data_ptr<double>()[i];
        ulp = ulp_distance(a, b, out.ulp_dtype);
        abs = g[i] == w[i] ? 0.0 : std::fabs(g[i] - w[i]);
        different = std::bit_cast<uint64_t>(g[i]) != std::bit_cast<uint64_t>(w[i]);
      }
      if (different) ++out.num_different;
      if (!got_nan && !want_nan) {
        ++out.histogram.count[UlpHistogram::bin_of(ulp)];
        const long double gl = g[i], wl = w[i];
        // An infinity that both sides have would make every error relative to it vanish.
        if (!(std::isinf(g[i]) && g[i] == w[i])) {
          sums.want2 += wl * wl;
          sums.got2 += gl * gl;
          sums.dot += gl * wl;
        }
      }
      out.ulp_max = std::max(out.ulp_max, ulp);
      out.max_abs = std::max(out.max_abs, abs);
      const long double error = abs;
      sums.abs += error;
      sums.error2 += error * error;
      if (abs > 0.0) {
        const double relative = std::isfinite(abs) ? abs / std::fabs(w[i]) : kInfinity;
        out.max_rel = std::max(out.max_rel, relative);
      }
      if (!out.first && (got_nan || want_nan || over(threshold, different, abs, w[i], ulp))) {
        out.first = Divergence{
            begin + i,
            coordinates_of(begin + i, want.sizes()),
            g[i],
            w[i],
            hex_of(g[i], pair.got_dtype),
            hex_of(w[i], pair.want_dtype),
            ulp,
            pair.got_dtype == pair.want_dtype ? std::string() : dtype_name(out.ulp_dtype)};
      }
    }
  }
  const int64_t compared = out.num_elements - out.num_nan_equal;
  if (compared > 0)
    out.mean_abs = static_cast<double>(sums.abs / static_cast<long double>(compared));
  if (sums.error2 > 0.0L)
    out.rel_l2 = static_cast<double>(std::sqrt(sums.error2) / std::sqrt(sums.want2));
  if (std::isnan(out.rel_l2)) out.rel_l2 = kInfinity;  // an infinity on the want side
  const long double norms = std::sqrt(sums.want2) * std::sqrt(sums.got2);
  const bool finite = std::isfinite(norms) && out.num_nan_different == 0;
  if (sums.want2 > 0.0L || sums.got2 > 0.0L || !finite) {
    out.cosine = finite && norms > 0.0L ? static_cast<double>(sums.dot / norms) : 0.0;
  }
  return out;
}

std::string Comparison::why_not_bitwise() const {
  if (bitwise()) return {};
  const int64_t values = num_different;
  const std::string count = values == 0
                                ? std::string("all values equal")
                                : fmt::format("{} of {} values differ", values, num_elements);
  if (!same_dtype()) {
    return fmt::format(
        "dtypes differ: {} against {}, {}", dtype_name(got_dtype), dtype_name(want_dtype), count);
  }
  return values == 0 ? "only the bits of NaNs differ" : count;
}

std::string describe_divergence(const Divergence& d, std::string_view name) {
  const bool nan = std::isnan(d.got) || std::isnan(d.want);
  return fmt::format(
      "{}[{}]: got {:.9g} ({}) want {:.9g} ({}), {}",
      name,
      fmt::join(d.coordinates, ","),
      d.got,
      d.got_bits,
      d.want,
      d.want_bits,
      nan ? "one is NaN"
          : fmt::format("{} ulp{}{}", d.ulp, d.ulp_dtype.empty() ? "" : " of ", d.ulp_dtype));
}

const std::vector<std::string>& metric_names() {
  static const std::vector<std::string> names{
      "max_abs", "mean_abs", "rel_l2", "max_rel", "ulp_max", "num_different", "cosine_distance"};
  return names;
}

double metric_value(const Comparison& c, std::string_view metric) {
  if (metric == "max_abs") return c.max_abs;
  if (metric == "mean_abs") return c.mean_abs;
  if (metric == "rel_l2") return c.rel_l2;
  if (metric == "max_rel") return c.max_rel;
  if (metric == "ulp_max") return static_cast<double>(c.ulp_max);
  if (metric == "num_different") return static_cast<double>(c.num_different);
  if (metric == "cosine_distance") return 1.0 - c.cosine;
  fail(ErrorKind::kConfig,
       "metric '{}' is unknown; use one of {}",
       metric,
       fmt::join(metric_names(), ", "));
}

SetComparison compare_sets(const Tensor& got, const Tensor& want, std::string_view name) {
  LOCKSTEP_CHECK(got.defined() && want.defined() && got.dim() == 2 && want.dim() == 2 &&
                     got.size(0) == want.size(0) && at::isIntegralType(got.scalar_type(), false) &&
                     at::isIntegralType(want.scalar_type(), false),
                 kShape,
                 "comparing {} as sets: expected two integer tensors [rows, width] with the same "
                 "rows, got {} and {}",
                 name,
                 describe(got),
                 describe(want));
  const Tensor a = got.detach().to(at::kCPU, at::kLong).contiguous();
  const Tensor b = want.detach().to(at::kCPU, at::kLong).contiguous();
  SetComparison out;
  out.num_rows = a.size(0);
  double overlap = 0.0;
  const auto row_set = [](const Tensor& t, int64_t row) {
    const auto* p = t.data_ptr<int64_t>() + row * t.size(1);
    std::set<int64_t> s(p, p + t.size(1));
    s.erase(-1);
    return s;
  };
  for (int64_t row = 0; row < out.num_rows; ++row) {
    const auto x = row_set(a, row), y = row_set(b, row);
    std::vector<int64_t> extra, lacking;
    std::set_difference(x.begin(), x.end(), y.begin(), y.end(), std::back_inserter(extra));
    std::set_difference(y.begin(), y.end(), x.begin(), x.end(), std::back_inserter(lacking));
    const size_t all = y.size() + extra.size();
    overlap +=
        all == 0 ? 1.0 : static_cast<double>(x.size() - extra.size()) / static_cast<double>(all);
    if (extra.empty() && lacking.empty()) continue;
    if (out.num_rows_different++ == 0) {
      out.first_row = row;
      out.first = fmt::format("{}[{}]: has {{{}}} too many and lacks {{{}}}",
                              name,
                              row,
                              fmt::join(extra, ", "),
                              fmt::join(lacking, ", "));
    }
  }
  if (out.num_rows > 0) out.mean_overlap = overlap / static_cast<double>(out.num_rows);
  return out;
}

}  // namespace lockstep::golden
