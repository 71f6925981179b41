// Config files: aliases, defaults, refusals, and bytes that survive.
#include "model/config/config_json.hpp"

#include <gmock/gmock.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "model/base/error.hpp"
#include "model/config/json_text.hpp"

namespace lockstep::model {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// The tiny preset as a config file, without the second names of alias pairs.
json plain_tiny() {
  json c = json::parse(export_config(preset_config("tiny")));
  for (const char* alias : {"num_local_experts",
                            "num_experts_per_token",
                            "mhc_num_residual_streams",
                            "mhc_sinkhorn_iterations",
                            "moe_renormalize",
                            "mla_nope",
                            "linear_attn_config"}) {
    c.erase(alias);
  }
  return c;
}

ModelConfig parse(const json& c, ConfigDefaults defaults = ConfigDefaults::kRefuse) {
  return parse_config(c.dump(), defaults, "test.json");
}

/// Message of the error, checked to be of that kind.
template <typename F>
std::string message(F&& f, ErrorKind kind = ErrorKind::kConfig) {
  try {
    f();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return {};
}

std::string refusal(const json& c, ConfigDefaults defaults = ConfigDefaults::kRefuse) {
  return message([&] { parse(c, defaults); });
}

TEST(ConfigJson, PresetsSurviveExportAndParse) {
  for (const std::string& name : preset_names()) {
    const ModelConfig preset = preset_config(name);
    const ModelConfig again =
        parse_config(export_config(preset), ConfigDefaults::kRefuse, "exported");
    EXPECT_EQ(describe_config(again), describe_config(preset)) << name;
    EXPECT_EQ(export_config(again), export_config(preset)) << name;
  }
  EXPECT_THAT(message([] { preset_config("huge"); }),
              AllOf(HasSubstr("huge"), HasSubstr("glm-5.3-flash"), HasSubstr("mini")));
}

/// A composite file in the style of the published one, with keys that only other programs know.
constexpr const char* kPublished = R"({
  "architectures": ["Glm5NextForConditionalGeneration"],
  "model_type": "glm5_next",
  "dtype": "bfloat16",
  "image_token_id": 154854,
  "text_config": {
    "model_type": "glm5_next_text",
    "dtype": "bfloat16",
    "head_dim": 0,
    "vocab_size": 154880, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 2048,
    "num_hidden_layers": 8, "num_attention_heads": 64, "num_key_value_heads": 64,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention",
                    "linear_attention", "mamba", "linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "dense", "dense", "sparse", "sparse", "sparse", "sparse", "sparse"],
    "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "index_kpool": 4,
    "linear_attn_config": {"num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.00,
                           "kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8]},
    "hc_mult": 4, "hc_eps": 1e-06, "hc_sinkhorn_iters": 20, "n_routed_experts": 288, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "routed_scaling_factor": 2.50, "swiglu_limit": 10, "rms_norm_eps": 0.00001,
    "num_nextn_predict_layers": 1, "pad_token_id": 154820, "topk_method": "noaux_tc", "moe_router_dtype": "float32",
    "rope_theta": 1e4, "index_share_for_mtp_iteration": true,
    "strange": {"\u00e9": [1, 2.50,   {"a": null}], "text": "}]\"\\"}
  },
  "vision_config": {"depth": 24, "rms_norm_eps": 1e-05, "image_size": 448},
  "quantization_config": {"quant_method": "fp8",  "weight_block_size": [128, 128]}
})";

TEST(ConfigJson, PublishedStyleCompositeIsReadWithEveryAliasOfTheDict) {
  const ModelConfig c = parse_config(kPublished, ConfigDefaults::kRefuse, "config.json");
  EXPECT_TRUE(c.composite);
  EXPECT_EQ(c.linear_num_heads, 64);
  EXPECT_EQ(c.linear_head_dim, 128);
  EXPECT_EQ(c.linear_conv_kernel_dim, 4);
  EXPECT_EQ(c.linear_lower_bound, -5.0);
  EXPECT_EQ(c.num_nextn_predict_layers, 1);
  EXPECT_EQ(c.swiglu_limit, 10.0);
  ASSERT_EQ(c.mixers.size(), 8U);
  EXPECT_EQ(c.mixers[3], MixerKind::kDsa);
  EXPECT_EQ(c.mixers[5], MixerKind::kKda);
  EXPECT_EQ(c.mlps[2], MlpKind::kDense);
  EXPECT_EQ(c.mlps[3], MlpKind::kMoe);
}

TEST(ConfigJson, KeysNobodyInterpretsKeepTheirBytesThroughExport) {
  const ModelConfig c = parse_config(kPublished, ConfigDefaults::kRefuse, "config.json");
  const std::string out = export_config(c);
  for (const char* bytes :
       {R"("strange": {"\u00e9": [1, 2.50,   {"a": null}], "text": "}]\"\\"})",
        R"("rope_theta": 1e4)",
        R"("routed_scaling_factor": 2.50)",
        R"("rms_norm_eps": 0.00001)",
        R"("vision_config": {"depth": 24, "rms_norm_eps": 1e-05, "image_size": 448})",
        R"("quantization_config": {"quant_method": "fp8",  "weight_block_size": [128, 128]})",
        R"("gate_lower_bound": -5.00)",
        R"("full_attn_layers": [4, 8])",
        R"("linear_attention", "mamba", "linear_attention", "full_attention")",
        R"("moe_router_dtype": "float32")"}) {
    EXPECT_THAT(out, HasSubstr(bytes));
  }
  EXPECT_THAT(export_config(c, "", false), ::testing::Not(HasSubstr("quantization_config")));
}

