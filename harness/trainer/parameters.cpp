#include "harness/trainer/parameters.hpp"

#include "model/layers/parameter_policy.hpp"

namespace lockstep::harness {

StreamedParameters::StreamedParameters(const model::WeightSource& source,
                                       const model::Numerics& num,
                                       at::Device device)
    : source_(source), num_(num), device_(device) {}

Tensor StreamedParameters::get(const std::string& name) {
  const bool tied = name == "lm_head.weight" && source_.config().tie_word_embeddings;
  const std::string stored = tied ? "embed_tokens.weight" : name;
  return source_.load(stored).to(device_, model::parameter_dtype(stored, num_)).contiguous();
}

void StreamedParameters::leave(int64_t unit, model::Pass) {
  const std::string prefix = fmt::format("layers.{}.", unit);
  for (const std::string& name : source_.names()) {
    if (name.starts_with(prefix)) source_.release(name);
  }
}

}  // namespace lockstep::harness
