// `lockstep plan`: a step on paper, from a scenario or from options.
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "harness/sync/transfer_plan.hpp"
#include "model/checkpoint/parameters.hpp"
#include "model/config/config_json.hpp"
#include "model/layers/parameter_policy.hpp"
#include "parallel/plan/step_memory.hpp"
#include "parallel/plan/traffic.hpp"
#include "tests/unit/cli_program_support.hpp"

namespace lockstep::harness {
namespace {

using Json = nlohmann::json;

class Plan : public Program {
 protected:
  static Outcome plan(std::vector<std::string> words) {
    words.insert(words.begin(), "plan");
    return lockstep(std::move(words));
  }
  static Json first_of(const Outcome& outcome) {
    EXPECT_EQ(outcome.exit_code, 0) << outcome.errors;
    return Json::parse(outcome.output)["plans"][0];
  }
  /// The same where the output is longer than what Outcome keeps.
  static Json first_of_long(const std::vector<std::string>& words) {
    std::vector<std::string> command = {
        (fs::path(LOCKSTEP_BINARY_DIR) / "lockstep").string(), "plan", "--json"};
    command.insert(command.end(), words.begin(), words.end());
    std::string text;
    const Outcome outcome =
        run_command(command, {}, [&](std::string_view line) { text += std::string(line) + '\n'; });
    EXPECT_EQ(outcome.exit_code, 0) << outcome.errors;
    return Json::parse(text)["plans"][0];
  }
};

TEST_F(Plan, NamesTheGroupsOfEveryAxis) {
  const Json plan_of_four = first_of(plan(
      {"--config", "tiny", "--topology", "fsdp=2,cp=2,ep=2", "--documents", "10,7,30", "--json"}));
  EXPECT_EQ(plan_of_four["num_ranks"], 4);
  const Json& groups = plan_of_four["groups"];
  EXPECT_EQ(groups["fsdp x cp"], Json::parse("[[0,1,2,3]]"));
  EXPECT_EQ(groups["cp"], Json::parse("[[0,1],[2,3]]"));
  EXPECT_EQ(groups["ep"], Json::parse("[[0,1],[2,3]]"));
  EXPECT_EQ(groups["expert fsdp"], Json::parse("[[0,2],[1,3]]"));
  EXPECT_EQ(groups["tp"], Json::parse("[[0],[1],[2],[3]]"));
  // Documents 10 and 7 go to the first row of two ranks, 30 to the second.
  std::vector<int64_t> tokens, first;
  for (const Json& rank : plan_of_four["ranks"]) {
    tokens.push_back(rank["tokens"]);
    first.push_back(rank["first_token"]);
  }
  EXPECT_EQ(tokens, (std::vector<int64_t>{8, 9, 15, 15}));
  EXPECT_EQ(first, (std::vector<int64_t>{0, 8, 17, 32}));
}

TEST_F(Plan, WarnsOfRanksWithoutTokensAndItsOwnExampleHasNone) {
  const Outcome idle =
      plan({"--config", "tiny", "--topology", "fsdp=2,cp=2", "--documents", "10", "--json"});
  EXPECT_THAT(idle.errors, HasSubstr("warning"));
  EXPECT_THAT(idle.errors, HasSubstr("2 of 4 ranks (0 1) get no tokens"));
  EXPECT_THAT(std::string(first_of(idle)["warning"]), HasSubstr("at least 2 documents"));
  const std::string help = plan({"--help"}).output;
  const size_t begin = help.find("lockstep plan --config") + std::string("lockstep plan ").size();
  std::istringstream line(help.substr(begin, help.find('\n', begin) - begin));
  std::vector<std::string> words;
  for (std::string word; line >> word;) words.push_back(word);
  const Outcome example = plan(words);
  EXPECT_EQ(example.exit_code, 0) << example.errors;
  EXPECT_EQ(example.errors, "");
}

TEST_F(Plan, RanksHoldEveryParameterOnceAndReceiveWhatIsSent) {
  const model::ModelConfig config = model::preset_config("tiny");
  int64_t elements = 0;
  for (const model::Parameter& p : model::expected_parameters(config)) elements += p.numel();
  const Json whole = first_of(plan({"--config",
                                    "tiny",
                                    "--topology",
                                    "fsdp=3,cp=2,ep=2",
                                    "--documents",
                                    "100,1,31,0,64",
                                    "--policy",
                                    "fsdp-fp32-islands",
                                    "--recompute",
                                    "--json"}));
  int64_t held = 0;
  std::map<std::string, int64_t> balance;
  for (const Json& rank : whole["ranks"]) {
    for (const Json& part : rank["memory"]) {
      held += part["elements"].get<int64_t>();
      EXPECT_EQ(part["optimizer_bytes"], 2 * part["gradient_bytes"].get<int64_t>());
    }
    for (const Json& line : rank["traffic"]) {
      EXPECT_GT(line["calls"], 0);
      balance[line["axis"].get<std::string>() + " " + line["what"].get<std::string>()] +=
          line["bytes_sent"].get<int64_t>() - line["bytes_received"].get<int64_t>();
    }
  }
  EXPECT_EQ(held, elements);
  EXPECT_TRUE(balance.contains("cp kda states"));
  EXPECT_TRUE(balance.contains("ep rows"));
  for (const auto& [what, difference] : balance) EXPECT_EQ(difference, 0) << what;
}

TEST_F(Plan, GatheredParametersAreThoseOfTheUnits) {
  // Of two ranks each sends its half of the parameters, twice but for the head.
  const Json two = first_of(plan({"--config", "tiny", "--topology", "fsdp=2", "--json"}));
  int64_t sent = 0;
  for (const Json& rank : two["ranks"]) {
    for (const Json& line : rank["traffic"])
      if (line["what"] == "parameters") sent += line["bytes_sent"].get<int64_t>();
  }
  const model::ModelConfig config = model::preset_config("tiny");
  int64_t expected = 0;
  for (const model::Parameter& p : model::expected_parameters(config)) {
    const bool head = p.layer < 0 && !p.name.starts_with("embed_");
    expected += (head ? 1 : 2) * 4 * p.numel();
  }
  EXPECT_EQ(sent, expected);
}

TEST_F(Plan, EveryRankOfAKindHasItsOwnFigures) {
  const model::ModelConfig config = model::preset_config("tiny");
  const model::Numerics num = model::Numerics::policy("invariant-f32");
  const Packing batch = Packing::of_lengths({100, 1, 31, 0, 64, 7, 7, 7, 300});
  const std::string topology = "dp=3,fsdp=5,cp=2,tp=2,ep=5";
  const parallel::StepPlan step{.config = config,
                                .num = num,
                                .topology = model::parse_topology(topology),
                                .batch = batch,
                                .cp_cuts = {},
                                .recompute = false,
                                .balance = false,
                                .routes = {}};
  const Json whole = first_of_long({"--config",
                                    "tiny",
                                    "--topology",
                                    topology,
                                    "--documents",
                                    "100,1,31,0,64,7,7,7,300",
                                    "--policy",
                                    "invariant-f32"});
  ASSERT_EQ(whole["ranks"].size(), 60U);
  for (int64_t rank = 0; rank < 60; ++rank) {
    const Json& planned = whole["ranks"][static_cast<size_t>(rank)];
    const auto lines = parallel::step_traffic(step, rank);
    ASSERT_EQ(planned["traffic"].size(), lines.size());
    for (size_t i = 0; i < lines.size(); ++i) {
      const Json& line = planned["traffic"][i];
      EXPECT_EQ(line["what"], lines[i].what);
      EXPECT_EQ(line["bytes_sent"], lines[i].bytes_sent) << rank << " " << lines[i].what;
      EXPECT_EQ(line["bytes_received"], lines[i].bytes_received) << rank << " " << lines[i].what;
    }
    EXPECT_EQ(planned["peak_bytes"]["all"], parallel::step_memory(step, rank).peak_total);
  }
}

TEST_F(Plan, AMillionRanksAreCutShort) {
  EXPECT_EQ(plan({"--config", "tiny", "--documents", "1000000000000"}).exit_code, 0);
  for (const char* topology : {"dp=1048576", "cp=1024,fsdp=1024,ep=512", "cp=1048576"}) {
    const std::vector<std::string> words = {
        "--config", "tiny", "--topology", topology, "--documents", "100,30"};
    const Outcome table = plan(words);
    EXPECT_EQ(table.exit_code, 0) << table.errors;
    EXPECT_THAT(table.output, HasSubstr("... 1048512 more ranks (--json lists the first 4096)"));
    EXPECT_THAT(table.output, HasSubstr("... 131008 more hosts"));
    EXPECT_LT(std::count(table.output.begin(), table.output.end(), '\n'), 200);
    const Json json = first_of_long(words);
    EXPECT_EQ(json["num_ranks"], 1048576);
    EXPECT_EQ(json["ranks"].size(), 4096U);
    EXPECT_EQ(json["left_out"],
              Json::parse(R"({"ranks": 1044480, "hosts": 130560, "groups": "all"})"));
  }
}

TEST_F(Plan, PrintsTables) {
  const Outcome outcome = plan(
      {"--config", "glm-5.3-flash", "--topology", "fsdp=2,cp=8,ep=8", "--documents", "131072"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.errors;
  for (const char* part : {"nothing blocks cp = 8",
                           "who talks to whom",
                           "{0 1 2 3 4 5 6 7} {8 9 10 11 12 13 14 15}",
                           "bytes held by rank",
                           "experts",
                           "gathered experts",
                           "host 1   ranks 8-15",
                           "exp_avg_sq.safetensors",
                           "bytes sent in a step",
                           "TFLOP/s",
                           "latents",
                           "with adamw, offload none",
                           "  ####",
                           "313326811966",
                           "GiB"}) {
    EXPECT_THAT(outcome.output, HasSubstr(part));
  }
}

TEST_F(Plan, AddsUpMemoryOfHostsAndArithmetic) {
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"--config", "tiny", "--documents", "100,31", "--json"});
    return first_of(plan(std::move(more)));
  };
  const Json four = with({"--topology", "fsdp=2,cp=2", "--ranks-per-host", "2", "--network", "1"});
  ASSERT_EQ(four["hosts"].size(), 2U);
  EXPECT_EQ(four["hosts"][1]["ranks"], Json::parse("[2,3]"));
  int64_t held = 0, masters = 0;
  double flops = 0, slowest = 0;
  for (const Json& rank : four["ranks"]) {
    held += rank["peak_bytes"]["all"].get<int64_t>();
    masters += rank["peak_bytes"]["masters"].get<int64_t>();
    flops += rank["flops"].get<double>();
    slowest = std::max(
        slowest, rank["compute_seconds"].get<double>() + rank["traffic_seconds"].get<double>());
  }
  EXPECT_EQ(
      four["hosts"][0]["peak_bytes"].get<int64_t>() + four["hosts"][1]["peak_bytes"].get<int64_t>(),
      held);
  EXPECT_EQ(four["time"]["seconds_in_turn"], slowest);
  EXPECT_EQ(four["cp_blocker"], nullptr);

