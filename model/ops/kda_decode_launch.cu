#include <cuda_runtime.h>

#include "model/ops/kda_cuda.hpp"
#include "model/ops/kda_decode_kernel.cuh"
#include "model/ops/kda_launch.cuh"

namespace lockstep::model {

KdaCudaResult kda_decode(const KdaDecodeArgs& a, CUstream_st* stream) {
  if (a.sequences < 0 || a.heads < 1)
    return kda_bad_argument("sequences must be >= 0 and heads >= 1");
  if (a.sequences == 0) return {};
  if (a.sequences * a.heads >= (int64_t{1} << 30))
    return kda_bad_argument("sequences * heads must stay below 2^30: split the batch");
  if (!(a.lower_bound < 0.0f)) return kda_bad_argument("lower_bound must be negative");
  if (!a.q_BHK || !a.k_BHK || !a.v_BHV || !a.f_BHK || !a.beta_logit_BH || !a.a_log_H ||
      !a.dt_bias_HK || !a.slots_B || !a.state_SHKV || !a.o_BHV)
    return kda_bad_argument("no pointer of a decode step may be null");
  if (!kda_aligned(a.v_BHV) || !kda_aligned(a.state_SHKV) || !kda_aligned(a.o_BHV))
    return kda_bad_argument("v, state and o must be 16-byte aligned");
  const KdaDevice device = kda_device();
  if (device.error != cudaSuccess) return kda_failed(device.error);
  if (!device.hopper)
    return {KdaCudaStatus::kUnsupportedDevice, 0, "needs compute capability 9.0 (sm_90a code)"};
  const kda::DecodeParams p{a.heads,
                            a.lower_bound,
                            a.q_BHK,
                            a.k_BHK,
                            a.v_BHV,
                            a.f_BHK,
                            a.beta_logit_BH,
                            a.a_log_H,
                            a.dt_bias_HK,
                            a.slots_B,
                            a.state_SHKV,
                            a.o_BHV};
  const auto blocks = static_cast<unsigned>(2 * a.sequences * a.heads);
  kda::decode_kernel<<<blocks, kda::kDecodeThreads, 0, stream>>>(p);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? KdaCudaResult{} : kda_failed(error);
}

}  // namespace lockstep::model
