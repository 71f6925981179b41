// Conversion, export and inspection of checkpoint folders.
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>

#include "model/checkpoint/checkpoint_source.hpp"
#include "tests/unit/checkpoint_test_support.hpp"

namespace lockstep::model {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)
namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

/// The tensors of a folder without the vision tower.
Tensors text_tensors(const std::string& folder) {
  Tensors tensors = read_all(folder);
  std::erase_if(tensors, [](const auto& t) { return t.first.starts_with("model.visual."); });
  return tensors;
}

void expect_same_tensors(const Tensors& got, const Tensors& want) {
  for (const auto& [name, tensor] : want) {
    ASSERT_TRUE(got.contains(name)) << name;
    EXPECT_TRUE(same_bytes(got.at(name), tensor)) << name;
  }
  EXPECT_EQ(got.size(), want.size());
}

TEST(Convert, HfToInternalAndBackKeepsEveryTextTensorByteForByte) {
  Folder dir;
  for (const char* scheme : {"released", "modules"}) {
    const std::string from = kHfTiny + "/" + scheme;
    const ConvertReport in = convert(from, dir / scheme + "-internal", "internal");
    EXPECT_EQ(in.num_parameters, 127208);
    EXPECT_EQ(in.num_quantized, 0);
    EXPECT_EQ(in.dropped.size(), 25U);
    EXPECT_THAT(in.text(), HasSubstr("model.visual.merger.proj.weight"));
    const ConvertReport out = convert(dir / scheme + "-internal", dir / scheme + "-hf", "hf");
    EXPECT_TRUE(out.dropped.empty());
    expect_same_tensors(text_tensors(dir / scheme + "-hf"), text_tensors(kHfTiny + "/released"));
    export_checkpoint(*open_checkpoint(dir / scheme + "-internal"),
                      dir / scheme + "-modules",
                      Naming::kTransformers);
    expect_same_tensors(text_tensors(dir / scheme + "-modules"),
                        text_tensors(kHfTiny + "/modules"));
    expect_same_weights(*open_checkpoint(dir / scheme + "-internal"), *open_checkpoint(from));
  }
  // The two schemes come out as the same files.
  for (const char* file : {"model.safetensors", "config.json"}) {
    EXPECT_EQ(read_text_file(dir / "released-hf" + "/" + file),
              read_text_file(dir / "modules-hf" + "/" + file));
  }
  EXPECT_THAT(dir.listing(),
              ElementsAre("modules-hf",
                          "modules-internal",
                          "modules-modules",
                          "released-hf",
                          "released-internal",
                          "released-modules"));
}

TEST(Convert, ExpertsOfATaggedCheckpointComeBackWithTheirOwnTag) {
  const ModelConfig config = preset_config("tiny");
  const auto seeded = seeded_source(config, 1);
  Tensors weights;
  for (const Parameter& p : expected_parameters(config)) {
    weights[p.name] = seeded->load(p.name).clone();
    if (!p.expert) continue;
    for (int64_t e = 0; e < config.n_routed_experts; ++e)
      weights[p.name][e].fill_(e + 100 * p.layer);
  }
  Folder dir;
  export_checkpoint(*memory_source(config, weights), dir / "hf", Naming::kReleased, {50000, ""});
  const Tensors disk = read_all(dir / "hf");
  for (int64_t layer : {1, 2, 3}) {
    for (int64_t e = 0; e < config.n_routed_experts; ++e) {
      for (const char* part : {"gate_proj", "up_proj", "down_proj"}) {
        const Tensor& t =
            disk.at(fmt::format("model.layers.{}.mlp.experts.{}.{}.weight", layer, e, part));
        EXPECT_TRUE((t == static_cast<double>(e + 100 * layer)).all().item<bool>());
      }
    }
  }
  EXPECT_GT(fs::file_size(dir / "hf/model.safetensors.index.json"), 0U);
  expect_same_weights(*open_checkpoint(dir / "hf"), *memory_source(config, weights));
}

TEST(Convert, ShardedOutputIsTheSameWeightsAndTheSameBytesEachTime) {
  Folder dir;
  const std::string from = kHfTiny + "/released";
  const auto files = convert(from, dir / "a", "hf", ConfigDefaults::kRefuse, 20000).files;
  EXPECT_EQ(convert(from, dir / "b", "hf", ConfigDefaults::kRefuse, 20000).files, files);
  EXPECT_GT(files.size(), 10U);
  EXPECT_THAT(files, Contains("model.safetensors.index.json"));
  for (const std::string& file : files) {
    EXPECT_EQ(read_text_file(dir / "a" + "/" + file), read_text_file(dir / "b" + "/" + file))
        << file;
  }
  expect_same_tensors(text_tensors(dir / "a"), text_tensors(from));
}

