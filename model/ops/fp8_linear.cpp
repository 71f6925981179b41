#include "model/ops/fp8_linear.hpp"

#include <algorithm>
#include <cmath>

#include "model/base/parallel.hpp"
#include "model/ops/fp8.hpp"

namespace lockstep::model {
namespace {

int64_t blocks_of(int64_t size) { return (size + kFp8Block - 1) / kFp8Block; }

Tensor values(const Tensor& bytes) { return bytes.view(at::kFloat8_e4m3fn).to(at::kFloat); }

void check_linear(const Tensor& x, const Fp8Blocks& weight, const Numerics& num) {
  LOCKSTEP_CHECK(num.acc() == at::kFloat,
                 kConfig,
                 "linear_fp8: FP8 products are added in float32, policy {} accumulates in {}",
                 num.name(),
                 dtype_name(num.acc()));
  check_shape(x, {-1, -1}, "linear_fp8: x [T, K]");
  check_dtype(x, num.act(), "linear_fp8: x");
  check_shape(weight.bytes, {-1, x.size(1)}, "linear_fp8: weight [N, K]");
  check_dtype(weight.bytes, at::kByte, "linear_fp8: weight");
  check_shape(weight.scale,
              {blocks_of(weight.bytes.size(0)), blocks_of(x.size(1))},
              "linear_fp8: scale [N / 128, K / 128]");
}

/// Codes as float [T, K] and scales [T, blocks] of activation rows.
std::pair<Tensor, Tensor> quantised_rows(const Tensor& x) {
  const Tensor wide = x.to(at::kFloat);
  std::vector<Tensor> codes, scales;
  for (int64_t k = 0; k < x.size(1); k += kFp8Block) {
    const Fp8Rows rows = quantise_rows(
        wide.narrow(1, k, std::min(kFp8Block, x.size(1) - k)).contiguous(), Fp8Scale::kExact);
    codes.push_back(values(rows.bytes));
    scales.push_back(rows.scale);
  }
  return {at::cat(codes, 1), at::stack(scales, 1)};
}

/// A scale for every row of a weight, [N, blocks of K].
Tensor scale_rows(const Fp8Blocks& weight) {
  return weight.scale.repeat_interleave(kFp8Block, 0).narrow(0, 0, weight.bytes.size(0));
}

}  // namespace

Fp8Blocks quantise_blocks(const Tensor& weight) {
  const Tensor wide = weight.detach().to(at::kFloat).contiguous();
  if (wide.dim() == 3) {
    std::vector<Tensor> bytes, scale;
    for (int64_t e = 0; e < wide.size(0); ++e) {
      Fp8Blocks one = quantise_blocks(wide[e]);
      bytes.push_back(std::move(one.bytes));
      scale.push_back(std::move(one.scale));
    }
    return {at::stack(bytes), at::stack(scale)};
  }
  check_shape(wide, {-1, -1}, "quantise_blocks: weight [N, K]");
  const int64_t n = wide.size(0), k = wide.size(1), columns = blocks_of(k);
  Fp8Blocks out{at::empty({n, k}, at::kByte), at::empty({blocks_of(n), columns}, at::kFloat)};
  const float* w = wide.const_data_ptr<float>();
  auto* bytes = out.bytes.mutable_data_ptr<uint8_t>();
  float* scales = out.scale.mutable_data_ptr<float>();
  parallel_for(0, out.scale.numel(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t row = block / columns * kFp8Block, column = block % columns * kFp8Block;
      const int64_t last_row = std::min(n, row + kFp8Block),
                    last_column = std::min(k, column + kFp8Block);
      float amax = 0;
      for (int64_t i = row; i < last_row; ++i)
        for (int64_t j = column; j < last_column; ++j)
          amax = std::max(amax, std::fabs(w[i * k + j]));
      const float scale = std::max(amax / kFp8Max, 1e-12F);
      scales[block] = scale;
      for (int64_t i = row; i < last_row; ++i)
        for (int64_t j = column; j < last_column; ++j)
          bytes[i * k + j] = e4m3_encode(w[i * k + j] / scale);
    }
  });
  return out;
}

Tensor dequantise_blocks(const Fp8Blocks& blocks) {
  const int64_t n = blocks.bytes.size(-2), k = blocks.bytes.size(-1);
  const Tensor scale = blocks.scale.repeat_interleave(kFp8Block, -2)
                           .narrow(-2, 0, n)
                           .repeat_interleave(kFp8Block, -1)
                           .narrow(-1, 0, k);
  return values(blocks.bytes) * scale;
}

Tensor linear_fp8(const Tensor& x, const Fp8Blocks& weight, const Numerics& num) {
  const at::NoGradGuard no_grad;
  check_linear(x, weight, num);
  const auto [codes, scales] = quantised_rows(x);
  const Tensor w = values(weight.bytes), w_scale = scale_rows(weight);
  Tensor y = at::zeros({x.size(0), w.size(0)}, at::kFloat);
  for (int64_t b = 0; b < scales.size(1); ++b) {
    const int64_t k = b * kFp8Block, count = std::min(kFp8Block, x.size(1) - k);
    const Tensor product =
        at::matmul(codes.narrow(1, k, count), w.narrow(1, k, count).transpose(0, 1));
    y += product * scales.narrow(1, b, 1) * w_scale.select(1, b);
  }
  return y.to(num.act());
}

Tensor linear_fp8_reference(const Tensor& x, const Fp8Blocks& weight, const Numerics& num) {
  const at::NoGradGuard no_grad;
  check_linear(x, weight, num);
  const auto [codes, scales] = quantised_rows(x);
  const Tensor rows =
      codes.to(at::kDouble) *
      scales.repeat_interleave(kFp8Block, 1).narrow(1, 0, x.size(1)).to(at::kDouble);
  const Tensor scale = scale_rows(weight).repeat_interleave(kFp8Block, 1).narrow(1, 0, x.size(1));
  const Tensor w = values(weight.bytes).to(at::kDouble) * scale.to(at::kDouble);
  return at::matmul(rows, w.transpose(0, 1)).to(num.act());
}

}  // namespace lockstep::model
