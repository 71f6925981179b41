// What the ranks of a killed save and the test that reads what they left have in common.
#pragma once

#include "harness/trainer/trainer.hpp"
#include "tests/fault/kinds.hpp"
#include "tests/support/tiny_model.hpp"

namespace lockstep::tests {

inline harness::TrainerOptions killed_save_options() {
  harness::TrainerOptions options;
  options.numerics = model::Numerics::policy("fsdp-fp32-islands");
  options.optimizer = parallel::OptimizerOptions{};
  return options;
}

}  // namespace lockstep::tests
