#include "model/base/torch.hpp"

#include <fmt/ranges.h>

namespace lockstep {

std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return "float64";
    case at::kFloat:
      return "float32";
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    case at::kLong:
      return "int64";
    case at::kInt:
      return "int32";
    case at::kBool:
      return "bool";
    default:
      return c10::toString(dtype);
  }
}

std::string describe(const Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  return fmt::format("[{}] {}", fmt::join(tensor.sizes(), ", "), dtype_name(tensor.scalar_type()));
}

void check_shape(const Tensor& tensor, at::IntArrayRef sizes, std::string_view what) {
  bool ok = tensor.defined() && tensor.dim() == static_cast<int64_t>(sizes.size());
  for (size_t i = 0; ok && i < sizes.size(); ++i) {
    ok = sizes[i] < 0 || tensor.size(static_cast<int64_t>(i)) == sizes[i];
  }
  if (!ok)
    fail(ErrorKind::kShape,
         "{}: expected shape [{}], got {}",
         what,
         fmt::join(sizes, ", "),
         describe(tensor));
}

void check_dtype(const Tensor& tensor, at::ScalarType dtype, std::string_view what) {
  LOCKSTEP_CHECK(tensor.defined() && tensor.scalar_type() == dtype,
                 kShape,
                 "{}: expected dtype {}, got {}",
                 what,
                 dtype_name(dtype),
                 describe(tensor));
}

}  // namespace lockstep
