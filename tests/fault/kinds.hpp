// The kinds of calls that a fault can hit.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace lockstep::tests {

inline constexpr std::array<std::string_view, 8> kKinds = {"all-gather",
                                                           "reduce-scatter",
                                                           "all-reduce",
                                                           "all-to-all",
                                                           "broadcast",
                                                           "barrier",
                                                           "message",
                                                           "pending"};
inline constexpr int64_t kDeadlineMs = 1500;
inline constexpr int64_t kFarDeadlineMs = 60000;  ///< where nobody may wait for it

}  // namespace lockstep::tests