TEST(Convert, TheConfigOfAnExportSaysTheSameAndNamesTheStoredDtype) {
  Folder dir;
  convert(kHfTiny + "/released", dir / "hf", "hf");
  const json before = json::parse(read_text_file(kHfTiny + "/released/config.json"));
  const json after = json::parse(read_text_file(dir / "hf/config.json"));
  EXPECT_EQ(after["dtype"], "bfloat16");
  EXPECT_EQ(after["vision_config"], before["vision_config"]);
  EXPECT_EQ(after["architectures"], before["architectures"]);
  EXPECT_EQ(describe_config(load_config(dir / "hf")),
            describe_config(load_config(kHfTiny + "/released")));
  EXPECT_FALSE(fs::exists(dir / "hf/generation_config.json"));
}

TEST(Convert, SmallFilesBesideTheWeightsGoAlongAndNothingElse) {
  Folder dir;
  fs::copy(kHfTiny + "/released", dir / "from");
  for (const char* name : {"tokenizer.json", "chat_template.jinja", "generation_config.json"}) {
    std::ofstream(dir / "from" + "/" + name) << name;
  }
  std::ofstream(dir / "from/old.bin") << "weights of another format";
  fs::create_directory(dir / "from/folder.json");
  convert(dir / "from", dir / "to", "internal");
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(dir / "to")) {
    names.insert(entry.path().filename().string());
  }
  EXPECT_EQ(names,
            (std::set<std::string>{"chat_template.jinja",
                                   "config.json",
                                   "generation_config.json",
                                   "model.safetensors",
                                   "tokenizer.json"}));
}

TEST(Convert, AnExistingTargetIsRefusedAndAnEmptyOneTaken) {
  Folder dir;
  const std::string from = kHfTiny + "/released";
  fs::create_directory(dir / "empty");
  convert(from, dir / "empty/", "hf");
  EXPECT_TRUE(fs::exists(dir / "empty/model.safetensors"));
  const auto before = read_text_file(dir / "empty/config.json");
  EXPECT_THAT(refusal([&] { convert(from, dir / "empty", "internal"); }),
              AllOf(HasSubstr(dir / "empty"), HasSubstr("already exists")));
  EXPECT_EQ(read_text_file(dir / "empty/config.json"), before);
  std::ofstream(dir / "file") << "x";
  EXPECT_THAT(refusal([&] { convert(from, dir / "file", "hf"); }), HasSubstr("already exists"));
  EXPECT_THAT(refusal([&] { convert(from, dir / "x", "gguf"); }),
              AllOf(HasSubstr("gguf"), HasSubstr("internal")));
  EXPECT_THAT(refusal([&] { convert(dir / "nowhere", dir / "x", "hf"); }), HasSubstr("nowhere"));
  EXPECT_THAT(dir.listing(), ElementsAre("empty", "file"));
}

/// A source that fails, or whose second reading differs.
class Faulty final : public WeightSource {
 public:
  enum class Fault { kThrow, kOtherBytes };
  Faulty(const WeightSource& inner, Fault fault) : inner_(inner), fault_(fault) {}
  [[nodiscard]] const ModelConfig& config() const override { return inner_.config(); }
  [[nodiscard]] std::vector<std::string> names() const override { return inner_.names(); }
  [[nodiscard]] WeightSpec spec(const std::string& name) const override {
    return inner_.spec(name);
  }
  [[nodiscard]] Tensor load(const std::string& name) const override {
    if (name != "layers.2.self_attn.o_proj.weight") return inner_.load(name);
    LOCKSTEP_CHECK(fault_ != Fault::kThrow, kInput, "the source broke");
    return inner_.load(name).add(static_cast<double>(reads_++));
  }

  [[nodiscard]] std::vector<std::pair<std::string, Tensor>> disk_tensors(
      const std::string& name, const Tensor& value) const override {
    return inner_.disk_tensors(name, value);
  }

 private:
  const WeightSource& inner_;
  Fault fault_;
  mutable int reads_ = 0;
};

TEST(Convert, AFailedExportLeavesNoFolderAndADifferenceOnReadingAgainIsAFailure) {
  Folder dir;
  const auto seeded = seeded_source(preset_config("tiny"), 1);
  EXPECT_THAT(
      refusal([&] { export_checkpoint(Faulty(*seeded, Faulty::Fault::kThrow), dir / "a"); }),
      HasSubstr("the source broke"));
  EXPECT_THAT(
      refusal([&] { export_checkpoint(Faulty(*seeded, Faulty::Fault::kOtherBytes), dir / "a"); }),
      AllOf(HasSubstr("layers.2.self_attn.o_proj.weight"), HasSubstr("other bytes")));
  EXPECT_THAT(dir.listing(), ElementsAre());
}

TEST(Convert, InternalFoldersCarryAMarkerAndOtherLayoutsAreRefused) {
  Folder dir;
  convert(kHfTiny + "/released", dir / "a", "internal");
  const Safetensors files = Safetensors::open(dir / "a");
  EXPECT_EQ(files.metadata().at(std::string(kLayoutKey)), kLayout);
  EXPECT_TRUE(files.contains("layers.0.self_attn.conv1d.weight"));
  write_safetensors_file(
      dir / "a/model.safetensors", read_all(dir / "a"), {{std::string(kLayoutKey), "internal-9"}});
  EXPECT_THAT(refusal([&] { open_checkpoint(dir / "a"); }),
              AllOf(HasSubstr("internal-9"), HasSubstr("internal-1")));
}

