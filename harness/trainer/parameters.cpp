#include "harness/trainer/parameters.hpp"

#include "model/layers/parameter_policy.hpp"

namespace lockstep::harness {

ResidentParameters::ResidentParameters(const model::WeightSource& source,
                                       const model::Numerics& num,
                                       bool grads) {
  for (const std::string& name : source.names()) {
    Tensor value = source.load(name).to(model::parameter_dtype(name, num)).contiguous();
    // A view of the checkpoint's mapping would change with the file; leaves own their memory.
    if (source.on_disk()) value = value.clone();
    source.release(name);
    if (grads && !model::is_frozen(name)) {
      value.requires_grad_(true);
      leaves_.emplace(name, value);
    }
    values_.emplace(name, std::move(value));
  }
  if (source.config().tie_word_embeddings)
    values_["lm_head.weight"] = values_.at("embed_tokens.weight");
}

Tensor ResidentParameters::get(const std::string& name) {
  const auto found = values_.find(name);
  LOCKSTEP_CHECK(found != values_.end(), kInternal, "parameters: the model has no {}", name);
  return found->second;
}

void ResidentParameters::zero_grads() {
  for (auto& [name, leaf] : leaves_) leaf.mutable_grad() = Tensor();
}

StreamedParameters::StreamedParameters(const model::WeightSource& source,
                                       const model::Numerics& num)
    : source_(source), num_(num) {}

Tensor StreamedParameters::get(const std::string& name) {
  const bool tied = name == "lm_head.weight" && source_.config().tie_word_embeddings;
  const std::string stored = tied ? "embed_tokens.weight" : name;
  return source_.load(stored).to(model::parameter_dtype(stored, num_)).contiguous();
}

void StreamedParameters::release_layer(int64_t layer) {
  const std::string prefix = fmt::format("layers.{}.", layer);
  for (const std::string& name : source_.names()) {
    if (name.starts_with(prefix)) source_.release(name);
  }
}

}  // namespace lockstep::harness