TEST(ConfigJson, ExportKeepsEveryKeyButDtypeAndAZeroHeadDim) {
  for (const std::string& text :
       {std::string(kPublished),
        read_text_file(LOCKSTEP_SOURCE_DIR "/golden/data/hf-tiny/released/config.json")}) {
    const ModelConfig c = parse_config(text, ConfigDefaults::kRefuse, "config.json");
    const json before = json::parse(text), after = json::parse(export_config(c));
    const auto keeps = [](const json& from, const json& to) {
      for (const auto& [key, value] : from.items()) {
        if (key == "text_config" || key == "linear_attn_config") continue;
        if (key == "dtype" || key == "head_dim") {
          EXPECT_FALSE(to.contains(key)) << key;
        } else {
          ASSERT_TRUE(to.contains(key)) << key;
          EXPECT_EQ(to[key], value) << key;
        }
      }
    };
    keeps(before, after);
    keeps(before["text_config"], after["text_config"]);
    EXPECT_EQ(after["text_config"]["num_local_experts"], before["text_config"]["n_routed_experts"]);
    EXPECT_EQ(after["text_config"]["linear_attn_config"]["num_heads"], c.linear_num_heads);
    // Again: the same config, the same bytes.
    const ModelConfig again = parse_config(after.dump(), ConfigDefaults::kRefuse, "again");
    EXPECT_EQ(describe_config(again), describe_config(c));
    const ModelConfig twice = parse_config(export_config(c), ConfigDefaults::kRefuse, "again");
    EXPECT_EQ(export_config(twice), export_config(c));
  }
}

TEST(ConfigJson, HeadDimThatIsNotZeroIsKeptAndNothingIsDerivedFromIt) {
  json c = plain_tiny();
  c["head_dim"] = 192;
  const ModelConfig config = parse(c);
  EXPECT_EQ(json::parse(export_config(config))["head_dim"], 192);
  EXPECT_EQ(describe_config(config), describe_config(preset_config("tiny")));
}

TEST(ConfigJson, DtypeIsWrittenOnlyWhenTheExporterGivesOne) {
  const ModelConfig c = parse_config(kPublished, ConfigDefaults::kRefuse, "config.json");
  const json out = json::parse(export_config(c, "float32"));
  EXPECT_EQ(out["dtype"], "float32");
  EXPECT_EQ(out["text_config"]["dtype"], "float32");
}

