// Which tensor fills which parameter: both naming schemes, and everything that must be refused.
#include "model/checkpoint/name_table.hpp"

#include <functional>
#include <set>

#include "golden/store/golden_case.hpp"
#include "tests/unit/checkpoint_test_support.hpp"

namespace lockstep::model {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* kPrefix = "model.language_model.";

int64_t count_if(const std::vector<Parameter>& all,
                 const std::function<bool(const Parameter&)>& f) {
  int64_t count = 0;
  for (const Parameter& p : all) count += f(p) ? p.numel() : 0;
  return count;
}

TEST(NameTable, ParameterCountsOfThePublishedModelComeOut) {
  const auto all = expected_parameters(preset_config("glm-5.3-flash"));
  EXPECT_EQ(count_if(all, [](const auto&) { return true; }), 313326811966);
  const auto in = [&](int64_t layer, const char* part) {
    return count_if(all, [&](const Parameter& p) {
      return p.layer == layer && p.name.find(part) != std::string::npos;
    });
  };
  EXPECT_EQ(in(4, ".self_attn."), 137732288);
  EXPECT_EQ(in(3, ".self_attn."), 124914432);
  EXPECT_EQ(in(3, ".indexer."), 7471872);
  EXPECT_EQ(in(0, ".mlp."), 150994944);
  EXPECT_EQ(in(44, ".mlp."), 7274103072);
  EXPECT_EQ(in(17, "_hc."), 786486);
  EXPECT_EQ(count_if(all, [](const auto& p) { return p.frozen; }), 11 * 7471872);
}

TEST(NameTable, EveryNamingCoversTheElementsOfEveryParameter) {
  for (const std::string& preset : preset_names()) {
    std::set<std::string> names;
    for (const Parameter& p : expected_parameters(preset_config(preset))) {
      EXPECT_TRUE(names.insert(p.name).second) << p.name;
      for (Naming naming : kNamings) {
        int64_t elements = 0;
        for (const DiskPart& part : p.parts_in(naming)) elements += part.numel();
        EXPECT_EQ(elements, p.numel()) << p.name << " in " << naming_name(naming);
      }
    }
  }
}

TEST(NameTable, ClassFlagsFollowThePrograms) {
  std::map<std::string, Parameter> by_name;
  for (const Parameter& p : expected_parameters(preset_config("tiny"))) by_name[p.name] = p;
  const auto& fn = by_name.at("layers.1.attn_hc.fn");
  EXPECT_TRUE(fn.island && fn.engine_fp32 && !fn.hf_fp32 && fn.disk_dtype == at::kFloat);
  EXPECT_TRUE(by_name.at("layers.1.ffn_hc.scale").hf_fp32);
  EXPECT_TRUE(by_name.at("layers.1.self_attn.A_log").island);
  EXPECT_TRUE(by_name.at("layers.1.self_attn.conv1d.weight").conv);
  EXPECT_TRUE(by_name.at("layers.1.mlp.gate.weight").hf_fp32);
  EXPECT_EQ(by_name.at("layers.1.mlp.gate.weight").disk_dtype, at::kBFloat16);
  EXPECT_TRUE(by_name.at("layers.1.mlp.gate.e_score_correction_bias").buffer);
  EXPECT_TRUE(by_name.at("layers.3.self_attn.indexer.ape").frozen);
  EXPECT_FALSE(by_name.at("layers.3.self_attn.q_a_proj.weight").frozen);
  EXPECT_TRUE(by_name.at("layers.1.mlp.experts.down_proj").expert);
}

/// Every golden case: configuration and weights as the Python generator had them.
class SeededWeights : public ::testing::TestWithParam<const char*> {};

TEST_P(SeededWeights, EqualTheGoldenGeneratorByteForByte) {
  const auto golden = golden::open_golden(LOCKSTEP_SOURCE_DIR "/golden/data", GetParam());
  const ModelConfig config =
      parse_config(golden.config_json(), ConfigDefaults::kRefuse, GetParam());
  if (std::string_view(GetParam()) == "tiny") {
    EXPECT_EQ(describe_config(config), describe_config(preset_config("tiny")));
  }
  const auto source = seeded_source(config, golden.seed());
  auto want = golden.weights();
  for (const Parameter& p : expected_parameters(config)) {
    const Tensor flat = source->load(p.name).view(-1);
    int64_t at = 0;
    for (const DiskPart& part : p.parts_in(Naming::kReleased)) {
      const std::string name = disk_name(part.name, Naming::kReleased, false);
      ASSERT_EQ(want.count(name), 1U) << name;
      EXPECT_TRUE(same_bytes(flat.narrow(0, at, part.numel()).view(part.shape), want.at(name)))
          << name;
      want.erase(name);
      at += part.numel();
    }
  }
  for (const auto& [name, tensor] : want) ADD_FAILURE() << name << " fills no parameter";
}

INSTANTIATE_TEST_SUITE_P(Goldens,
                         SeededWeights,
                         ::testing::Values("tiny",
                                           "shared_carry",
                                           "softplus",
                                           "streams1_conv5",
                                           "streams3_conv3",
                                           "raw_router",
                                           "one_dsa"),
                         [](const auto& test) { return std::string(test.param); });

TEST(NameTable, B43BothNamingSchemesOfTransformersGiveTheSameBytes) {
  const auto released = open_checkpoint(kHfTiny + "/released");
  const auto modules = open_checkpoint(kHfTiny + "/modules");
  expect_same_weights(*released, *modules);
  EXPECT_EQ(released->dropped().size(), 25U);
  EXPECT_EQ(released->dropped(), modules->dropped());
  EXPECT_THAT(released->dropped(), ::testing::Each(HasSubstr("model.visual.")));

  // Against the raw tensors, not only against each other.
  const Tensors raw = read_all(kHfTiny + "/released");
  const std::string layer = std::string(kPrefix) + "layers.2.";
  std::vector<Tensor> gate_up;
  for (int e = 0; e < 5; ++e) {
    const std::string expert = fmt::format("{}mlp.experts.{}.", layer, e);
    gate_up.push_back(
        at::cat({raw.at(expert + "gate_proj.weight"), raw.at(expert + "up_proj.weight")}));
  }
  EXPECT_TRUE(same_bytes(released->load("layers.2.mlp.experts.gate_up_proj"), at::stack(gate_up)));
  EXPECT_TRUE(same_bytes(released->load("layers.2.self_attn.conv1d.weight"),
                         at::cat({raw.at(layer + "self_attn.q_conv1d.weight"),
                                  raw.at(layer + "self_attn.k_conv1d.weight"),
                                  raw.at(layer + "self_attn.v_conv1d.weight")})
                             .squeeze(1)));
  EXPECT_TRUE(same_bytes(released->load("layers.2.ffn_hc.fn"), raw.at(layer + "hc_ffn_fn")));
  EXPECT_TRUE(same_bytes(released->load("layers.2.self_attn.dt_bias"),
                         raw.at(layer + "self_attn.dt_bias")));
  EXPECT_TRUE(same_bytes(
      released->load("layers.3.self_attn.indexer.ape"),
      raw.at(std::string(kPrefix) + "layers.3.self_attn.indexer.index_kpool_compress_ape")));
  EXPECT_TRUE(
      same_bytes(released->load("norm.weight"), raw.at(std::string(kPrefix) + "norm.weight")));
}

/// hf-tiny in released naming, changed, and the message of loading it.
class Broken : public ::testing::Test {
 protected:
  Broken()
      : config_(read_text_file(kHfTiny + "/released/config.json")),
        tensors_(read_all(kHfTiny + "/released")),
        modules_(read_all(kHfTiny + "/modules")) {}