  const Json one = with({});
  EXPECT_NEAR(one["ranks"][0]["flops"].get<double>() / flops, 1, 1e-12);
  EXPECT_EQ(one["ranks"][0]["peak_bytes"]["masters"], masters);
  // Moments are those of what is trained, in float32; the head of a file is small.
  const int64_t moments = four["checkpoint"]["exp_avg.safetensors"];
  EXPECT_GT(moments, masters);
  EXPECT_LT(moments, masters + (1 << 16));
  EXPECT_EQ(four["checkpoint"], one["checkpoint"]);

  // Twice the ranks of a host, and nothing goes over the slow network.
  const Json near = with({"--topology", "fsdp=2,cp=2", "--ranks-per-host", "4", "--network", "1"});
  EXPECT_LT(near["ranks"][0]["traffic_seconds"].get<double>(),
            four["ranks"][0]["traffic_seconds"].get<double>() / 10);
}

TEST_F(Plan, CountsTheParametersOfTheRealModelWithAndWithoutItsMtpLayer) {
  const std::vector<std::string> flash = {"--config", "glm-5.3-flash", "--documents", "64"};
  const auto model_of = [&](const char* optimizer) {
    std::vector<std::string> words = flash;
    words.insert(words.end(), {"--optimizer", optimizer});
    return first_of_long(words)["model"];
  };
  const Json adamw = model_of("adamw"), muon = model_of("muon");
  const auto expect = [](const Json& size, int64_t parameters, int64_t active, int64_t looked_up) {
    EXPECT_EQ(size["parameters"], parameters);
    EXPECT_EQ(size["active"], active);
    EXPECT_EQ(size["active_with_embedding"], active + looked_up);
  };
  const int64_t embedding = 154880 * 4096, mtp = 7'432'592'416;
  // 313.3B, 16.7B and 17.4B; with MTP 320.8B and 17.8B. 280 of 288 experts rest.
  expect(adamw, 313'326'811'966, 16'742'333'246, embedding);
  expect(adamw["with_mtp"],
         313'326'811'966 + mtp,
         16'742'333'246 + mtp - int64_t{280} * 3 * 4096 * 2048,
         embedding);
  const auto tera = [](const Json& bytes) { return bytes.get<double>() * 1e-12; };
  EXPECT_NEAR(tera(adamw["weights_only_bytes"]), 0.627, 5e-4);
  EXPECT_NEAR(tera(adamw["with_mtp"]["weights_only_bytes"]), 0.642, 5e-4);
  // 14 bytes a parameter: bfloat16 weights, float32 masters and two moments.
  EXPECT_NEAR(tera(adamw["training_bytes"]), 14 * 0.313327, 2e-3);
  EXPECT_NEAR(tera(adamw["with_mtp"]["training_bytes"]), 14 * 0.320759, 2e-3);
  // Muon has one state of matrices.
  const double moments = tera(adamw["training_bytes"]) - tera(muon["training_bytes"]);
  EXPECT_NEAR(moments, 4 * (0.313327 - 2 * 0.000634), 1e-3);
  EXPECT_FALSE(first_of(plan({"--config", "tiny", "--json"}))["model"].contains("with_mtp"));
}

TEST_F(Plan, OffloadMovesTheStateOfTheOptimizerAndMastersAndGradientsToTheHost) {
  const auto with = [&](const char* offload, const char* optimizer) {
    return first_of(plan({"--config",
                          "tiny",
                          "--documents",
                          "100,31",
                          "--topology",
                          "fsdp=2,cp=2,ep=2",
                          "--ranks-per-host",
                          "2",
                          "--policy",
                          "fsdp-bf16",
                          "--offload",
                          offload,
                          "--optimizer",
                          optimizer,
                          "--json"}));
  };
  const auto sum = [](const Json& plan, const char* key) {
    int64_t bytes = 0;
    for (const Json& rank : plan["ranks"]) {
      for (const Json& part : rank["memory"]) bytes += part[key].get<int64_t>();
    }
    return bytes;
  };
  const auto peak = [](const Json& plan, const char* kind) {
    int64_t bytes = 0;
    for (const Json& rank : plan["ranks"]) bytes += rank["peak_bytes"][kind].get<int64_t>();
    return bytes;
  };
  int64_t computed = 0;  // bytes of trained parameters as they are computed with
  const model::Numerics num = model::Numerics::policy("fsdp-bf16");
  for (const model::Parameter& p : model::expected_parameters(model::preset_config("tiny"))) {
    if (p.frozen || p.buffer) continue;
    computed += p.numel() * (model::parameter_dtype(p.name, num) == at::kFloat ? 4 : 2);
  }
  for (const char* optimizer : {"adamw", "sgd"}) {
    const bool adamw = std::string_view(optimizer) == "adamw";
    const Json none = with("none", optimizer), some = with("optimizer", optimizer),
               full = with("full", optimizer);
    const int64_t trained = sum(none, "gradient_bytes") / 4,
                  frozen = sum(none, "parameter_bytes") - 4 * trained,
                  state = adamw ? 8 * trained : 0;
    EXPECT_EQ(sum(none, "optimizer_bytes"), state);
    EXPECT_EQ(sum(none, "host_bytes"), 0);
    EXPECT_EQ(sum(some, "optimizer_bytes"), 0);
    EXPECT_EQ(sum(some, "host_bytes"), state);
    EXPECT_EQ(sum(some, "gradient_bytes"), 4 * trained);
    // Masters, state and gradients as computed: 14 bytes of most, with AdamW.
    EXPECT_EQ(sum(full, "host_bytes"), 4 * trained + state + computed);
    EXPECT_EQ(sum(full, "gradient_bytes"), 0);
    EXPECT_EQ(sum(full, "parameter_bytes"), computed + frozen);
    EXPECT_EQ(peak(none, "moments"), state);
    EXPECT_EQ(peak(some, "moments"), state) << "they come for the step";
    EXPECT_EQ(peak(full, "moments") + peak(full, "masters"), 0);
    EXPECT_LT(peak(full, "all"), peak(some, "all"));
    if (adamw) {
      EXPECT_LT(peak(some, "all"), peak(none, "all"));
    }
    int64_t hosts = 0;
    for (const Json& host : full["hosts"]) hosts += host["host_bytes"].get<int64_t>();
    EXPECT_EQ(hosts, sum(full, "host_bytes"));
  }
  const std::vector<std::string> muon = {"--config", "tiny", "--optimizer", "muon"};
  const auto refused = [&](std::vector<std::string> more) {
    more.insert(more.begin(), muon.begin(), muon.end());
    return plan(std::move(more));
  };
  expect_refused(refused({"--offload", "full"}), 2, {"all rows of a matrix", "offload optimizer"});
  expect_refused(refused({"--topology", "tp=2"}), 2, {"whole matrices", "tp = 2"});
  expect_refused(refused({"--offload", "all"}), 2, {"'all'", "none, optimizer or full"});
  expect_refused(plan({"--config", "tiny", "--optimizer", "lion"}), 2, {"adamw, sgd or muon"});
}

TEST_F(Plan, PredictsTheWeightSync) {
  for (const bool colocated : {false, true}) {
    std::vector<std::string> words = {"--config",
                                      "tiny",
                                      "--topology",
                                      "dp=2,fsdp=2,ep=2",
                                      "--documents",
                                      "10,10,10,10",
                                      "--policy",
                                      "fsdp-fp32-islands",
                                      "--engine-tp",
                                      "2",
                                      "--engine-policy",
                                      "vllm-bf16",
                                      "--json"};
    if (colocated) words.emplace_back("--colocated");
    const Json sync = first_of(plan(words))["weight_sync"];
    const TransferPlan transfers({model::preset_config("tiny"),
                                  model::Numerics::policy("fsdp-fp32-islands"),
                                  model::Numerics::policy("vllm-bf16"),
                                  {.dp = 2, .fsdp = 2, .ep = 2},
                                  {.tp = 2},
                                  consecutive_ranks(0, 4),
                                  consecutive_ranks(colocated ? 0 : 4, 2)},
                                 1 << 20);
    ASSERT_EQ(sync["ranks"].size(), colocated ? 4U : 6U);
    int64_t all = 0;
    for (int64_t rank = 0; rank < static_cast<int64_t>(sync["ranks"].size()); ++rank) {
      const Json& planned = sync["ranks"][static_cast<size_t>(rank)];
      EXPECT_EQ(planned["bytes_sent"], transfers.bytes_sent(rank));
      EXPECT_EQ(planned["bytes_received"], transfers.bytes_received(rank));
      EXPECT_EQ(planned["bytes_received"].get<int64_t>() + planned["bytes_own"].get<int64_t>(),
                transfers.part_bytes(rank));
      all += transfers.bytes_sent(rank);
    }
    EXPECT_EQ(sync["bytes"], all);
  }
  write("sync.toml", R"(
[model]
preset = "tiny"
[data]
documents = [20, 3]
[run.trainer]
topology = { fsdp = 2 }
[run.served]
engine = "inference"
weights_from = "trainer"
)");
  const Outcome outcome = plan({path("sync.toml")});
  EXPECT_THAT(outcome.output, HasSubstr("weight sync of fsdp=2 into an engine float32 of tp = 1"));
  expect_refused(plan({"--config", "tiny", "--engine-tp", "64"}), 2, {"tp = 64", "use tp <="});
  expect_refused(plan({"--config", "tiny", "--topology", "dp=100000", "--engine-tp", "2"}),
                 2,
                 {"100000 x 2 ranks", "--engine-tp"});
}

TEST_F(Plan, TellsWhyCpIsBlocked) {
  const Outcome outcome = plan({"--config",
                                "tiny",
                                "--documents",
                                "10",
                                "--topology",
                                "cp=2",
                                "--cp-cuts",
                                "0,11,10",
                                "--json"});
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_THAT(outcome.errors, HasSubstr("is blocked"));
  const Json blocked = Json::parse(outcome.output)["plans"][0];
  EXPECT_THAT(blocked["cp_blocker"].get<std::string>(), HasSubstr("do not fit cp = 2"));
  EXPECT_FALSE(blocked.contains("ranks"));
}

TEST_F(Plan, TakesScenarios) {
  write("two.toml", R"(
[model]
preset = "tiny"
[data]
documents = [40, 3]
[run.one]
[run.two]
topology = { cp = 2 }
cp_cuts = [0, 10, 43]
)");
  const Outcome outcome = plan({path("two.toml"), "--json"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
  const Json plans = Json::parse(outcome.output)["plans"];
  ASSERT_EQ(plans.size(), 2U);
  EXPECT_EQ(plans[0]["run"], "one");
  EXPECT_TRUE(plans[0]["ranks"][0]["traffic"].empty());
  EXPECT_EQ(plans[1]["run"], "two");
  EXPECT_EQ(plans[1]["ranks"][1]["tokens"], 33);
  EXPECT_EQ(plan({path("two.toml"), "--ranks", "2"}).exit_code, 0);
  expect_refused(plan({path("two.toml"), "--set", "run.two.cp_cuts=[0, 10, 44]"}),
                 2,
                 {"two.toml", "0 to 44", "43 tokens", "cp + 1 rows"});
}

TEST_F(Plan, RefusesWhatCannotBe) {
  const std::vector<std::string> tiny = {"--config", "tiny", "--documents", "10"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), tiny.begin(), tiny.end());
    return plan(std::move(more));
  };
  expect_refused(plan({}), 2, {"scenario files", "--config", "neither"});
  expect_refused(plan({"a.toml", "--config", "tiny"}), 2, {"not both"});
  expect_refused(plan({"--config", "none"}), 2, {"none", "presets are", "tiny"});
  expect_refused(plan({"--topology", "cp=2"}), 2, {"--config"});
  expect_refused(with({"--topology", "tp=64"}), 2, {"tp = 64", "use tp <="});
  expect_refused(with({"--topology", "fsdp=2,ep=3"}), 2, {"ep"});
  expect_refused(with({"--topology", "cp=2", "--cp-cuts", "0,11,10"}), 2, {"do not fit cp = 2"});
  expect_refused(with({"--topology", "fsdp=2", "--cp-cuts", "0,10"}), 2, {"2 rows", "leave them"});
  expect_refused(with({"--topology", "cp=4", "--ranks", "2"}), 2, {"needs 4 ranks", "2"});
  expect_refused(with({"--numerics", "D61"}), 2, {"D61", "SWITCH=VALUE"});
  expect_refused(with({"--policy", "none"}), 2, {"none"});
}

}  // namespace
}  // namespace lockstep::harness
