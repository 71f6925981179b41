// What operators with exact sums share.
#pragma once

#include "model/base/stash.hpp"
#include "model/base/weight.hpp"
#include "model/config/numerics.hpp"

namespace lockstep::model {

inline int64_t num_blocks(const RowBlocks& blocks) {
  return static_cast<int64_t>(blocks->size()) - 1;
}

/// Throws kShape unless a weight's exact sum, if it has one, fits the weight and the policy.
inline void check_exact(const Weight& weight, const Numerics& num, std::string_view what) {
  if (!weight.sum.defined()) return;
  LOCKSTEP_CHECK(weight.value.device().is_cpu(),
                 kConfig,
                 "{}: exact sums are formed on the CPU, the weight is on {}",
                 what,
                 weight.value.device().str());
  LOCKSTEP_CHECK(num.acc() == at::kFloat,
                 kShape,
                 "{}: exact sums are of float32 numbers, policy {} accumulates in {}",
                 what,
                 num.name(),
                 dtype_name(num.acc()));
  check_shape(weight.value, weight.sum.sizes(), what);
}

/// The same, and its blocks end at `rows`.
inline void check_exact(const Weight& weight,
                        int64_t rows,
                        const Numerics& num,
                        std::string_view what) {
  check_exact(weight, num, what);
  if (!weight.sum.defined() && weight.blocks == nullptr) return;
  LOCKSTEP_CHECK(weight.blocks != nullptr && weight.blocks->back() == rows,
                 kShape,
                 "{}: blocks of rows end at {}, but there are {} rows",
                 what,
                 weight.blocks == nullptr ? -1 : weight.blocks->back(),
                 rows);
}

}  // namespace lockstep::model