  std::unique_ptr<WeightSource> open() {
    const std::string folder = dir_ / fmt::format("case{}", ++count_);
    write_checkpoint(folder, config_, tensors_);
    return open_checkpoint(folder);
  }
  std::string refused() {
    return refusal([&] { open(); });
  }
  static std::string at(const std::string& name) { return kPrefix + name; }
  void expect_unchanged() { expect_same_weights(*open(), *open_checkpoint(kHfTiny + "/released")); }

  Folder dir_;
  int count_ = 0;
  std::string config_;
  Tensors tensors_, modules_;
};

TEST_F(Broken, B43EachMissingTensorIsNamed) {
  for (const char* name : {"norm.weight",
                           "layers.0.hc_attn_scale",
                           "layers.1.self_attn.k_conv1d.weight",
                           "layers.1.self_attn.A_log",
                           "layers.2.mlp.experts.3.up_proj.weight",
                           "layers.3.self_attn.indexer.k_norm.bias",
                           "layers.3.mlp.gate.e_score_correction_bias"}) {
    const Tensor kept = tensors_.at(at(name));
    tensors_.erase(at(name));
    EXPECT_THAT(refused(), AllOf(HasSubstr("missing (1)"), HasSubstr(at(name))));
    tensors_[at(name)] = kept;
  }
  tensors_.erase("lm_head.weight");
  EXPECT_THAT(refused(), HasSubstr("\n  lm_head.weight"));
}

TEST_F(Broken, B43UnknownTensorsAreNamedAndNeverSkipped) {
  for (const char* name : {"model.language_model.layers.1.self_attn.q_proj.bias",
                           "model.language_model.layers.4.input_layernorm.weight",
                           "model.language_model.layers.1.mlp.experts.5.up_proj.weight",
                           "model.language_model.layers.1.self_attn.indexer.wk.weight",
                           "model.language_model.layers.0.mlp.tokens_per_expert",
                           "surplus",
                           "layers.x.input_layernorm.weight"}) {
    tensors_[name] = at::ones({4});
    EXPECT_THAT(refused(), AllOf(HasSubstr("unknown (1)"), HasSubstr(name)));
    tensors_.erase(name);
  }
  expect_unchanged();
}

TEST_F(Broken, B43ParametersFilledTwiceAreNamed) {
  // The fused convolution beside the split one.
  tensors_[at("layers.0.self_attn.conv1d.weight")] =
      modules_.at(at("layers.0.self_attn.conv1d.weight"));
  EXPECT_THAT(refused(),
              AllOf(HasSubstr("duplicated"), HasSubstr("layers.0.self_attn.conv1d.weight")));
  tensors_.erase(at("layers.0.self_attn.conv1d.weight"));
  // One expert beside the stacked ones.
  tensors_[at("layers.1.mlp.experts.down_proj")] =
      modules_.at(at("layers.1.mlp.experts.down_proj"));
  EXPECT_THAT(refused(), AllOf(HasSubstr("duplicated"), HasSubstr("experts.down_proj")));
  tensors_.erase(at("layers.1.mlp.experts.down_proj"));
  // Two spellings of one name.
  tensors_["model.norm.weight"] = tensors_.at(at("norm.weight"));
  EXPECT_THAT(
      refused(),
      AllOf(HasSubstr("duplicated"), HasSubstr(at("norm.weight") + " and model.norm.weight")));
  tensors_.erase("model.norm.weight");
  tensors_[at("layers.2.self_attn.forget_gate.A_log")] =
      tensors_.at(at("layers.2.self_attn.A_log"));
  EXPECT_THAT(refused(), AllOf(HasSubstr("duplicated"), HasSubstr("forget_gate.A_log")));
  tensors_.erase(at("layers.2.self_attn.forget_gate.A_log"));
  expect_unchanged();
}

TEST_F(Broken, B43WrongShapesAreNamedWithBothShapes) {
  const auto with = [&](const std::string& name, const Tensor& value) {
    const Tensor kept = std::exchange(tensors_.at(at(name)), value);
    const std::string text = refused();
    tensors_.at(at(name)) = kept;
    return text;
  };
  EXPECT_THAT(with("layers.0.self_attn.q_proj.weight", at::ones({48, 24})),
              AllOf(HasSubstr("wrong shape (1)"),
                    HasSubstr("q_proj.weight is [48, 24], expected [24, 48]")));
  EXPECT_THAT(with("layers.1.mlp.experts.4.down_proj.weight", at::ones({48, 17})),
              AllOf(HasSubstr("[48, 17]"), HasSubstr("[48, 16]")));
  EXPECT_THAT(with("norm.weight", at::ones({1, 48})), HasSubstr("[1, 48]"));
  EXPECT_THAT(with("embed_tokens.weight", at::ones({66, 48})), HasSubstr("[66, 48]"));
  EXPECT_THAT(with("layers.0.self_attn.q_conv1d.weight", at::ones({24, 4, 1})),
              HasSubstr("[24, 4, 1]"));
}

TEST_F(Broken, B43AllProblemsComeInOneMessage) {
  tensors_.erase(at("norm.weight"));
  tensors_.erase(at("layers.0.self_attn.v_conv1d.weight"));
  tensors_.erase(at("layers.3.mlp.experts.2.gate_proj.weight"));
  tensors_["surplus.a"] = tensors_["surplus.b"] = at::ones({1});
  tensors_["model.lm_head.weight"] = tensors_.at("lm_head.weight");
  tensors_[at("layers.1.input_layernorm.weight")] = at::ones({3});
  tensors_[at("layers.2.input_layernorm.weight")] = at::ones({48}, at::kLong);
  EXPECT_THAT(refused(),
              AllOf(HasSubstr("missing (3)"),
                    HasSubstr("norm.weight"),
                    HasSubstr("v_conv1d"),
                    HasSubstr("experts.2.gate_proj"),
                    HasSubstr("unknown (2)"),
                    HasSubstr("surplus.b"),
                    HasSubstr("duplicated (1)"),
                    HasSubstr("wrong shape (1)"),
                    HasSubstr("layers.1.input"),
                    AllOf(HasSubstr("wrong dtype (1)"), HasSubstr("layers.2.input_layernorm"))));
}

TEST_F(Broken, SchemesMayBeMixedBetweenParametersAndPrefixesMayDiffer) {
  for (const char* name : {"layers.0.self_attn.q_conv1d.weight",
                           "layers.0.self_attn.k_conv1d.weight",
                           "layers.0.self_attn.v_conv1d.weight",
                           "layers.2.hc_ffn_fn",
                           "layers.1.self_attn.f_a_proj.weight"}) {
    tensors_.erase(at(name));
  }
  tensors_[at("layers.0.self_attn.conv1d.weight")] =
      modules_.at(at("layers.0.self_attn.conv1d.weight")).squeeze(1);
  tensors_["model.layers.2.ffn_hc.fn"] = modules_.at(at("layers.2.ffn_hc.fn"));
  tensors_["language_model.model.layers.1.self_attn.forget_gate.f_a_proj.weight"] =
      modules_.at(at("layers.1.self_attn.forget_gate.f_a_proj.weight"));
  expect_unchanged();
  for (const char* head :
       {"language_model.lm_head.weight", "model.language_model.lm_head.weight"}) {
    auto node = tensors_.extract(
        tensors_.contains("lm_head.weight") ? "lm_head.weight" : "language_model.lm_head.weight");
    node.key() = head;
    tensors_.insert(std::move(node));
    expect_unchanged();
  }
}

TEST_F(Broken, StoredDtypesAreKept) {
  for (at::ScalarType dtype : {at::kDouble, at::kFloat, at::kHalf}) {
    for (auto& [name, tensor] : tensors_) tensor = tensor.to(dtype);
    const auto source = open();
    for (const std::string& name : source->names()) {
      ASSERT_EQ(source->load(name).scalar_type(), dtype) << name;
      ASSERT_EQ(source->spec(name).dtype, dtype) << name;
    }
  }
  tensors_.at(at("layers.1.mlp.experts.0.up_proj.weight")) =
      tensors_.at(at("layers.1.mlp.experts.0.up_proj.weight")).to(at::kFloat);
  EXPECT_THAT(refused(), AllOf(HasSubstr("wrong dtype (1)"), HasSubstr("experts.gate_up_proj")));
}

TEST_F(Broken, MtpLayersAreDroppedOnlyWhereTheConfigAnnouncesThem) {
  for (const char* name : {"enorm.weight",
                           "eh_proj.weight",
                           "shared_head.norm.weight",
                           "self_attn.q_a_proj.weight",
                           "self_attn.q_a_proj.weight_scale_inv"}) {
    tensors_[at(std::string("layers.4.") + name)] = at::ones({2, 2});
  }
  EXPECT_THAT(refused(), AllOf(HasSubstr("unknown (5)"), HasSubstr("layers.4.eh_proj.weight")));
  config_ = export_config(with_overrides(parse_config(config_, ConfigDefaults::kRefuse, "x"),
                                         R"({"num_nextn_predict_layers": 1})"));
  EXPECT_EQ(open()->dropped().size(), 30U);
  expect_same_weights(*open(), *open_checkpoint(kHfTiny + "/released"));
  tensors_[at("layers.5.enorm.weight")] = at::ones({2});
  EXPECT_THAT(refused(), AllOf(HasSubstr("unknown (1)"), HasSubstr("layers.5.enorm.weight")));
}

TEST_F(Broken, TiedEmbeddingsNeedNoHeadAndRefuseAnotherOne) {
  const ModelConfig tied = with_overrides(parse_config(config_, ConfigDefaults::kRefuse, "x"),
                                          R"({"tie_word_embeddings": true})");
  config_ = export_config(tied);
  EXPECT_THAT(refused(), AllOf(HasSubstr("tie_word_embeddings"), HasSubstr("lm_head.weight")));
  tensors_.erase("lm_head.weight");
  const auto source = open();
  EXPECT_TRUE(same_bytes(source->load("lm_head.weight"), source->load("embed_tokens.weight")));
  tensors_["lm_head.weight"] = tensors_.at(at("embed_tokens.weight"));
  open();
}

/// FP8 payload and block scales of a matrix, with scales that are no powers of two.
std::pair<Tensor, Tensor> quantize(const Tensor& weight) {
  const int64_t rows = (weight.size(0) + 127) / 128, cols = (weight.size(1) + 127) / 128;
  Tensor scale = at::empty({rows, cols}, at::kFloat), payload = weight.to(at::kFloat).clone();
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      Tensor block = payload.slice(0, r * 128, (r + 1) * 128).slice(1, c * 128, (c + 1) * 128);
      const float s = block.abs().max().item<float>() / 448.0F;
      scale[r][c] = s;
      block.div_(s);
    }
  }
  return {payload.to(at::kFloat8_e4m3fn), scale};
}

