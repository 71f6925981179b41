#include "harness/launch/workload.hpp"

#include "harness/launch/documents_file.hpp"
#include "harness/launch/paths.hpp"

namespace lockstep::harness {
namespace {

/// dt_bias shifted, everything else as it is.
class ShiftedDecay final : public model::WeightSource {
 public:
  ShiftedDecay(std::shared_ptr<const model::WeightSource> source, double bias)
      : source_(std::move(source)), bias_(bias) {}
  const model::ModelConfig& config() const override { return source_->config(); }
  std::vector<std::string> names() const override { return source_->names(); }
  model::WeightSpec spec(const std::string& name) const override { return source_->spec(name); }
  Tensor load(const std::string& name) const override {
    const Tensor value = source_->load(name);
    return name.ends_with("dt_bias") ? value.add(bias_) : value;
  }
  std::vector<std::pair<std::string, Tensor>> disk_tensors(const std::string& name,
                                                           const Tensor& value) const override {
    return source_->disk_tensors(name, value);
  }
  void release(const std::string& name) const override { source_->release(name); }
  bool on_disk() const override { return source_->on_disk(); }
  std::vector<std::string> dropped() const override { return source_->dropped(); }

 private:
  std::shared_ptr<const model::WeightSource> source_;
  double bias_;
};

/// Runs `body`; errors of the rooms below get the place of the table that asked.
template <typename Body>
auto at_place(const std::string& where, Body&& body) {
  try {
    return body();
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("scenario {}: {}", where, error.what()));
  }
}

std::string json_object(const std::map<std::string, std::string>& members) {
  std::string text;
  for (const auto& [key, value] : members) {
    text += fmt::format("{}\"{}\": {}", text.empty() ? "" : ", ", key, value);
  }
  return "{" + text + "}";
}

}  // namespace

model::ModelConfig resolve_config(const ModelSpec& spec) {
  return at_place(spec.where, [&] {
    if (!spec.preset.empty()) {
      const model::ModelConfig config = model::preset_config(spec.preset);
      return spec.overrides.empty() ? config
                                    : model::with_overrides(config, json_object(spec.overrides));
    }
    if (!spec.checkpoint.empty()) {
      return model::load_config(spec.checkpoint.string(), spec.defaults);
    }
    const golden::GoldenCase stored = golden::open_golden(golden_folder(), spec.golden);
    return model::parse_config(stored.config_json(), spec.defaults, "golden case " + spec.golden);
  });
}

Workload golden_workload(const golden::GoldenCase& stored) {
  Workload work;
  const model::ModelConfig config = model::parse_config(
      stored.config_json(), model::ConfigDefaults::kRefuse, "golden case " + stored.name());
  if (const auto folder = stored.checkpoint(); !folder.empty()) {
    work.source = model::open_checkpoint(folder.string());
    work.checkpoint = fmt::format("golden {}, checkpoint {}",
                                  stored.name(),
                                  (folder.parent_path().filename() / folder.filename()).string());
  } else {
    work.source = model::seeded_source(config, stored.seed());
    work.checkpoint = fmt::format("golden {}, seed {}", stored.name(), stored.seed());
  }
  const Tensor ids = stored.ids().contiguous();
  const int64_t* id = ids.const_data_ptr<int64_t>();
  const std::vector<int64_t> cu = stored.cu_seqlens();
  std::vector<std::vector<int64_t>> documents;
  for (size_t d = 0; d + 1 < cu.size(); ++d) documents.emplace_back(id + cu[d], id + cu[d + 1]);
  work.documents = make_documents(documents);
  for (const char* key : {"generator_commit", "torch", "transformers", "cpu", "weights_sha256"}) {
    if (!stored.file().has_attribute("", key)) continue;
    work.provenance.emplace_back(key, stored.file().attribute_string("", key));
  }
  return work;
}

std::shared_ptr<const model::WeightSource> with_decay_bias(
    std::shared_ptr<const model::WeightSource> source, double decay_bias) {
  if (decay_bias == 0) return source;
  return std::make_shared<ShiftedDecay>(std::move(source), decay_bias);
}

model::Numerics numerics_of(const RunSpec& run) {
  model::Numerics numerics = model::Numerics::policy(run.policy);
  for (const auto& [id, value] : run.numerics) numerics.set(id, value);
  return numerics;
}

void add_numerics(RunSpec& run, const std::string& id, const std::string& value) {
  for (const auto& [other, given] : run.numerics)
    LOCKSTEP_CHECK(other != id || given == value,
                   kInput,
                   "--numerics {}={}: {} is given as {} already; give each switch once",
                   id,
                   value,
                   id,
                   given);
  run.numerics.emplace_back(id, value);
}

Workload load_workload(const Scenario& scenario) {
  const ModelSpec& spec = scenario.model;
  Workload work;
  const model::ModelConfig config = resolve_config(spec);
  at_place(spec.where, [&] {
    if (!spec.checkpoint.empty()) {
      work.source = model::open_checkpoint(spec.checkpoint.string(), spec.defaults);
      work.checkpoint = spec.checkpoint.filename().string();
      if (work.checkpoint.empty()) work.checkpoint = spec.checkpoint.parent_path().filename();
    } else if (!spec.preset.empty()) {
      work.source = model::seeded_source(config, spec.seed);
      work.checkpoint = fmt::format("preset {}, seed {}", spec.preset, spec.seed);
    } else {
      work = golden_workload(golden::open_golden(golden_folder(), spec.golden));
    }
    work.source = with_decay_bias(std::move(work.source), spec.decay_bias);
    if (spec.decay_bias != 0) {
      work.provenance.emplace_back("decay_bias", fmt::format("{}", spec.decay_bias));
    }
    return 0;
  });
  at_place(scenario.data.where.empty() ? spec.where : scenario.data.where, [&] {
    const DataSpec& data = scenario.data;
    if (!data.file.empty()) {
      work.documents = read_documents(data.file, config.vocab_size);
    } else if (!data.documents.empty()) {
      work.documents = random_documents(
          data.documents, config.vocab_size, config.pad_token_id.value_or(-1), data.seed);
    }
    return 0;
  });
  return work;
}

}  // namespace lockstep::harness
