#include "model/ops/fp8.hpp"

#include <bit>

#include "model/base/parallel.hpp"
#include "model/ops/power_of_two.hpp"

namespace lockstep::model {
namespace {

/// Rows per task; a row is independent of every other.
constexpr int64_t kGrain = 256;

void check_rows(const Tensor& x, std::string_view what) {
  LOCKSTEP_CHECK(x.defined() && x.dim() >= 1 && x.size(-1) > 0 &&
                     (x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kFloat),
                 kShape,
                 "{}: expected bfloat16 or float32 with a last dimension, got {}",
                 what,
                 describe(x));
}

void check_power_of_two(const Tensor& x, std::string_view what) {
  LOCKSTEP_CHECK(std::has_single_bit(static_cast<uint64_t>(x.size(-1))),
                 kShape,
                 "{}: the last dimension must be a power of two, got {}",
                 what,
                 describe(x));
}

}  // namespace

Fp8Scale fp8_scale_mode(const Numerics& num) {
  return num.is<Switch::kFp8Scale>("pow2") ? Fp8Scale::kPow2 : Fp8Scale::kExact;
}

Tensor hadamard(const Tensor& x) {
  check_rows(x, "hadamard");
  check_power_of_two(x, "hadamard");
  Tensor out = x.detach().to(at::kFloat, false, true).contiguous();
  const int64_t dim = x.size(-1), rows = out.numel() / dim;
  float* data = out.data_ptr<float>();
  parallel_for(0, rows, kGrain, [&](int64_t begin, int64_t end) {
    hadamard_rows(data + begin * dim, end - begin, dim);
  });
  return out.to(at::kBFloat16);
}

Tensor hadamard_reference(const Tensor& x) {
  check_rows(x, "hadamard_reference");
  check_power_of_two(x, "hadamard_reference");
  const int64_t dim = x.size(-1);
  Tensor y = x.detach().to(at::kFloat).reshape({-1, dim});
  for (int64_t stride = 1; stride < dim; stride *= 2) {
    const Tensor pairs = y.reshape({y.size(0), dim / (2 * stride), 2, stride});
    const Tensor a = pairs.select(2, 0), b = pairs.select(2, 1);
    y = at::stack({a + b, a - b}, 2).reshape({y.size(0), dim});
  }
  const auto scale = static_cast<float>(std::pow(static_cast<double>(dim), -0.5));
  return (y * scale).to(at::kBFloat16).reshape(x.sizes());
}

Fp8Rows quantise_rows(const Tensor& x, Fp8Scale mode) {
  check_rows(x, "quantise_rows");
  const Tensor in = x.detach().to(at::kFloat).contiguous();
  const int64_t dim = x.size(-1), rows = in.numel() / dim;
  Fp8Rows out{at::empty(x.sizes(), at::kByte),
              at::empty(x.sizes().slice(0, x.dim() - 1), at::kFloat)};
  const float* data = in.const_data_ptr<float>();
  auto* bytes = out.bytes.data_ptr<uint8_t>();
  auto* scale = out.scale.data_ptr<float>();
  parallel_for(0, rows, kGrain, [&](int64_t begin, int64_t end) {
    quantise_rows(data + begin * dim, end - begin, dim, mode, bytes + begin * dim, scale + begin);
  });
  return out;
}

Fp8Rows quantise_rows_reference(const Tensor& x, Fp8Scale mode) {
  check_rows(x, "quantise_rows_reference");
  const Tensor v = x.detach().to(at::kFloat);
  const Tensor amax = v.abs().amax(-1).clamp_min(kFp8AmaxFloor);
  Tensor scale = amax / kFp8Max;
  if (mode == Fp8Scale::kPow2) {
    // In float64 the logarithm of a float32 power of two is exact, so ceil cannot go astray.
    const Tensor ratio = amax * at::scalar_tensor(1.0F / 448.0F, at::kFloat);
    scale = power_of_two(at::ceil(at::log2(ratio.to(at::kDouble)))).to(at::kFloat);
  }
  const Tensor y = (v / scale.unsqueeze(-1)).clamp(-kFp8Max, kFp8Max);
  return {y.to(at::kFloat8_e4m3fn).view(at::kByte), scale};
}

Tensor dequantise_rows(const Fp8Rows& rows) {
  return rows.bytes.view(at::kFloat8_e4m3fn).to(at::kFloat) * rows.scale.unsqueeze(-1);
}

}  // namespace lockstep::model
