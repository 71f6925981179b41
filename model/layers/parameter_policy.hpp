// In which dtype a policy computes with a parameter.
#pragma once

#include <string_view>

#include "model/config/numerics.hpp"

namespace lockstep::model {

/// dtype of the compute copy of the parameter with this internal name. float64 and float32 policies
/// use their width for everything; bf16 policies use bfloat16 but for the tensors a switch keeps in
/// float32 (D01-D03, D14, D35, D48, D49).
at::ScalarType parameter_dtype(std::string_view internal_name, const Numerics& num);

/// Indexer parameters are frozen: they get no gradient and no optimizer state. So is the correction
/// bias, a buffer.
bool is_frozen(std::string_view internal_name);

}  // namespace lockstep::model
