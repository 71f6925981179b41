#include <fmt/ranges.h>

#include "model/base/seeded.hpp"
#include "model/checkpoint/weight_source.hpp"

namespace lockstep::model {
namespace {

/// Parameters of a config by name, in order.
class ParameterList {
 public:
  explicit ParameterList(const ModelConfig& config) : list_(expected_parameters(config)) {
    for (size_t i = 0; i < list_.size(); ++i) index_[list_[i].name] = i;
  }
  [[nodiscard]] const std::vector<Parameter>& list() const { return list_; }
  [[nodiscard]] const Parameter* find(const std::string& name) const {
    const auto found = index_.find(name);
    return found == index_.end() ? nullptr : &list_[found->second];
  }
  [[nodiscard]] const Parameter& at(const std::string& name) const {
    const Parameter* p = find(name);
    LOCKSTEP_CHECK(p != nullptr,
                   kInput,
                   "no parameter {} in this model of {} parameters (the first is {})",
                   name,
                   list_.size(),
                   list_.front().name);
    return *p;
  }
  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const Parameter& p : list_) names.push_back(p.name);
    return names;
  }

 private:
  std::vector<Parameter> list_;
  std::map<std::string, size_t> index_;
};

std::vector<std::pair<std::string, Tensor>> released_tensors(const ModelConfig& config,
                                                             const Parameter& parameter,
                                                             const Tensor& value) {
  const std::vector<Tensor> parts = split_parts(parameter, Naming::kReleased, value);
  std::vector<std::pair<std::string, Tensor>> named;
  for (size_t k = 0; k < parts.size(); ++k) {
    const std::string& part = parameter.parts_in(Naming::kReleased)[k].name;
    named.emplace_back(disk_name(part, Naming::kReleased, config.composite), parts[k]);
  }
  return named;
}

class MemorySource final : public WeightSource {
 public:
  MemorySource(ModelConfig config, std::map<std::string, Tensor> weights)
      : config_(std::move(config)), parameters_(config_), weights_(std::move(weights)) {
    std::vector<std::string> missing, unknown, wrong;
    for (const Parameter& p : parameters_.list()) {
      const auto found = weights_.find(p.name);
      if (found == weights_.end()) {
        missing.push_back(p.name);
      } else if (found->second.sizes() != at::IntArrayRef(p.shape)) {
        wrong.push_back(fmt::format(
            "{} {}, expected [{}]", p.name, describe(found->second), fmt::join(p.shape, ", ")));
      }
    }
    for (const auto& [name, tensor] : weights_) {
      if (parameters_.find(name) == nullptr) unknown.push_back(name);
    }
    LOCKSTEP_CHECK(missing.empty() && unknown.empty() && wrong.empty(),
                   kInput,
                   "weights in memory do not fit the config: missing [{}], unknown [{}], wrong "
                   "shape [{}]",
                   fmt::join(missing, ", "),
                   fmt::join(unknown, ", "),
                   fmt::join(wrong, ", "));
  }

  [[nodiscard]] const ModelConfig& config() const override { return config_; }
  [[nodiscard]] std::vector<std::string> names() const override { return parameters_.names(); }
  [[nodiscard]] WeightSpec spec(const std::string& name) const override {
    return {weights_.at(parameters_.at(name).name).scalar_type(), parameters_.at(name).shape};
  }
  [[nodiscard]] Tensor load(const std::string& name) const override {
    return weights_.at(parameters_.at(name).name).contiguous();
  }
  [[nodiscard]] std::vector<std::pair<std::string, Tensor>> disk_tensors(
      const std::string& name, const Tensor& value) const override {
    return released_tensors(config_, parameters_.at(name), value);
  }

 private:
  ModelConfig config_;
  ParameterList parameters_;
  std::map<std::string, Tensor> weights_;
};

class SeededSource final : public WeightSource {
 public:
  SeededSource(ModelConfig config, uint64_t seed)
      : config_(std::move(config)), parameters_(config_), seed_(seed) {}