TEST(Fp8Blocks, B45ScalesOfBothSuffixesAreUsedAndASurplusTensorIsReported) {
  const ModelConfig config = with_overrides(preset_config("tiny"),
                                            R"({"hidden_size": 300, "intermediate_size": 130,
                                                "moe_intermediate_size": 129, "n_routed_experts": 3})");
  const auto plain = seeded_source(config, 3);
  Folder dir;
  export_checkpoint(*plain, dir / "plain");
  Tensors tensors = read_all(dir / "plain");
  const std::string text = read_text_file(dir / "plain/config.json");

  int count = 0;
  for (const auto& [name, weight] : read_all(dir / "plain")) {
    const bool quantized = name.find("experts") != std::string::npos ||
                           name.find("layers.0.mlp.") != std::string::npos ||
                           name.find("q_b_proj") != std::string::npos;
    if (!quantized) continue;
    const auto [payload, scale] = quantize(weight);
    tensors[name] = payload;
    tensors[name + (count++ % 2 == 0 ? "_scale_inv" : "_scale")] = scale;
  }
  ASSERT_GT(count, 30);
  write_checkpoint(dir / "fp8", text, tensors);
  const auto loaded = open_checkpoint(dir / "fp8");
  for (const std::string& name : loaded->names()) {
    const Tensor want = plain->load(name), got = loaded->load(name);
    ASSERT_EQ(got.scalar_type(), want.scalar_type()) << name;
    const Tensor error = (got.to(at::kDouble) - want.to(at::kDouble)).abs();
    const double largest = want.abs().max().item<double>();
    const bool changed = !same_bytes(got, want);
    // 3 bits after the leading one: half a step is 2^-4 of the value, below 2^-6 of the block's
    // largest a fixed step.
    const Tensor bound = want.to(at::kDouble).abs() / 16 + largest / 448 / 512;
    EXPECT_TRUE((error <= bound).all().item<bool>()) << name;
    const bool quantized = name.find("experts") != std::string::npos ||
                           name.find("layers.0.mlp.") != std::string::npos ||
                           name.find("q_b_proj") != std::string::npos;
    EXPECT_EQ(changed, quantized) << name;
  }
  // Element by element: float32 product, rounded once.
  const std::string name = "model.layers.0.mlp.down_proj.weight";  // [300, 130]
  const Tensor scale = tensors.contains(name + "_scale") ? tensors.at(name + "_scale")
                                                         : tensors.at(name + "_scale_inv");
  ASSERT_EQ(scale.sizes(), (std::vector<int64_t>{3, 2}));
  const Tensor got = loaded->load("layers.0.mlp.down_proj.weight");
  const Tensor wide = tensors.at(name).to(at::kFloat);
  for (int64_t r : {0, 127, 128, 255, 256, 299}) {
    for (int64_t c : {0, 127, 128, 129}) {
      const float product = wide[r][c].item<float>() * scale[r / 128][c / 128].item<float>();
      EXPECT_EQ(got[r][c].item<float>(), static_cast<float>(static_cast<c10::BFloat16>(product)));
    }
  }
  // Rows of experts that straddle parts.
  const std::string experts = "layers.1.mlp.experts.gate_up_proj";
  EXPECT_TRUE(same_bytes(loaded->load_rows(experts, 1, 3), loaded->load(experts).narrow(0, 1, 2)));

  Tensors broken = tensors;
  broken["model.layers.0.mlp.extra.weight_scale_inv"] = at::ones({1, 1});
  write_checkpoint(dir / "surplus", text, broken);
  EXPECT_THAT(refusal([&] { open_checkpoint(dir / "surplus"); }),
              AllOf(HasSubstr("unknown (1)"), HasSubstr("layers.0.mlp.extra.weight_scale_inv")));

  broken = tensors;
  broken.erase(name + "_scale");
  broken.erase(name + "_scale_inv");
  write_checkpoint(dir / "unfilled", text, broken);
  EXPECT_THAT(refusal([&] { open_checkpoint(dir / "unfilled"); }),
              AllOf(HasSubstr("missing (1)"), HasSubstr(name + "_scale_inv")));

  broken = tensors;
  broken[name + "_scale"] = broken[name + "_scale_inv"] = scale;
  write_checkpoint(dir / "twice", text, broken);
  EXPECT_THAT(refusal([&] { open_checkpoint(dir / "twice"); }), HasSubstr("duplicated (1)"));

  broken = tensors;
  broken[tensors.contains(name + "_scale") ? name + "_scale" : name + "_scale_inv"] =
      at::ones({2, 3});
  write_checkpoint(dir / "shape", text, broken);
  EXPECT_THAT(refusal([&] { open_checkpoint(dir / "shape"); }),
              AllOf(HasSubstr("wrong shape (1)"), HasSubstr("[2, 3]"), HasSubstr("[3, 2]")));

  broken = tensors;
  broken["model.layers.1.input_layernorm.weight_scale"] = at::ones({1});
  write_checkpoint(dir / "needless", text, broken);
  EXPECT_THAT(refusal([&] { open_checkpoint(dir / "needless"); }),
              AllOf(HasSubstr("unknown (1)"), HasSubstr("needs none")));

  const ConvertReport report = convert(dir / "fp8", dir / "converted", "hf");
  EXPECT_EQ(report.num_quantized, count);
  expect_same_weights(*open_checkpoint(dir / "converted"), *loaded);
}

