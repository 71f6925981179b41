// Short forms of large tensors, so that golden files stay small and still pin every element: a
// norm, fixed random projections and some whole rows. The mean square of the projections of a
// difference estimates its squared norm, and no difference hides from all of them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "golden/compare/metrics.hpp"
#include "model/base/torch.hpp"

namespace lockstep::golden {

enum class SketchForm : uint8_t {
  kTensor,  ///< [norm, 64 projections of the flattened tensor, whole rows]
  kTokens,  ///< [norm, 2 projections of every row (row-major), whole rows]
};

inline constexpr int64_t kTensorProjections = 64, kTokenProjections = 2;

/// Rows of the tensor, seen as [size(0), rest], that a sketch keeps whole: at most two, ascending,
/// fixed by the name.
std::vector<int64_t> sketch_rows(std::string_view name, int64_t num_rows);

/// The flat float64 sketch of a tensor of at least one dimension and one element. Projection p is
/// sqrt(3) * u(0, "golden-projection/p"), of the flattened tensor or of each row. Cost: kTensor 64,
/// kTokens 2 multiplications an element.
Tensor make_sketch(std::string_view name, const Tensor& tensor, SketchForm form);

struct SketchComparison {
  double norm_error = 0.0;  ///< | |got| - |want| | / |want|
  double rel_l2 = 0.0;      ///< estimate of |got - want| / |want| from the projections
  /// With N of these the estimate's relative standard deviation is about 1 / sqrt(2 N). kTensor:
  /// all 64. kTokens: each row has projections of its own, so an error that sits in few rows is
  /// seen by few of them; N is 2 (sum of e^2)^2 / (sum of e^4) over the errors e of the rows,
  /// estimated too, from 2 to twice the number of rows.
  int64_t num_projections = 0;
  Comparison rows;  ///< the whole rows: exact metrics and coordinates inside the tensor
  /// kTokens: estimated error of each row, relative to the root mean square row norm of want.
  std::vector<double> token_error;
  [[nodiscard]] double worst() const { return std::max(norm_error, rel_l2); }
  /// First row with token_error above the limit, or -1.
  [[nodiscard]] int64_t first_token(double limit) const;
};

/// got: the whole tensor; want: the stored sketch of a tensor of `shape`. Throws kShape when the
/// shapes differ or the sketch has another length. NaN anywhere gives infinite errors.
SketchComparison compare_sketch(const Tensor& got,
                                const Tensor& want_sketch,
                                const std::vector<int64_t>& shape,
                                SketchForm form,
                                std::string_view name,
                                const Threshold& threshold = {});

}  // namespace lockstep::golden
