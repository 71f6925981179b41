// RMSNorm, plain and gated.
#pragma once

#include "model/base/weight.hpp"
#include "model/config/numerics.hpp"

namespace lockstep::model {

/// weight * x / sqrt(mean(x^2) + eps) over the last dim. x [..., D] act, weight [D]; returns act.
/// Statistic in acc. numerics: D11 (one or two roundings), D13 (weight rounded to bf16). With
/// weight.sum, every row's gradient of the weight is added exactly.
Tensor rms_norm(const Tensor& x, const Weight& weight, double eps, const Numerics& num);
Tensor rms_norm_reference(const Tensor& x, const Tensor& weight, double eps, const Numerics& num);

/// rms_norm over the last dim of o [T, H, V], times sigmoid(gate [T, H, V]), everything in acc with
/// one rounding at the end (all programs agree on that); weight [V]. numerics: D29 (epsilon).
Tensor gated_rms_norm(
    const Tensor& o, const Tensor& gate, const Weight& weight, double eps, const Numerics& num);
Tensor gated_rms_norm_reference(
    const Tensor& o, const Tensor& gate, const Tensor& weight, double eps, const Numerics& num);

}  // namespace lockstep::model