TEST(ConfigJson, ACompositeFileWithoutTextConfigIsFlat) {
  json c = plain_tiny();
  c["model_type"] = "glm5_next";
  for (const char* form : {"absent", "null"}) {
    if (std::string_view(form) == "null") c["text_config"] = nullptr;
    const ModelConfig config = parse(c);
    EXPECT_TRUE(config.composite);
    EXPECT_EQ(config.hidden_size, 96);
    const json out = json::parse(export_config(config));
    EXPECT_EQ(out["hidden_size"], 96);
    EXPECT_EQ(out["model_type"], "glm5_next");
  }
}

TEST(ConfigJson, ModelTypesAreChecked) {
  json c = plain_tiny();
  c["model_type"] = "glm4_moe";
  EXPECT_THAT(refusal(c),
              AllOf(HasSubstr("glm4_moe"), HasSubstr("glm5_next"), HasSubstr("glm5_next_text")));
  json nested = {{"model_type", "glm5_next_text"}, {"text_config", plain_tiny()}};
  EXPECT_THAT(refusal(nested), AllOf(HasSubstr("text_config"), HasSubstr("glm5_next")));
}

TEST(ConfigJson, EveryAliasIsReadAloneAndRefusedWhenItContradicts) {
  const struct {
    const char *key, *alias;
    json value, other;
  } pairs[] = {{"hc_mult", "mhc_num_residual_streams", 3, 4},
               {"hc_sinkhorn_iters", "mhc_sinkhorn_iterations", 7, 20},
               {"n_routed_experts", "num_local_experts", 14, 12},
               {"num_experts_per_tok", "num_experts_per_token", 2, 3},
               {"norm_topk_prob", "moe_renormalize", false, true}};
  for (const auto& pair : pairs) {
    json c = plain_tiny();
    c.erase(pair.key);
    c[pair.alias] = pair.value;
    const ModelConfig alone = parse(c);
    EXPECT_EQ(json::parse(describe_config(alone))[pair.key], pair.value) << pair.alias;
    const json out = json::parse(export_config(alone));
    EXPECT_EQ(out[pair.key], pair.value);
    EXPECT_EQ(out[pair.alias], pair.value);
    c[pair.key] = pair.value;
    EXPECT_EQ(describe_config(parse(c)), describe_config(alone));
    c[pair.key] = pair.other;
    EXPECT_THAT(refusal(c),
                AllOf(HasSubstr(pair.key),
                      HasSubstr(pair.alias),
                      HasSubstr(pair.value.dump()),
                      HasSubstr(pair.other.dump())));
  }
}

TEST(ConfigJson, LinearAttnConfigIsAnotherNameOfFourKeys) {
  const struct {
    const char *key, *in_dict;
    json value;
  } pairs[] = {{"linear_num_heads", "num_heads", 3},
               {"linear_head_dim", "head_dim", 8},
               {"linear_conv_kernel_dim", "short_conv_kernel_size", 5},
               {"linear_lower_bound", "gate_lower_bound", -4.5}};
  for (const auto& pair : pairs) {
    json c = plain_tiny();
    c.erase(pair.key);
    c["linear_attn_config"] = {{pair.in_dict, pair.value}};
    EXPECT_EQ(json::parse(describe_config(parse(c)))[pair.key], pair.value) << pair.key;
    c[pair.key] = pair.value;
    parse(c);
    c[pair.key] = pair.value.is_number_float() ? json(-5.0) : json(4);
    if (c[pair.key] == pair.value) continue;
    EXPECT_THAT(
        refusal(c),
        AllOf(HasSubstr(pair.key), HasSubstr(std::string("linear_attn_config.") + pair.in_dict)));
  }
}

