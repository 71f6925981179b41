// Built without the CUDA toolkit: no kernel takes any call.
#include "model/ops/device_kernels.hpp"

namespace lockstep::model {

std::optional<Tensor> conv_silu_kernel(
    const Tensor&, const Tensor&, std::span<const int64_t>, const Tensor&, const Numerics&) {
  return std::nullopt;
}
std::optional<KdaOutput> kda_chunk_kernel(const KdaInput&, const Numerics&) { return std::nullopt; }
std::optional<HcPre> hc_pre_kernel(const Tensor&,
                                   const Tensor&,
                                   const Tensor&,
                                   const Tensor&,
                                   const Tensor&,
                                   const HcParams&,
                                   const Numerics&,
                                   const Tensor&) {
  return std::nullopt;
}
std::optional<Tensor> hc_post_kernel(
    const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Numerics&) {
  return std::nullopt;
}
std::optional<Tensor> gather_rows_kernel(const Tensor&, const ExpertOrder&) { return std::nullopt; }
std::optional<Tensor> combine_experts_kernel(const Tensor&,
                                             const ExpertOrder&,
                                             const Tensor&,
                                             const Numerics&) {
  return std::nullopt;
}
std::optional<Tensor> grouped_experts_kernel(const Tensor&,
                                             const std::vector<int64_t>&,
                                             const Tensor&,
                                             const Tensor&,
                                             std::optional<double>,
                                             const Numerics&) {
  return std::nullopt;
}
std::optional<Tensor> sparse_mla_kernel(
    const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, const Numerics&) {
  return std::nullopt;
}

}  // namespace lockstep::model
