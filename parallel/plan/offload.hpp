// What of the training state is kept in the memory of the host instead of the device's.
#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep::parallel {

enum class Offload : uint8_t {
  kNone,
  kOptimizer,  ///< the optimizer's state, which comes to the device for its step
  kFull,  ///< masters, the optimizer's state and gradients, which leave the device unit by unit
          ///< in the dtype that is computed with, and are applied by the host as they arrive
};

/// "none", "optimizer", "full".
std::string_view offload_name(Offload offload);
/// Throws kConfig for any other name.
Offload parse_offload(std::string_view name);

}  // namespace lockstep::parallel