  [[nodiscard]] const ModelConfig& config() const override { return config_; }
  [[nodiscard]] std::vector<std::string> names() const override { return parameters_.names(); }
  [[nodiscard]] WeightSpec spec(const std::string& name) const override {
    const Parameter& p = parameters_.at(name);
    return {p.disk_dtype, p.shape};
  }
  [[nodiscard]] Tensor load(const std::string& name) const override {
    return load_rows(name, 0, parameters_.at(name).shape.front());
  }
  [[nodiscard]] Tensor load_rows(const std::string& name,
                                 int64_t begin,
                                 int64_t end) const override {
    const Parameter& p = parameters_.at(name);
    LOCKSTEP_CHECK(begin >= 0 && begin <= end && end <= p.shape.front(),
                   kInput,
                   "{}: rows [{}, {}) of {}",
                   name,
                   begin,
                   end,
                   p.shape.front());
    const int64_t row = p.numel() / p.shape.front();
    std::vector<int64_t> shape = p.shape;
    shape.front() = end - begin;
    Tensor values = at::empty(shape, at::kFloat);
    auto* out = values.mutable_data_ptr<float>();
    int64_t at = 0;  // first element of the part
    for (const DiskPart& part : p.parts_in(Naming::kReleased)) {
      const std::string disk = disk_name(part.name, Naming::kReleased, false);
      const uint64_t key = seeded_key(seed_, disk);
      const SeededRange range = seeded_range(config_, disk, part.shape);
      const int64_t from = std::max(at, begin * row), to = std::min(at + part.numel(), end * row);
      for (int64_t i = from; i < to; ++i) {
        const double u = static_cast<double>(seeded_value(key, i - at));
        out[i - begin * row] = static_cast<float>(range.offset + range.amp * u);
      }
      at += part.numel();
    }
    return values.to(p.disk_dtype);
  }
  [[nodiscard]] std::vector<std::pair<std::string, Tensor>> disk_tensors(
      const std::string& name, const Tensor& value) const override {
    return released_tensors(config_, parameters_.at(name), value);
  }

 private:
  ModelConfig config_;
  ParameterList parameters_;
  uint64_t seed_;
};

}  // namespace

Tensor WeightSource::load_rows(const std::string& name, int64_t begin, int64_t end) const {
  const WeightSpec expected = spec(name);
  LOCKSTEP_CHECK(begin >= 0 && begin <= end && end <= expected.shape.front(),
                 kInput,
                 "{}: rows [{}, {}) of {}",
                 name,
                 begin,
                 end,
                 expected.shape.front());
  return load(name).narrow(0, begin, end - begin);
}

SeededRange seeded_range(const ModelConfig& c,
                         const std::string& name,
                         const std::vector<int64_t>& shape) {
  const auto ends = [&](std::string_view suffix) { return name.ends_with(suffix); };
  const auto spread = [](int64_t fan_in) { return std::sqrt(3.0 / static_cast<double>(fan_in)); };
  if (ends("layernorm.weight") || ends("norm.weight")) return {1.0, 0.2};
  if (ends("k_norm.bias")) return {0.0, 0.1};
  if (ends("_base")) return {0.0, 0.5};
  if (ends("_scale")) return {1.0, 0.3};
  if (ends("A_log")) return {0.0, 0.5};
  if (ends("dt_bias")) {
    return c.linear_lower_bound ? SeededRange{-2.5, 2.5} : SeededRange{-1.0, 1.5};
  }
  if (ends("_conv1d.weight")) return {0.0, spread(c.linear_conv_kernel_dim)};
  if (ends("e_score_correction_bias")) return {0.0, 0.1};
  if (ends("index_kpool_compress_ape")) return {0.0, 0.5};
  if (ends("embed_tokens.weight")) return {0.0, 0.5 * std::sqrt(3.0)};
  if (ends("lm_head.weight")) return {0.0, 2.0 * spread(c.hidden_size)};
  return {0.0, spread(shape.back())};  // [out, in], hc_*_fn included
}

std::unique_ptr<WeightSource> seeded_source(ModelConfig config, uint64_t seed) {
  validate(config, "seeded weights");
  return std::make_unique<SeededSource>(std::move(config), seed);
}

std::unique_ptr<WeightSource> memory_source(ModelConfig config,
                                            std::map<std::string, Tensor> weights) {
  validate(config, "weights in memory");
  return std::make_unique<MemorySource>(std::move(config), std::move(weights));
}

}  // namespace lockstep::model