TEST(WeightSources, RowsAreSlicesOfTheWhole) {
  const auto seeded = seeded_source(preset_config("tiny"), 11);
  Folder dir;
  export_checkpoint(*seeded, dir / "c", Naming::kReleased);
  const auto disk = open_checkpoint(dir / "c");
  Tensors in_memory;
  for (const std::string& name : seeded->names()) in_memory[name] = seeded->load(name);
  const auto memory = memory_source(preset_config("tiny"), in_memory);
  expect_same_weights(*seeded, *disk);
  expect_same_weights(*seeded, *memory);
  for (const WeightSource* source : {seeded.get(), disk.get(), memory.get()}) {
    for (const std::string& name : source->names()) {
      const Tensor whole = source->load(name);
      EXPECT_EQ(whole.sizes(), source->spec(name).shape);
      EXPECT_EQ(whole.scalar_type(), source->spec(name).dtype);
      const int64_t rows = whole.size(0);
      for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, rows},
                                       {rows / 3, rows / 2 + 1},
                                       {rows, rows},
                                       {rows - 1, rows}}) {
        EXPECT_TRUE(
            same_bytes(source->load_rows(name, begin, end), whole.narrow(0, begin, end - begin)))
            << name << " " << begin << " " << end;
      }
      EXPECT_THROW(static_cast<void>(source->load_rows(name, 0, rows + 1)), Error);
      source->release(name);
      EXPECT_TRUE(same_bytes(source->load(name), in_memory.at(name))) << name;
    }
    EXPECT_THAT(refusal([&] { static_cast<void>(source->load("layers.9.x")); }),
                HasSubstr("layers.9.x"));
  }
  EXPECT_TRUE(disk->on_disk());
  EXPECT_FALSE(seeded->on_disk() || memory->on_disk());
}

