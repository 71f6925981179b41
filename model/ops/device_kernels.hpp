// The kernels of *_cuda.hpp as operators call them: tensors in, tensors out, with gradients.
//
// Each takes the arguments of the operator it is named after, already checked, and returns nothing
// where no kernel takes the call: another device or width, roundings that the kernel does not make,
// or a build without the CUDA toolkit. The operator then runs in plain tensor functions.
#pragma once

#include <optional>
#include <span>

#include "model/base/weight.hpp"
#include "model/config/numerics.hpp"
#include "model/ops/hyper_connection.hpp"
#include "model/ops/kda.hpp"
#include "model/ops/moe.hpp"

namespace lockstep::model {

/// bf16, width 4, channels in eights.
std::optional<Tensor> conv_silu_kernel(const Tensor& x,
                                       const Tensor& weight,
                                       std::span<const int64_t> cu,
                                       const Tensor& halo,
                                       const Numerics& num);

/// bf16, heads of 128, chunks of 64 with bf16 operands, a lower bound of -5 or above.
std::optional<KdaOutput> kda_chunk_kernel(const KdaInput& in, const Numerics& num);

/// bf16, 4 streams of 4096.
std::optional<HcPre> hc_pre_kernel(const Tensor& x,
                                   const Tensor& fn,
                                   const Tensor& base,
                                   const Tensor& scale,
                                   const Tensor& norm_weight,
                                   const HcParams& params,
                                   const Numerics& num,
                                   const Tensor& unrounded);
std::optional<Tensor> hc_post_kernel(
    const Tensor& y, const Tensor& x, const Tensor& post, const Tensor& comb, const Numerics& num);

/// bf16, rows in eights, up to 32 experts a token.
std::optional<Tensor> gather_rows_kernel(const Tensor& x, const ExpertOrder& order);
std::optional<Tensor> combine_experts_kernel(const Tensor& rows,
                                             const ExpertOrder& order,
                                             const Tensor& weights,
                                             const Numerics& num);
/// bf16 with bf16 weights, both widths in 128s, up to 512 experts.
std::optional<Tensor> grouped_experts_kernel(const Tensor& rows,
                                             const std::vector<int64_t>& offsets,
                                             const Tensor& gate_up,
                                             const Tensor& down,
                                             std::optional<double> limit,
                                             const Numerics& num);

/// bf16 in the absorbed form, a latent of 512, up to 64 heads.
std::optional<Tensor> sparse_mla_kernel(const Tensor& q,
                                        const Tensor& latent,
                                        const Tensor& kv_b,
                                        const Tensor& selection,
                                        int64_t d_v,
                                        const Numerics& num);

}  // namespace lockstep::model