TEST(ConfigJson, OnlyAnUnsafeGateWithoutBoundReachesTheUnboundedGate) {
  json c = plain_tiny();
  c.erase("linear_lower_bound");
  EXPECT_EQ(parse(c).linear_lower_bound, -5.0);  // default of every program
  c["linear_attn_config"] = {{"gate_lower_bound", nullptr}};
  EXPECT_EQ(parse(c).linear_lower_bound, -5.0);
  c["linear_attn_config"] = {{"gate_lower_bound", nullptr}, {"safe_gate", true}};
  EXPECT_EQ(parse(c).linear_lower_bound, -5.0);
  c["linear_attn_config"] = {{"gate_lower_bound", nullptr}, {"safe_gate", false}};
  const ModelConfig unbounded = parse(c);
  EXPECT_EQ(unbounded.linear_lower_bound, std::nullopt);
  EXPECT_EQ(parse_config(export_config(unbounded), ConfigDefaults::kRefuse, "x").linear_lower_bound,
            std::nullopt);
  c["linear_attn_config"] = {{"gate_lower_bound", -3.0}, {"safe_gate", false}};
  EXPECT_EQ(parse(c).linear_lower_bound, -3.0);

  c.erase("linear_attn_config");
  c["linear_lower_bound"] = nullptr;  // without a dict nothing turns null into -5
  EXPECT_EQ(parse(c).linear_lower_bound, std::nullopt);
  c["linear_attn_config"] = {{"num_heads", 4}};  // with one, the programs disagree
  EXPECT_THAT(refusal(c), AllOf(HasSubstr("linear_lower_bound"), HasSubstr("safe_gate")));
}

TEST(ConfigJson, LayerListsOfTheDictMustAgreeWithLayerTypesCountedFromZeroOrOne) {
  json c = plain_tiny();
  for (const json& dict : {json{{"kda_layers", {0, 1, 2}}, {"full_attn_layers", {3}}},
                           json{{"kda_layers", {1, 2, 3}}, {"full_attn_layers", {4}}}}) {
    c["linear_attn_config"] = dict;
    const json out = json::parse(export_config(parse(c)));
    EXPECT_EQ(out["linear_attn_config"]["kda_layers"], dict["kda_layers"]);
  }
  c["linear_attn_config"] = {{"kda_layers", {0, 1}}};
  EXPECT_THAT(refusal(c), AllOf(HasSubstr("kda_layers"), HasSubstr("layer_types")));
}

TEST(ConfigJson, LayerTypeAliasesMeanTheSameAndKeepTheirSpelling) {
  for (const char* name :
       {"deepseek_sparse_attention", "indexed_attention", "full_attention", "attention"}) {
    json c = plain_tiny();
    c["layer_types"][3] = name;
    c["layer_types"][0] = "mamba";
    const ModelConfig config = parse(c);
    EXPECT_EQ(describe_config(config), describe_config(preset_config("tiny")));
    EXPECT_EQ(json::parse(export_config(config))["layer_types"], c["layer_types"]);
  }
  EXPECT_THAT(export_config(preset_config("tiny")), HasSubstr("deepseek_sparse_attention"));
  json c = plain_tiny();
  c["layer_types"][1] = "sliding_attention";
  EXPECT_THAT(refusal(c),
              AllOf(HasSubstr("layer_types[1]"),
                    HasSubstr("sliding_attention"),
                    HasSubstr("linear_attention"),
                    HasSubstr("full_attention")));
}

TEST(ConfigJson, KeysThatTheProgramsDefaultDifferentlyAreRefusedUnlessOneIsChosen) {
  json c = plain_tiny();
  c["index_topk"] = 48;
  for (const char* key : {"index_kpool", "swiglu_limit", "layer_types"}) {
    json without = c;
    without.erase(key);
    EXPECT_THAT(refusal(without), AllOf(HasSubstr(key), HasSubstr("--defaults hf")));
  }
  for (const char* key : {"index_kpool", "swiglu_limit", "layer_types", "indexer_types"}) {
    c.erase(key);
  }
  c["num_hidden_layers"] = 5;
  c["mlp_layer_types"].push_back("sparse");
  const ModelConfig hf = parse(c, ConfigDefaults::kHf);
  EXPECT_EQ(hf.index_kpool, 16);
  EXPECT_EQ(hf.swiglu_limit, 10.0);
  EXPECT_EQ(
      hf.mixers,
      (std::vector{
          MixerKind::kKda, MixerKind::kKda, MixerKind::kKda, MixerKind::kDsa, MixerKind::kKda}));
  const ModelConfig trainer = parse(c, ConfigDefaults::kTrainer);
  EXPECT_EQ(trainer.index_kpool, 4);
  EXPECT_EQ(trainer.swiglu_limit, std::nullopt);
  EXPECT_EQ(trainer.mixers, std::vector<MixerKind>(5, MixerKind::kDsa));
}

