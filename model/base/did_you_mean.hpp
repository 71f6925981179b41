// Hints for words that were mistyped.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// "; did you mean 'x'?" of the candidate closest to `word` by edit distance, or "" when none is
/// near enough to be meant.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace lockstep
