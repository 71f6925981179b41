// The built program as users meet it: exit codes, one clear error, no output left behind by a
// failure.
#include <nlohmann/json.hpp>
#include <set>

#include "tests/unit/cli_program_support.hpp"

namespace lockstep::harness {
namespace {

TEST_F(Program, EveryCommandExplainsItself) {
  for (const char* command : {"run",
                              "logits",
                              "dump",
                              "inspect",
                              "compare",
                              "convert",
                              "export",
                              "golden",
                              "bench",
                              "list",
                              "report",
                              "doctor"}) {
    const Outcome outcome = lockstep({command, "--help"});
    EXPECT_EQ(outcome.exit_code, 0) << command;
    EXPECT_THAT(outcome.output, HasSubstr("--quiet")) << command;
    EXPECT_THAT(outcome.output, HasSubstr("--json")) << command;
  }
  EXPECT_THAT(lockstep({"--help"}).output, HasSubstr("Exit codes"));
  EXPECT_THAT(lockstep({"--help"}).output, Not(HasSubstr("worker")));
  EXPECT_THAT(lockstep({"logits", "--version"}).output, HasSubstr("lockstep "));
}

TEST_F(Program, WrongCommandLinesAreExitTwoWithAHint) {
  expect_refused(lockstep({"logits", "--nonsense"}), 2, {"lockstep logits", "--help"});
  expect_refused(lockstep({"logitz"}), 2, {"did you mean 'logits'?"});
  expect_refused(lockstep({}), 2, {"--help"});
  expect_refused(lockstep({"golden"}), 2, {"golden"});
  expect_refused(lockstep({"bench", "--repeats", "0"}), 2, {"repeats"});
  expect_refused(lockstep({"dump",
                           "--model",
                           kModel,
                           "--docs",
                           path("docs.json"),
                           "--modules",
                           "",
                           "--out",
                           path("out.h5")}),
                 2,
                 {"--modules", "is empty"});
  expect_refused(lockstep({"run", path("docs.json"), "--tag", ""}), 2, {"--tag", "is empty"});
  expect_refused(logits({"--comm-timeout-ms", "0"}), 2, {"--comm-timeout-ms"});
  expect_refused(lockstep({"list", "presets", "--policy", "float32"}), 2, {"--policy"});
}

TEST_F(Program, CompareHelpListsMetricsAndTheOrder) {
  const std::string help = lockstep({"compare", "--help"}).output;
  for (const char* part : {"rel_l2, max_abs, ulp_max, cosine", "model order", "--module-map"})
    EXPECT_THAT(help, HasSubstr(part));
}

TEST_F(Program, ScenariosAreFoundFromAnyFolder) {
  const std::string program = std::string(LOCKSTEP_BINARY_DIR) + "/lockstep";
  const auto here = [&](const std::string& words) {
    return run_command(
        {"sh", "-c", fmt::format("cd {} && {} {}", folder_.string(), program, words)});
  };
  expect_refused(
      here("run demo --dry-run"), 2, {"demo does not exist; did you mean", "demo.toml?"});
  expect_refused(
      here("run cp_equivalense"), 2, {"did you mean 'cp_equivalence'", "scenarios are in"});
  EXPECT_THAT(here("list scenarios").output, HasSubstr("/scenarios/demo.toml"));
}

TEST_F(Program, BenchGivesTimesByOperatorAndGrowthAsJson) {
  const Outcome outcome = lockstep(
      {"bench", "--preset", "tiny", "--tokens", "48", "--growth", "--repeats", "1", "--json"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
  const auto json = nlohmann::json::parse(outcome.output);
  const auto& rows = json.at("rows");
  ASSERT_EQ(rows.size(), 3U);
  EXPECT_EQ(rows[1].at("documents"), (std::vector<int64_t>{384}));
  EXPECT_EQ(rows[2].at("documents"), std::vector<int64_t>(8, 48));
  for (const auto& row : rows) {
    for (const std::string pass : {"forward", "forward_backward"}) {
      double sum = 0;
      std::set<std::string> names;
      for (const auto& op : row.at(pass + "_operators")) {
        sum += op.at("forward_s").get<double>() + op.at("backward_s").get<double>();
        names.insert(op.at("name"));
      }
      EXPECT_LE(sum, row.at(pass + "_s").get<double>()) << pass;
      for (const char* name : {"kda", "indexer scoring", "indexer selection", "sparse attention"}) {
        EXPECT_TRUE(names.contains(name)) << name;
      }
      EXPECT_TRUE(row.contains(pass + "_peak_bytes"));
    }
  }
  ASSERT_EQ(json.at("growth").size(), 2U);
  EXPECT_GT(json.at("growth")[0].at("forward").at("without_scoring"), 0);
  EXPECT_TRUE(json.at("growth")[1].at("forward_backward").at("operators").contains("experts"));

  const Outcome table =
      lockstep({"bench", "--preset", "tiny", "--tokens", "16", "--growth", "--repeats", "1"});
  EXPECT_THAT(table.output, HasSubstr("16 -> 128 tokens, everything but indexer scoring:"));
  EXPECT_THAT(table.output, HasSubstr("16 -> 8 x 16 tokens, everything:"));
  expect_refused(lockstep({"bench", "--growth", "--tokens", "16", "32"}), 2, {"2 lengths"});
}

TEST_F(Program, BenchGivesTheCostOfAPolicyAsARatio) {
  const std::vector<std::string> command = {"bench",
                                            "--preset",
                                            "tiny",
                                            "--tokens",
                                            "48",
                                            "--policy",
                                            "invariant-f32",
                                            "--against",
                                            "float32",
                                            "--repeats",
                                            "1"};
  const Outcome table = lockstep(command);
  ASSERT_EQ(table.exit_code, 0) << table.errors;
  EXPECT_THAT(table.output, HasSubstr("invariant-f32 / float32\n"));
  std::vector<std::string> as_json = command;
  as_json.emplace_back("--json");
  const auto other = nlohmann::json::parse(lockstep(as_json).output).at("rows")[0].at("against");
  EXPECT_GT(other.at("forward_s"), 0);
  EXPECT_GT(other.at("forward_backward_s"), 0);
  EXPECT_TRUE(other.contains("forward_backward_peak_bytes"));
  expect_refused(lockstep({"bench", "--against", "float31"}), 2, {"float31"});
}

TEST_F(Program, BenchScalingMovesTheBytesOfThePlanOnEveryAxis) {
  const Outcome outcome = lockstep({"bench",
                                    "--scaling",
                                    "--preset",
                                    "tiny",
                                    "--ranks",
                                    "1",
                                    "2",
                                    "--tokens",
                                    "24",
                                    "--repeats",
                                    "1",
                                    "--json"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
  const auto json = nlohmann::json::parse(outcome.output);
  ASSERT_EQ(json.at("rows").size(), 12U);  // weak and strong, three axes, two numbers of ranks
  for (const auto& row : json.at("rows")) {
    EXPECT_TRUE(row.at("as_planned")) << row;
    double in_calls = 0;
    for (const auto& axis : row.at("axes")) {
      EXPECT_EQ(axis.at("bytes_sent"), axis.at("planned_bytes")) << row;
      in_calls += axis.at("seconds").get<double>();
    }
    EXPECT_LE(in_calls, row.at("seconds").get<double>());
    if (row.at("ranks") == 1) {
      EXPECT_EQ(row.at("efficiency"), 1);
      EXPECT_TRUE(row.at("axes").empty());
      continue;
    }
    EXPECT_GT(in_calls, 0);
  }
  expect_refused(lockstep({"bench", "--scaling", "--ranks", "2", "4"}), 2, {"begin with 1"});
  expect_refused(
      lockstep({"bench", "--scaling", "--ranks", "1", "3"}), 2, {"4096 tokens", "--total-tokens"});
  expect_refused(lockstep({"bench", "--ranks", "1", "2"}), 2, {"--scaling"});
}

TEST_F(Program, JsonErrorsAreOnStandardOutputToo) {
  const Outcome outcome = lockstep({"inspect", path("missing"), "--json"});
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_THAT(outcome.output, HasSubstr("\"exit_code\": 2"));
  EXPECT_THAT(outcome.output, HasSubstr("\"kind\": \"input\""));
  // Bytes that are no UTF-8 cannot stand in JSON, and end nothing.
  write("bytes.json", "{\"documents\": [[\"\xff\"]]}");
  const Outcome bytes = logits({"--json"}, "bytes.json");
  EXPECT_EQ(bytes.exit_code, 2) << bytes.errors;
  EXPECT_THAT(bytes.output, HasSubstr("\"kind\": \"input\""));
}

TEST_F(Program, AResultNeverReplacesAFileOfTheCheckpoint) {
  const fs::path model = folder_ / "model";
  fs::copy(kModel, model);
  for (const auto& entry : fs::directory_iterator(model)) {
    const auto size = fs::file_size(entry.path());
    expect_refused(lockstep({"logits",
                             "--model",
                             model.string(),
                             "--docs",
                             path("docs.json"),
                             "--out",
                             entry.path().string()}),
                   2,
                   {"--out", "would be lost"});
    EXPECT_EQ(fs::file_size(entry.path()), size);
  }
}

TEST_F(Program, LogitsRefusesBadInputAndLeavesNothing) {
  expect_refused(lockstep({"logits",
                           "--model",
                           path("no-model"),
                           "--docs",
                           path("docs.json"),
                           "--out",
                           path("out.safetensors")}),
                 2,
                 {"--model", "no such folder"});
  write("deep.json",
        "{\"documents\": " + std::string(200000, '[') + std::string(200000, ']') + "}");
  expect_refused(logits({}, "deep.json"), 2, {"deep.json", "64 deep"});
  expect_refused(
      lockstep(
          {"logits", "--model", kModel, "--docs", path("docs.json"), "--out", path("docs.json")}),
      2,
      {"--docs", "name another"});
  write("twice.json", R"({"documents": [[1]], "documents": [[2]]})");
  expect_refused(logits({}, "twice.json"), 2, {"twice.json", "\"documents\" appears twice"});
  expect_refused(logits({}, "no-docs.json"), 2, {"no-docs.json"});
  write("broken.json", "{\"documents\": [[1, 2], [3");
  expect_refused(logits({}, "broken.json"), 2, {"broken.json"});
  write("text.json", "{\"documents\": [[1, \"two\"]]}");
  expect_refused(logits({}, "text.json"), 2, {"text.json"});
  write("large.json", "{\"documents\": [[1, 2, 67]]}");
  expect_refused(logits({}, "large.json"), 2, {"67"});
  expect_refused(logits({"--policy", "flaot32"}), 2, {"flaot32", "float32"});
  expect_refused(logits({"--numerics", "D99=x"}), 2, {"D99"});
  expect_refused(logits({"--topology", "cp=0"}), 2, {"cp = 0"});
  expect_refused(logits({"--topology", "cp=two"}), 2, {"two"});
  expect_refused(logits({"--topology", "cp=65536,fsdp=65536,tp=65536,dp=65536"}), 2, {"more than"});
  // 64 ranks that do not fit into memory must not start for that: with this launcher none could.
  setenv("LOCKSTEP_MPIRUN", "/no/mpirun", 1);
  expect_refused(logits({"--topology", "tp=64"}), 2, {"tp = 64", "use tp <= "});
  unsetenv("LOCKSTEP_MPIRUN");
  expect_refused(logits({"--topology", "cp=100000"}), 2, {"100000"});
  expect_refused(logits({"--engine", "inference", "--grads"}), 2, {"grads belongs to the trainer"});
  expect_refused(logits({"--decode", "3"}), 2, {"decode belongs to the inference engine"});
  expect_refused(logits({"--engine", "oven"}), 2, {"oven"});
  expect_refused(logits({"--device", "gpu"}), 2, {"gpu", "cuda"});
  if (!std::filesystem::exists("/dev/nvidiactl"))
    expect_refused(logits({"--device", "cuda"}), 2, {"NVIDIA driver", "\"cpu\""});
  expect_refused(logits({"--stream-layers", "--grads"}), 2, {"--stream-layers"});
}

TEST_F(Program, OutputThatCannotBeWrittenIsFoundOutFirst) {
  expect_refused(lockstep({"logits",
                           "--model",
                           kModel,
                           "--docs",
                           path("docs.json"),
                           "--out",
                           path("none/x.safetensors")}),
                 2,
                 {"does not exist"});
  expect_refused(lockstep({"logits",
                           "--model",
                           kModel,
                           "--docs",
                           path("docs.json"),
                           "--out",
                           "/proc/x.safetensors"}),
                 2,
                 {"/proc/"});
  expect_refused(
      lockstep({"logits", "--model", kModel, "--docs", path("docs.json"), "--out", "/dev/null"}),
      2,
      {"no ordinary file"});
  write("file", "");
  expect_refused(lockstep({"run",
                           std::string(LOCKSTEP_SOURCE_DIR) + "/scenarios/demo.toml",
                           "--out",
                           path("file/sub")}),
                 2,
                 {"--out"});
}

TEST_F(Program, LogitsWritesWhatItPromises) {
  const Outcome outcome = logits({"--policy", "float64", "--grads"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
  const model::Safetensors file = model::Safetensors::open(path("out.safetensors"));
  EXPECT_EQ(file.info("logits").shape, (std::vector<int64_t>{11, 67}));
  EXPECT_EQ(file.info("logits").dtype, at::kDouble);
  const Tensor logits = file.load("logits"), logprobs = file.load("logprobs");
  for (const int64_t last : {6, 7, 10}) EXPECT_TRUE(logprobs[last].isnan().item<bool>());
  // Token 3 of the first document, and the loss, from the logits themselves.
  const Tensor own = at::log_softmax(logits, 1);
  EXPECT_NEAR(logprobs[2].item<double>(), own[2][4].item<double>(), 1e-12);
  EXPECT_NEAR(
      file.load("loss").item<double>(), -logprobs.nan_to_num().sum().item<double>() / 8, 1e-12);
  int64_t grads = 0;
  for (const auto& [name, info] : file.tensors()) {
    if (name.starts_with("grads/")) ++grads;
    EXPECT_THAT(name, Not(HasSubstr("indexer")));
  }
  EXPECT_GT(grads, 50);
}

TEST_F(Program, TwoRanksGiveTheSameFunctionAsOne) {
  ASSERT_EQ(logits({"--policy", "float64"}).exit_code, 0);
  fs::rename(path("out.safetensors"), path("one.safetensors"));
  const Outcome two = logits({"--policy", "float64", "--topology", "cp=2"});
  ASSERT_EQ(two.exit_code, 0) << two.errors;
  const Outcome compared =
      lockstep({"compare", path("out.safetensors"), path("one.safetensors"), "--limit", "1e-11"});
  EXPECT_EQ(compared.exit_code, 0) << compared.output;
  const Outcome bits = lockstep({"compare", path("one.safetensors"), path("one.safetensors")});
  EXPECT_EQ(bits.exit_code, 0) << bits.output;
}

TEST_F(Program, DocumentsWithoutTargetsHaveLossZero) {
  write("one.json", R"({"documents": [[], [5]]})");
  const Outcome outcome = logits({"--grads", "--json"}, "one.json");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
  EXPECT_THAT(outcome.output, HasSubstr("\"loss\": 0,"));
}

TEST_F(Program, CompareEndsWithOneWhenNumbersDiffer) {
  model::write_safetensors_file(path("a.safetensors"),
                                {{"x", at::ones({3})}, {"y", at::ones({2})}});
  model::write_safetensors_file(path("b.safetensors"),
                                {{"x", at::ones({3}) * 1.5}, {"y", at::ones({2})}});
  const Outcome outcome = lockstep({"compare", path("a.safetensors"), path("b.safetensors")});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output, HasSubstr("x[0]"));
  EXPECT_EQ(lockstep({"compare", path("a.safetensors"), path("b.safetensors"), "--limit", "0.5"})
                .exit_code,
            0);
  EXPECT_EQ(lockstep({"compare", path("a.safetensors"), path("missing")}).exit_code, 2);
  write("short.safetensors", "abc");
  EXPECT_EQ(lockstep({"compare", path("short.safetensors"), path("a.safetensors")}).exit_code, 2);
}

TEST_F(Program, DryRunChecksAndComputesNothing) {
  write("good.toml", R"(
[model]
preset = "tiny"
[data]
documents = [12, 3]
[run.a]
policy = "float64"
[run.b]
policy = "float64"
topology = { cp = 2 }
[[compare]]
left = "b"
right = "a"
limit = 1e-11
)");
  const Outcome plan = lockstep({"run", path("good.toml"), "--dry-run", "--out", path("out")});
  EXPECT_EQ(plan.exit_code, 0) << plan.errors;
  EXPECT_THAT(plan.output, HasSubstr("mpirun -n 2"));
  EXPECT_FALSE(fs::exists(path("out")));
  const Outcome json = lockstep({"run", path("good.toml"), "--dry-run", "--json"});
  EXPECT_EQ(json.exit_code, 0) << json.errors;
  for (const char* part : {"\"name\": \"good\"", "\"ranks\": 2", "\"limit\": 1e-11"}) {
    EXPECT_THAT(json.output, HasSubstr(part));
  }
  expect_refused(lockstep({"run", path("good.toml"), "--dry-run", "--set", "run.a.policy=nope"}),
                 2,
                 {"--set run.a.policy=nope"});
  expect_refused(lockstep({"run", path("good.toml"), "--dry-run", "--set", "model.preset=nope"}),
                 2,
                 {"nope", "tiny"});
  expect_refused(
      lockstep({"run", path("good.toml"), "--dry-run", "--set", "compare.0.right=golden:nope/f64"}),
      4,
      {"nope"});
  expect_refused(lockstep({"run", path("good.toml"), "--tag", "absent"}), 2, {"--tag"});
}

TEST_F(Program, RunWritesAReportAndItsExitCodeIsTheVerdict) {
  write("small.toml", R"(
name = "small"
[model]
preset = "tiny"
[data]
documents = [12, 3]
[run.a]
policy = "float64"
[run.b]
policy = "float32"
[[compare]]
left = "b"
right = "a"
limit = 1e-3
)");
  const Outcome pass = lockstep({"run", path("small.toml"), "--out", path("result"), "--json"});
  EXPECT_EQ(pass.exit_code, 0) << pass.errors;
  EXPECT_THAT(pass.output, HasSubstr("\"exit_code\": 0"));
  for (const char* file : {"report.json",
                           "report.html",
                           "junit.xml",
                           "summary.md",
                           "runs/small/a/run.json",
                           "runs/small/b/rank0.safetensors"}) {
    EXPECT_TRUE(fs::exists(folder_ / "result" / file)) << file;
  }
  EXPECT_EQ(lockstep({"report", path("result")}).exit_code, 0);
  EXPECT_EQ(lockstep({"report", path("nowhere")}).exit_code, 2);
  const Outcome differ = lockstep(
      {"run", path("small.toml"), "--out", path("result"), "--set", "compare.0.limit=1e-12"});
  EXPECT_EQ(differ.exit_code, 1);
  EXPECT_THAT(differ.errors + differ.output, HasSubstr("logits"));
}

TEST_F(Program, TheInferenceEngineWritesWhatTheTrainerWrites) {
  ASSERT_EQ(logits({"--policy", "float64"}).exit_code, 0);
  fs::rename(path("out.safetensors"), path("want.safetensors"));
  const Outcome outcome = logits({"--policy",
                                  "float64",
                                  "--engine",
                                  "inference",
                                  "--prefill-chunk",
                                  "3",
                                  "--decode",
                                  "2",
                                  "--page-size",
                                  "1"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.errors;
  const Outcome compared =
      lockstep({"compare", path("out.safetensors"), path("want.safetensors"), "--limit", "1e-10"});
  EXPECT_EQ(compared.exit_code, 0) << compared.output << compared.errors;
}

TEST_F(Program, EveryPointOfASweepOverInferenceKeysIsComputed) {
  write("sweep.toml", R"(
name = "sweep"
[model]
preset = "tiny"
[data]
documents = [12, 3]
[run.a]
policy = "float64"
[run.b]
engine = "inference"
policy = "float64"
[[compare]]
left = "b"
right = "a"
limit = 1e-10
[sweep]
"run.b.decode" = [0, 5]
"run.b.prefill_chunk" = [0, 4]
"run.b.page_size" = [0, 3]
)");
  const Outcome outcome = lockstep({"run", path("sweep.toml"), "--out", path("result")});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output << outcome.errors;
  int64_t runs = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder_ / "result" / "runs"))
    runs += entry.path().filename() == "run.json" ? 1 : 0;
  EXPECT_EQ(runs, 1 + 8);
}

TEST_F(Program, ADryRunRefusesWhatTheRunRefuses) {
  const auto scenario = [&](const std::string& more) {
    write("s.toml", "[model]\npreset = \"tiny\"\n" + more);
    std::vector<Outcome> both;
    both.push_back(lockstep({"run", path("s.toml"), "--dry-run"}));
    both.push_back(lockstep({"run", path("s.toml"), "--out", path("report")}));
    return both;
  };
  const auto refused = [&](const std::string& more, const std::vector<std::string>& parts) {
    for (const Outcome& outcome : scenario(more)) expect_refused(outcome, 2, parts);
  };
  const std::string data = "[data]\ndocuments = [20, 3]\n";
  refused(data + "[run.a]\ntopology = { cp = 1 }\ncp_cuts = [0, 30]\n",
          {"s.toml:5", "cp_cuts = [0, 30]", "23 tokens", "give cp + 1 rows"});
  refused("[data]\ndocuments = [9223372036854775807, 9223372036854775807]\n[run.a]\n",
          {"s.toml:4", "data.documents", "9223372036854775807", "fewer or shorter documents"});
  refused(data + "[run.a]\n[sweep]\n\"sweep.x\" = [1, 2]\n",
          {"s.toml:7", "sweep.x", "name a key of another table"});
  refused("overrides = { vocab_size = 2000000000 }\n" + data + "[run.a]\n",
          {"s.toml:1", "vocab_size = 2000000000", "GiB", "use smaller sizes"});
}

TEST_F(Program, AbsurdNumbersAreTheUsersMistake) {
  for (const char* option : {"--page-size", "--prefill-chunk", "--decode"})
    expect_refused(
        logits({"--engine", "inference", option, "999999999999"}), 2, {"999999999999", "16777216"});
  const std::string many = "100000000000000000";
  expect_refused(lockstep({"bench", "--tokens", many}), 2, {many, "16777216"});
  expect_refused(lockstep({"bench", "--scaling", "--tokens", many}), 2, {many, "16777216"});
  expect_refused(lockstep({"bench", "--scaling", "--total-tokens", many}), 2, {many, "16777216"});
  expect_refused(lockstep({"bench", "--scaling", "--ranks", "0"}), 2, {"--ranks", "1 to 1048576"});
  const std::vector<std::string> plan = {"plan", "--config", "tiny", "--documents"};
  const auto planned = [&](std::vector<std::string> more) {
    more.insert(more.begin(), plan.begin(), plan.end());
    return lockstep(more);
  };
  expect_refused(planned({many + "," + many}), 2, {many, "shorter documents"});
  expect_refused(planned({"10", "--ranks-per-host", "9223372036854775807"}), 2, {"1048576"});
  for (const char* option : {"--tflops", "--link", "--network"}) {
    for (const char* value : {"nan", "inf", "0", "-1"})
      expect_refused(planned({"10", option, value}), 2, {option, value, "above 0"});
  }
}

TEST_F(Program, ALauncherThatCannotStartGetsABlock) {
  const std::string program = (fs::path(LOCKSTEP_BINARY_DIR) / "lockstep").string();
  const Outcome outcome = run_command({
      "env",
      "-i",
      program,
      "logits",
      "--model",
      kModel,
      "--docs",
      path("docs.json"),
      "--out",
      path("out.safetensors"),
      "--topology",
      "cp=2",
      "--json",
  });
  if (outcome.exit_code == 0) GTEST_SKIP() << "mpirun works without PATH here";
  expect_refused(outcome, 2, {"lockstep logits: config error", "PATH is not set"});
  EXPECT_THAT(outcome.output, HasSubstr("\"exit_code\": 2"));
}

TEST_F(Program, FilesAndSwitchesThatMislead) {
  for (const char* name : {"out.h5", "out.npz", "out"})
    expect_refused(
        lockstep({"logits", "--model", kModel, "--docs", path("docs.json"), "--out", path(name)}),
        2,
        {name, ".safetensors"});
  expect_refused(lockstep({"dump",
                           "--model",
                           kModel,
                           "--docs",
                           path("docs.json"),
                           "--modules",
                           "*",
                           "--out",
                           path("out.npz")}),
                 2,
                 {"out.npz", ".h5", ".safetensors"});
  write("far.json", R"({"documents": [[1, 2], [3, 99999]]})");
  expect_refused(logits({}, "far.json"), 2, {"far.json", "document 1, position 1", "99999"});
  expect_refused(
      logits({"--numerics", "D09=1", "--numerics", "D09=2"}), 2, {"D09", "give each switch once"});
  write("map.toml", "\"a\" = 3\n");
  const Outcome map = lockstep({"compare",
                                kModel + "/model.safetensors",
                                kModel + "/model.safetensors",
                                "--module-map",
                                path("map.toml")});
  expect_refused(map, 2, {"module map", "map.toml:1"});
  EXPECT_THAT(map.errors, Not(HasSubstr("scenario")));
}

}  // namespace
}  // namespace lockstep::harness