TEST(ConfigJson, MissingSizesAreNamed) {
  for (const char* key : {"vocab_size",
                          "hidden_size",
                          "intermediate_size",
                          "moe_intermediate_size",
                          "num_hidden_layers",
                          "num_attention_heads",
                          "q_lora_rank",
                          "kv_lora_rank",
                          "qk_nope_head_dim",
                          "v_head_dim",
                          "index_n_heads",
                          "index_head_dim",
                          "index_topk",
                          "linear_num_heads",
                          "linear_head_dim",
                          "linear_conv_kernel_dim",
                          "n_routed_experts",
                          "num_experts_per_tok"}) {
    json c = plain_tiny();
    c.erase(key);
    EXPECT_THAT(refusal(c), AllOf(HasSubstr("test.json"), HasSubstr(key), HasSubstr("add it")));
    c[key] = "many";
    EXPECT_THAT(refusal(c), AllOf(HasSubstr(key), HasSubstr("many"), HasSubstr("integer")));
    c[key] = 1.5;
    EXPECT_THAT(refusal(c), AllOf(HasSubstr(key), HasSubstr("1.5")));
    c[key] = 0;
    EXPECT_THAT(refusal(c), HasSubstr(key));
    c[key] = 1ULL << 40;
    EXPECT_THAT(refusal(c), HasSubstr(key));
  }
}

TEST(ConfigJson, SmallKeysHaveOneDefault) {
  json c = plain_tiny();
  for (const char* key : {"hc_mult",
                          "hc_eps",
                          "hc_sinkhorn_iters",
                          "rms_norm_eps",
                          "n_group",
                          "topk_group",
                          "n_shared_experts",
                          "norm_topk_prob",
                          "routed_scaling_factor",
                          "initializer_range",
                          "scoring_func",
                          "index_kpool_always_select_tail",
                          "tie_word_embeddings",
                          "hidden_act",
                          "num_key_value_heads"}) {
    c.erase(key);
  }
  EXPECT_EQ(describe_config(parse(c)), describe_config(preset_config("tiny")));
  c.erase("pad_token_id");  // the class default lies outside this vocabulary
  EXPECT_EQ(parse(c).pad_token_id, std::nullopt);
}

