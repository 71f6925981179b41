// What both forms of the hyper-connection operators ask first: argument checks, and the numerics
// policy resolved into plain data.
#pragma once

#include "model/ops/hyper_connection.hpp"
#include "model/ops/hyper_connection_kernels.hpp"

namespace lockstep::model {

HcShape check_hc_pre(const Tensor& x,
                     const Tensor& fn,
                     const Tensor& base,
                     const Tensor& scale,
                     const Tensor& norm_weight,
                     const HcParams& params,
                     const Numerics& num,
                     const Tensor& unrounded);
HcShape check_hc_post(
    const Tensor& y, const Tensor& x, const Tensor& post, const Tensor& comb, const Numerics& num);
HcShape check_hc_streams(const Tensor& x, const Numerics& num, const char* what);

HcProjection hc_projection(const HcShape& shape, const Numerics& num);
HcMix hc_mix(const Numerics& num);

}  // namespace lockstep::model
