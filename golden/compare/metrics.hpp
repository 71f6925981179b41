// How far two tensors are apart: every metric that scenarios and reports name, computed in float64
// whatever the dtypes, and the first element over a threshold. Sums run in index order, so two
// calls give the same bytes.
#pragma once

#include <array>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/base/torch.hpp"

namespace lockstep::golden {

/// Distance in units in the last place of `dtype` (float64, float32, bfloat16, float16) of two
/// values already exact in it: the number of representable values one has to step over, zero
/// counted once, so that the smallest negative and the smallest positive number are 2 apart.
/// Infinity is one step beyond the largest number. Not for NaN.
uint64_t ulp_distance(double a, double b, at::ScalarType dtype);

/// Counts by distance: bin 0 holds 0 ulp, bin 1 holds 1, bin k > 1 holds 2^(k-2)+1 .. 2^(k-1).
struct UlpHistogram {
  static constexpr size_t kBins = 66;
  std::array<int64_t, kBins> count{};

  static size_t bin_of(uint64_t ulp);
  /// "0", "1", "2", "3-4", "5-8", ...
  static std::string label(size_t bin);
};

/// Where an element counts as diverged.
struct Threshold {
  enum class Metric : uint8_t { kBits, kUlp, kAbs, kRel } metric = Metric::kBits;
  /// diverged: distance > limit; kRel: |got - want| > limit * |want|; kBits: any other bits
  double limit = 0.0;
};

struct Divergence {
  int64_t index = 0;                 ///< flat, row-major
  std::vector<int64_t> coordinates;  ///< of the same element
  double got = 0.0, want = 0.0;
  std::string got_bits, want_bits;  ///< "0x3f800010", each in its tensor's own dtype
  uint64_t ulp = 0;                 ///< in the coarser dtype
  std::string ulp_dtype;            ///< "float16" where the dtypes differ, else empty
};

/// Values are compared in float64, whatever the dtypes. A NaN in the same place on both sides, or
/// the same infinity, is equal and takes part in nothing else; a NaN on one side makes max_abs,
/// mean_abs, rel_l2 and max_rel infinite, cosine 0, ulp_max its largest value, and is a divergence.
struct Comparison {
  int64_t num_elements = 0;
  int64_t num_different = 0;  ///< elements whose values differ in float64; -0 differs from 0
  int64_t num_nan_equal = 0, num_nan_different = 0;
  double max_abs = 0.0, mean_abs = 0.0;
  double rel_l2 = 0.0;   ///< |got - want| / |want|; infinite where only want is zero
  double max_rel = 0.0;  ///< largest |got - want| / |want| of an element, likewise
  double cosine = 1.0;   ///< 1 for two zero or empty tensors, 0 when one is zero or one infinite
  at::ScalarType got_dtype = at::kDouble, want_dtype = at::kDouble;
  at::ScalarType ulp_dtype = at::kDouble;  ///< the coarser of the two
  bool same_bytes = true;                  ///< of one dtype, and every bit equal, also of NaNs
  uint64_t ulp_max = 0;
  UlpHistogram histogram;
  std::optional<Divergence> first;  ///< first element over the threshold

  [[nodiscard]] bool same_dtype() const { return got_dtype == want_dtype; }
  /// All values equal, in whatever dtypes.
  [[nodiscard]] bool same_values() const { return num_different == 0 && num_nan_different == 0; }
  [[nodiscard]] bool bitwise() const { return same_dtype() && same_bytes; }
  /// What keeps the bits from being equal, for people: "dtypes differ: float16 against float64,
  /// all values equal"; empty when they are.
  [[nodiscard]] std::string why_not_bitwise() const;
};

/// got and want: same shape, both floating (any of float64, float32, bfloat16, float16, mixed) or
/// both integer or bool (compared exactly; ulp is the difference). Only ULPs are counted in the
/// coarser dtype: float64 against bfloat16 first rounds the float64 side. Throws kShape naming
/// `name` and both tensors otherwise. Cost: one pass, converted in pieces.
Comparison compare(const Tensor& got,
                   const Tensor& want,
                   std::string_view name,
                   const Threshold& threshold = {});

/// "layers.2.kda.state[0,3,17,5]: got 1.0000019 (0x3f800010) want 1 (0x3f800000), 16 ulp".
std::string describe_divergence(const Divergence& divergence, std::string_view name);

/// The metric of this name: "max_abs", "mean_abs", "rel_l2", "max_rel", "ulp_max", "num_different",
/// "cosine_distance" (1 - cosine), all of them better when smaller. Throws kConfig listing the
/// names.
double metric_value(const Comparison& comparison, std::string_view metric);
const std::vector<std::string>& metric_names();

/// Selections or expert ids, [T, width] integers with -1 for unused slots, compared row by row as
/// sets; the widths may differ.
struct SetComparison {
  int64_t num_rows = 0, num_rows_different = 0, first_row = -1;
  double mean_overlap = 1.0;  ///< |intersection| / |union|, mean over rows; empty rows count as 1
  std::string first;          ///< what the first differing row has too many and too few
};
SetComparison compare_sets(const Tensor& got, const Tensor& want, std::string_view name);

}  // namespace lockstep::golden