TEST(ConfigJson, ValidationNamesKeyValueAndFix) {
  const struct {
    json change;
    std::vector<const char*> parts;
  } cases[] = {
      {{{"num_key_value_heads", 2}}, {"num_key_value_heads", "2", "num_attention_heads", "4"}},
      {{{"index_kpool", 0}}, {"index_kpool", "0", "1 or more"}},
      {{{"index_topk", 26}}, {"index_topk", "26", "index_kpool", "28"}},
      {{{"q_lora_rank", nullptr}}, {"q_lora_rank", "null"}},
      {{{"qk_rope_head_dim", 64}}, {"qk_rope_head_dim", "64", "only 0"}},
      {{{"hidden_act", "gelu"}}, {"hidden_act", "gelu", "silu"}},
      {{{"scoring_func", "tanh"}}, {"scoring_func", "tanh", "sigmoid", "softmax"}},
      {{{"num_hidden_layers", 5}}, {"layer_types", "4", "num_hidden_layers", "5"}},
      {{{"mlp_layer_types", {"dense", "sparse"}}}, {"mlp_layer_types", "2", "4"}},
      {{{"mlp_layer_types", {"dense", "sparse", "moe", "sparse"}}},
       {"mlp_layer_types[2]", "moe", "dense, sparse"}},
      {{{"indexer_types", {"full", "full", "full", "shared"}}}, {"indexer_types[3]", "shared"}},
      {{{"indexer_types", {"full", "full", "full", "half"}}}, {"indexer_types[3]", "half", "full"}},
      {{{"indexer_types", {"full"}}}, {"indexer_types", "1"}},
      {{{"n_group", 5}}, {"n_group", "5", "12"}},
      {{{"n_group", 12}}, {"n_group", "12", "two best"}},
      {{{"n_group", 4}, {"topk_group", 5}}, {"topk_group", "5", "4"}},
      {{{"n_group", 6}, {"topk_group", 1}}, {"num_experts_per_tok", "3", "2"}},
      {{{"num_experts_per_tok", 13}}, {"num_experts_per_tok", "13", "12"}},
      {{{"hc_mult", 0}}, {"hc_mult", "0", "1 or more"}},
      {{{"hc_sinkhorn_iters", 0}}, {"hc_sinkhorn_iters", "0"}},
      {{{"linear_conv_kernel_dim", 0}}, {"linear_conv_kernel_dim", "0"}},
      {{{"pad_token_id", 131}}, {"pad_token_id", "131", "130"}},
      {{{"rms_norm_eps", 0}}, {"rms_norm_eps", "0"}},
      {{{"swiglu_limit", -1}}, {"swiglu_limit", "-1"}},
      {{{"linear_lower_bound", 1.0}}, {"linear_lower_bound", "1"}},
      {{{"attention_bias", true}}, {"attention_bias", "true", "false"}},
      {{{"attention_dropout", 0.1}}, {"attention_dropout", "0.1"}},
      {{{"mhc", false}}, {"mhc", "false"}},
      {{{"index_kpool_compress", false}}, {"index_kpool_compress"}},
      {{{"logit_scale", 2.0}}, {"logit_scale", "2.0"}},
      {{{"norm_topk_prob", "yes"}}, {"norm_topk_prob", "yes", "true or false"}},
      {{{"layer_types", "linear_attention"}}, {"layer_types", "list"}},
  };
  for (const auto& row : cases) {
    json c = plain_tiny();
    c.update(row.change);
    const std::string text = refusal(c);
    for (const char* part : row.parts) EXPECT_THAT(text, HasSubstr(part)) << row.change;
  }
}

TEST(ConfigJson, SharedIndexerLayersComeFromTypesPatternOrFrequency) {
  json c = plain_tiny();
  c["num_hidden_layers"] = 6;
  c["layer_types"] = {"linear_attention",
                      "full_attention",
                      "full_attention",
                      "linear_attention",
                      "full_attention",
                      "full_attention"};
  c["mlp_layer_types"] = std::vector<std::string>(6, "sparse");
  const std::vector<bool> want = {false, false, true, false, false, true};
  c["indexer_types"] = {"shared", "full", "shared", "full", "full", "shared"};  // 0 is no DSA layer
  EXPECT_EQ(parse(c).indexer_shared, want);
  EXPECT_EQ(parse_config(export_config(parse(c)), ConfigDefaults::kRefuse, "x").indexer_shared,
            want);
  c["index_topk_pattern"] = "FFSFFS";
  EXPECT_EQ(parse(c).indexer_shared, want);
  c["index_topk_pattern"] = "FFFFFF";
  EXPECT_THAT(refusal(c), AllOf(HasSubstr("indexer_types"), HasSubstr("index_topk_pattern")));
  c.erase("indexer_types");
  EXPECT_EQ(parse(c).indexer_shared, std::vector<bool>(6));
  c["index_topk_pattern"] = {"full", "full", "shared", "full", "full", "shared"};
  EXPECT_EQ(parse(c).indexer_shared, want);
  EXPECT_EQ(parse(c, ConfigDefaults::kTrainer).indexer_shared, std::vector<bool>(6));
  c["use_index_cache"] = true;
  EXPECT_EQ(parse(c, ConfigDefaults::kTrainer).indexer_shared, want);

  c.erase("index_topk_pattern");
  c.erase("use_index_cache");
  c["index_topk_freq"] = 2;  // transformers: max(i - 1, 0) mod 2 != 0 is shared
  EXPECT_THAT(refusal(c), AllOf(HasSubstr("index_topk_freq"), HasSubstr("indexer_types")));
  EXPECT_EQ(parse(c, ConfigDefaults::kHf).indexer_shared,
            (std::vector<bool>{false, false, true, false, true, false}));
  EXPECT_EQ(parse(c, ConfigDefaults::kTrainer).indexer_shared, std::vector<bool>(6));
  c["index_skip_topk_offset"] = 1;
  c["layer_types"][0] = "full_attention";
  EXPECT_EQ(parse(c, ConfigDefaults::kHf).indexer_shared,
            (std::vector<bool>{false, true, false, false, false, true}));
}

