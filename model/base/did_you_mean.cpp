#include "model/base/did_you_mean.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep {
namespace {

/// The candidate closest to `word` by edit distance, empty when none is near enough to be meant.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  std::string best;
  size_t best_distance = std::max<size_t>(2, word.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    std::vector<size_t> row(candidate.size() + 1);
    for (size_t j = 0; j < row.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= word.size(); ++i) {
      size_t diagonal = row[0];
      row[0] = i;
      for (size_t j = 1; j < row.size(); ++j) {
        const size_t above = row[j];
        const size_t replace = diagonal + (word[i - 1] == candidate[j - 1] ? 0 : 1);
        row[j] = std::min({above + 1, row[j - 1] + 1, replace});
        diagonal = above;
      }
    }
    if (row.back() < best_distance) {
      best_distance = row.back();
      best = candidate;
    }
  }
  return best;
}

}  // namespace

std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates) {
  const std::string best = nearest(word, candidates);
  return best.empty() ? "" : fmt::format("; did you mean '{}'?", best);
}

}  // namespace lockstep