TEST(Convert, AnFp8SourceLosesItsQuantizationConfigAndIsReported) {
  Folder dir;
  Tensors tensors = read_all(kHfTiny + "/released");
  const std::string name = "model.language_model.layers.3.self_attn.q_a_proj.weight";
  tensors[name] = tensors.at(name).to(at::kFloat8_e4m3fn);
  tensors[name + "_scale_inv"] = at::full({1, 1}, 0.75, at::kFloat);
  json config = json::parse(read_text_file(kHfTiny + "/released/config.json"));
  config["quantization_config"] = {{"quant_method", "fp8"}};
  config["text_config"]["quantization_config"] = {{"quant_method", "fp8"}};
  write_checkpoint(dir / "fp8", config.dump(), tensors);
  const ConvertReport report = convert(dir / "fp8", dir / "out", "hf");
  EXPECT_EQ(report.num_quantized, 1);
  EXPECT_THAT(report.text(), HasSubstr("1 FP8"));
  EXPECT_THAT(read_text_file(dir / "out/config.json"), Not(HasSubstr("quantization_config")));
  EXPECT_TRUE(same_bytes(read_all(dir / "out").at(name),
                         tensors.at(name).to(at::kFloat).mul(0.75).to(at::kBFloat16)));
}

TEST(Inspect, ListsTensorsTotalsConfigAndWhatIsDropped) {
  const Inspection seen = inspect(kHfTiny + "/released");
  EXPECT_TRUE(seen.fits);
  const json found = json::parse(seen.json);
  EXPECT_EQ(found["totals"]["tensors"], 182);
  EXPECT_EQ(found["tensors"].size(), 182U);
  EXPECT_EQ(found["dropped"].size(), 25U);
  EXPECT_EQ(found["naming"], "released");
  EXPECT_EQ(found["config"]["hidden_size"], 48);
  EXPECT_TRUE(found["problems"].is_null());
  uint64_t bytes = 0;
  for (const auto& [dtype, sums] : found["totals"]["by_dtype"].items()) {
    bytes += sums["bytes"].get<uint64_t>();
  }
  EXPECT_EQ(found["totals"]["bytes"], bytes);
  EXPECT_THAT(seen.text,
              AllOf(HasSubstr("model.language_model.layers.1.hc_attn_fn"),
                    HasSubstr("[24, 192]"),
                    HasSubstr("182 tensors")));
  EXPECT_EQ(json::parse(inspect(kHfTiny + "/modules").json)["naming"], "transformers");
}

TEST(Inspect, ReportsAFolderThatDoesNotFitInsteadOfFailing) {
  Folder dir;
  Tensors tensors = read_all(kHfTiny + "/released");
  tensors.erase("lm_head.weight");
  tensors["surplus"] = at::ones({1});
  write_checkpoint(dir / "a", read_text_file(kHfTiny + "/released/config.json"), tensors);
  const Inspection seen = inspect(dir / "a");
  EXPECT_FALSE(seen.fits);
  EXPECT_THAT(seen.text, AllOf(HasSubstr("missing (1)"), HasSubstr("surplus")));
  EXPECT_THAT(json::parse(seen.json)["problems"].get<std::string>(), HasSubstr("lm_head.weight"));
  fs::remove(dir / "a/config.json");
  const Inspection no_config = inspect(dir / "a");
  EXPECT_FALSE(no_config.fits);
  EXPECT_THAT(no_config.text, AllOf(HasSubstr("config.json"), HasSubstr("surplus")));
  fs::remove(dir / "a/model.safetensors");
  EXPECT_THAT(refusal([&] { inspect(dir / "a"); }), HasSubstr("no .safetensors"));
}

/// Python with transformers, or empty.
std::string golden_python() {
  const char* cache = std::getenv("LOCKSTEP_CACHE");
  const char* home = std::getenv("HOME");
  const std::string root = cache != nullptr && *cache != '\0'
                               ? cache
                               : std::string(home != nullptr ? home : "") + "/.cache/lockstep";
  const std::string python = root + "/golden-venv/bin/python";
  return fs::exists(python) ? python : "";
}

TEST(Export, OpensInTransformersWithTheSameWeightsAndLogits) {
  const std::string python = golden_python();
  if (python.empty()) GTEST_SKIP() << "no Python with transformers (scripts/setup makes one)";
  Folder dir;
  const auto source = open_checkpoint(kHfTiny + "/modules");
  export_checkpoint(*source, dir / "hf", Naming::kReleased, {60000, ""});
  const std::string check = fmt::format("{} {}/golden/make/check_export.py {} {} > {} 2>&1",
                                        python,
                                        LOCKSTEP_SOURCE_DIR,
                                        dir / "hf",
                                        kHfTiny + "/released",
                                        dir / "log");
  EXPECT_EQ(std::system(check.c_str()), 0) << read_text_file(dir / "log");
  EXPECT_THAT(read_text_file(dir / "log"), HasSubstr("are equal"));
}

}  // namespace
}  // namespace lockstep::model