TEST(ConfigJson, TiedEmbeddingsMustAgreeBetweenTheTwoLevels) {
  json c = {{"model_type", "glm5_next"}, {"text_config", plain_tiny()}};
  c["tie_word_embeddings"] = true;
  EXPECT_THAT(refusal(c), HasSubstr("tie_word_embeddings"));
  c["text_config"].erase("tie_word_embeddings");
  EXPECT_TRUE(parse(c).tie_word_embeddings);
}

TEST(ConfigJson, MalformedAndRepeatingFilesAreInputErrors) {
  const auto read = [](const std::string& text) {
    return message([&] { parse_config(text, ConfigDefaults::kRefuse, "dir/config.json"); },
                   ErrorKind::kInput);
  };
  EXPECT_THAT(read("{\n  \"a\": 1,\n}"), AllOf(HasSubstr("dir/config.json"), HasSubstr("line 3")));
  EXPECT_THAT(read(R"({"hidden_size": 1, "b": {}, "hidden_size": 2})"), HasSubstr("hidden_size"));
  EXPECT_THAT(read("[1, 2]"), HasSubstr("object"));
  EXPECT_THAT(read(""), HasSubstr("config.json"));
  EXPECT_THAT(message([] { load_config("/nowhere/at/all"); }, ErrorKind::kInput),
              HasSubstr("/nowhere/at/all"));
}

TEST(ConfigJson, OverridesReplaceKeysUnderEveryNameAndRefitLayerLists) {
  const ModelConfig tiny = preset_config("tiny");
  const ModelConfig deep = with_overrides(tiny, R"({"num_hidden_layers": 8})");
  EXPECT_EQ(deep.mixers[3], MixerKind::kDsa);
  EXPECT_EQ(deep.mixers[7], MixerKind::kDsa);
  EXPECT_EQ(deep.mlps[7], MlpKind::kMoe);
  EXPECT_EQ(with_overrides(tiny, R"({"num_hidden_layers": 2})").mixers.size(), 2U);
  EXPECT_EQ(with_overrides(tiny, R"({"num_local_experts": 14})").n_routed_experts, 14);
  EXPECT_EQ(with_overrides(tiny, R"({"linear_num_heads": 3})").linear_num_heads, 3);
  EXPECT_EQ(with_overrides(tiny, R"({"linear_lower_bound": null})").linear_lower_bound,
            std::nullopt);
  EXPECT_EQ(with_overrides(tiny, R"({"num_attention_heads": 3})").num_attention_heads, 3);
  EXPECT_EQ(
      with_overrides(preset_config("glm-5.3-flash"), R"({"num_hidden_layers": 4})").mlps.size(),
      4U);
  EXPECT_EQ(describe_config(with_overrides(tiny, "{}")), describe_config(tiny));
  EXPECT_THAT(message([&] { with_overrides(tiny, R"({"num_hiden_layers": 8})"); }),
              AllOf(HasSubstr("num_hiden_layers"), HasSubstr("num_hidden_layers")));
  EXPECT_THAT(message([&] { with_overrides(tiny, R"({"index_topk": 3})"); }),
              HasSubstr("index_topk"));
}

}  // namespace
}  // namespace lockstep::model