TEST(WeightSources, AValueGoesBackUnderTheNamesAndShapesOfTheFiles) {
  Folder dir;
  Tensors modules = read_all(kHfTiny + "/modules");
  const std::string conv = std::string(kPrefix) + "layers.0.self_attn.conv1d.weight";
  modules[conv] = modules.at(conv).squeeze(1);  // the other accepted shape
  write_checkpoint(dir / "c", read_text_file(kHfTiny + "/modules/config.json"), modules);
  for (const std::string& folder : {kHfTiny + "/released", kHfTiny + "/modules", dir / "c"}) {
    const auto source = open_checkpoint(folder);
    const std::vector<std::string> dropped = source->dropped();
    Tensors back;
    for (const std::string& name : source->names()) {
      for (auto& [disk, part] : source->disk_tensors(name, source->load(name))) {
        EXPECT_TRUE(back.emplace(disk, part).second) << disk;
      }
    }
    Tensors want = read_all(folder);
    for (const std::string& name : dropped) want.erase(name);
    EXPECT_EQ(back.size(), want.size());
    for (const auto& [name, tensor] : want) {
      ASSERT_TRUE(back.contains(name)) << name;
      EXPECT_TRUE(same_bytes(back.at(name), tensor)) << name;
    }
  }
}

TEST(WeightSources, AnotherSeedGivesOtherWeightsAndTheSameSeedTheSame) {
  const auto a = seeded_source(preset_config("tiny"), 1),
             b = seeded_source(preset_config("tiny"), 1),
             c = seeded_source(preset_config("tiny"), 2);
  expect_same_weights(*a, *b);
  for (const std::string& name : a->names())
    EXPECT_FALSE(same_bytes(a->load(name), c->load(name))) << name;
}

