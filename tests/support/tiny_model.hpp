// The small model that most tests run, and documents for it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "harness/engine/documents.hpp"
#include "model/checkpoint/weight_source.hpp"
#include "model/config/config_json.hpp"

namespace lockstep::tests {

inline std::shared_ptr<const model::WeightSource> tiny() {
  static const std::shared_ptr<const model::WeightSource> source =
      model::seeded_source(model::preset_config("tiny"), 7);
  return source;
}

/// Documents of these lengths for tiny(), without its padding token.
inline harness::Documents tiny_documents(const std::vector<int64_t>& lengths, uint64_t seed = 11) {
  return harness::random_documents(lengths, tiny()->config().vocab_size, 0, seed);
}

}  // namespace lockstep::tests