TEST(WeightSources, MemoryListsWhatDoesNotFit) {
  const auto seeded = seeded_source(preset_config("tiny"), 1);
  Tensors weights;
  for (const std::string& name : seeded->names()) weights[name] = seeded->load(name);
  weights.erase("norm.weight");
  weights["extra"] = at::ones({1});
  weights["layers.0.mlp.up_proj.weight"] = at::ones({2, 2});
  EXPECT_THAT(refusal([&] { memory_source(preset_config("tiny"), weights); }),
              AllOf(HasSubstr("missing [norm.weight]"),
                    HasSubstr("unknown [extra]"),
                    HasSubstr("layers.0.mlp.up_proj.weight [2, 2]")));
}

TEST(WeightSources, SharedIndexerLayersHaveNoIndexer) {
  const ModelConfig config = with_overrides(
      preset_config("tiny"),
      R"({"num_hidden_layers": 8, "indexer_types": ["full","full","full","full","full","full","full","shared"]})");
  Folder dir;
  export_checkpoint(*seeded_source(config, 1), dir / "c");
  Tensors tensors = read_all(dir / "c");
  EXPECT_TRUE(tensors.contains("model.layers.3.self_attn.indexer.wk.weight"));
  EXPECT_FALSE(tensors.contains("model.layers.7.self_attn.indexer.wk.weight"));
  tensors["model.layers.7.self_attn.indexer.wk.weight"] =
      tensors.at("model.layers.3.self_attn.indexer.wk.weight");
  write_checkpoint(dir / "d", read_text_file(dir / "c/config.json"), tensors);
  EXPECT_THAT(refusal([&] { open_checkpoint(dir / "d"); }),
              HasSubstr("layers.7.self_attn.indexer.wk"));
}

}  // namespace
}  // namespace lockstep::model
