// Ranks of the built program that die or stop: exit code 3, and words about who and what to do.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "tests/unit/cli_program_support.hpp"

namespace lockstep::harness {
namespace {

/// In a shell: the process of a rank under its guard, whose parent the launcher started.
constexpr const char* kGuarded =
    "$(for c in $(cat /proc/$$/task/$$/children); do "
    "[ \"$(cat /proc/$c/comm)\" = lockstep ] && echo $c; done)";

class Ranks : public Program {
 protected:
  void SetUp() override {
    Program::SetUp();
    write("long.toml", R"(
[model]
preset = "mini"
[data]
documents = [30000]
[run.a]
topology = { cp = 2 }
policy = "float64"
grads = true
)");
  }

  /// A launcher that puts a shell with this script in front of each rank; exec "$@" is the rank.
  [[nodiscard]] std::string shell_launcher(const std::string& script) const {
    write("rank", script);
    write("launcher",
          "#!/bin/bash\n"
          "options=()\n"
          "while [[ $# -gt 0 && $1 != */lockstep ]]; do options+=(\"$1\"); shift; done\n"
          "[[ $# -eq 0 ]] && exec mpirun \"${options[@]}\"\n"
          "exec mpirun \"${options[@]}\" sh " +
              path("rank") + " \"$@\"\n");
    fs::permissions(path("launcher"), fs::perms::owner_all);
    return path("launcher");
  }

  /// A launcher that puts a shell in front of each rank. That of rank 1 waits until process `pid`
  /// has computed for three seconds, so that all ranks have long met, and does `act`. exec keeps
  /// the process id, which is $$.
  [[nodiscard]] std::string launcher(const std::string& pid, const std::string& act) const {
    return shell_launcher(
        "[ \"$OMPI_COMM_WORLD_RANK\" = 1 ] && (\n"
        "  while :; do\n"
        "    sleep 0.2; p=" +
        pid +
        "\n"
        "    [ \"$(cut -d' ' -f14 /proc/$p/stat 2>/dev/null || echo 0)\" -gt 300 ] && break\n"
        "  done\n"
        "  touch " +
        path("struck") + "; " + act + ") &\nexec \"$@\"\n");
  }
  [[nodiscard]] double seconds_since_struck() const {
    return std::chrono::duration<double>(fs::file_time_type::clock::now() -
                                         fs::last_write_time(path("struck")))
        .count();
  }

  /// `lockstep run` that starts its ranks with this launcher.
  [[nodiscard]] Outcome run_with(const std::string& launcher,
                                 const std::string& timeout_ms,
                                 const std::vector<std::string>& more = {}) const {
    std::vector<std::string> words = {std::string(LOCKSTEP_BINARY_DIR) + "/lockstep",
                                      "run",
                                      path("long.toml"),
                                      "--comm-timeout-ms",
                                      timeout_ms,
                                      "--out",
                                      path("result")};
    words.insert(words.end(), more.begin(), more.end());
    return run_command(words, {"LOCKSTEP_MPIRUN=" + launcher});
  }

  /// A failure leaves a report, which carries the code too.
  void expect_code_in_report() const {
    std::ifstream file(path("result/report.json"));
    const auto report = nlohmann::json::parse(file, nullptr, false);
    ASSERT_TRUE(report.is_object());
    EXPECT_EQ(report.value("exit_code", -1), 3);
  }

  /// An mpirun of the user's own around `lockstep run`.
  [[nodiscard]] Outcome run_under(const std::string& launcher) const {
    std::vector<std::string> words = mpirun_command(2);
    words.front() = launcher;
    for (const std::string& word : {std::string(LOCKSTEP_BINARY_DIR) + "/lockstep",
                                    std::string("run"),
                                    path("long.toml"),
                                    std::string("--out"),
                                    path("result")}) {
      words.push_back(word);
    }
    return run_command(words);
  }
};

TEST_F(Ranks, AKilledRankIsACommunicationFailureThatNamesIt) {
  const Outcome outcome = run_with(launcher("$$", "kill -9 $$"), "300000");
  EXPECT_EQ(outcome.exit_code, 3) << outcome.errors << outcome.output;
  EXPECT_THAT(outcome.errors, HasSubstr("signal 9"));
  EXPECT_THAT(outcome.errors, HasSubstr("rank"));
  expect_code_in_report();
}

TEST_F(Ranks, AKilledRankOfTheUsersMpirunIsTooAndASurvivorTellsIt) {
  const std::string start = launcher(kGuarded, "kill -9 $p");
  Outcome outcome;
  // An mpirun that ends a job may be gone before it has read what the ranks it ends still write:
  // seen about once in twenty times. What the guard says comes before that, every time.
  for (int attempt = 0; attempt < 3; ++attempt) {
    outcome = run_under(start);
    ASSERT_EQ(outcome.exit_code, 3) << outcome.errors << outcome.output;
    ASSERT_THAT(outcome.errors, HasSubstr("ended by signal 9"));
    if (outcome.errors.find("is gone") != std::string::npos) break;
  }
  // Either the launcher's SIGTERM finds the survivor first, or its own look at the other process.
  EXPECT_THAT(outcome.errors, ContainsRegex("world_rank 1 \\(process [0-9]+\\) is gone"));
  EXPECT_THAT(outcome.errors,
              AnyOf(HasSubstr("world_rank 0: told to end"),
                    HasSubstr("world_rank 0: lockstep run: comm error")));
}

TEST_F(Ranks, ARankThatIsToldToEndSaysWhatItDidAndThatNobodyIsGone) {
  const Outcome outcome = run_under(launcher(kGuarded, "kill -TERM $p"));
  EXPECT_EQ(outcome.exit_code, 3) << outcome.errors << outcome.output;
  EXPECT_THAT(outcome.errors,
              ContainsRegex("world_rank 1: told to end \\(SIGTERM\\) while it (computed|waited)"));
  EXPECT_THAT(outcome.errors, HasSubstr("no other rank of this machine is gone"));
}

TEST_F(Ranks, AStoppedRankIsNamedWithTheCallWhenTheDeadlinePasses) {
  const Outcome outcome = run_with(launcher("$$", "kill -STOP $$"), "6000");
  EXPECT_EQ(outcome.exit_code, 3) << outcome.errors << outcome.output;
  EXPECT_LT(seconds_since_struck(), 6 + 10);
  EXPECT_THAT(outcome.errors, HasSubstr("got no answer in 6"));
  EXPECT_THAT(outcome.errors, HasSubstr("world_rank 1"));
  EXPECT_THAT(outcome.errors, HasSubstr("is stopped"));
  EXPECT_THAT(outcome.errors, HasSubstr("layers."));
  expect_code_in_report();
}

TEST_F(Ranks, ARankThatStopsBeforeMpiStartsEndsTheOthersToo) {
  const Outcome outcome = run_with(
      shell_launcher("[ \"$OMPI_COMM_WORLD_RANK\" = 1 ] && kill -STOP $$\nexec \"$@\"\n"), "3000");
  EXPECT_EQ(outcome.exit_code, 3) << outcome.errors << outcome.output;
  EXPECT_THAT(outcome.errors, HasSubstr("did not meet within the deadline"));
}

TEST_F(Ranks, ARankThatWaitsForADebuggerIsWaitedFor) {
  write("long.toml", R"(
[model]
preset = "tiny"
[data]
documents = [40]
[run.a]
topology = { cp = 2 }
)");
  // Longer than the deadline; again and again, since the rank may not wait yet.
  const std::string start_ranks = shell_launcher(
      "[ \"$OMPI_COMM_WORLD_RANK\" = 1 ] && (\n"
      "  sleep 4; while kill -CONT $$ 2>/dev/null; do sleep 0.5; done) &\nexec \"$@\"\n");
  const auto start = std::chrono::steady_clock::now();
  const Outcome outcome = run_with(start_ranks, "2000", {"--hang-rank", "1"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.errors << outcome.output;
  EXPECT_THAT(outcome.errors, HasSubstr("world_rank 1 on "));
  EXPECT_THAT(outcome.errors, HasSubstr("waits for a debugger: `gdb -p "));
  EXPECT_GT(std::chrono::steady_clock::now() - start, std::chrono::seconds(4));
}

TEST_F(Ranks, ARankToWaitForThatThereIsNotIsRefusedOnce) {
  write("long.toml", R"(
[model]
preset = "tiny"
[data]
documents = [40]
[run.a]
topology = { cp = 2 }
[run.b]
)");
  write("one.toml", "[model]\npreset = \"tiny\"\n[data]\ndocuments = [40]\n[run.a]\n");
  const std::string program = std::string(LOCKSTEP_BINARY_DIR) + "/lockstep";
  const auto expect_refused = [&](std::vector<std::string> words, const std::string& why) {
    for (const char* word : {"--hang-rank", "2"}) words.emplace_back(word);
    const Outcome outcome = run_command(words);
    EXPECT_EQ(outcome.exit_code, 2) << outcome.errors << outcome.output;
    EXPECT_THAT(outcome.errors, HasSubstr("--hang-rank 2: " + why));
    EXPECT_EQ(outcome.errors.find("--hang-rank"), outcome.errors.rfind("--hang-rank"))
        << outcome.errors;
  };
  const std::string none = "there is no such rank; this command runs on 2, which are 0 to 1";
  const std::vector<std::string> run = {program, "run", path("long.toml"), "--out", path("result")};
  expect_refused(run, none);
  std::vector<std::string> under = mpirun_command(2);
  under.insert(under.end(), run.begin(), run.end());
  expect_refused(under, none);
  expect_refused({program, "run", path("one.toml"), "--out", path("result")},
                 "this command runs in one process");
  expect_refused({program,
                  "logits",
                  "--model",
                  kModel,
                  "--docs",
                  path("docs.json"),
                  "--out",
                  path("out.safetensors"),
                  "--topology",
                  "cp=2"},
                 none);
}

TEST_F(Ranks, ACallThatOneRankSkipsOrMakesInAnotherOrderIsNamed) {
  // Rank 1 is given another scenario: runs in another order, or one without gradients.
  const std::string head = "[model]\npreset = \"tiny\"\n[data]\ndocuments = [40]\n",
                    a = "[run.a]\ntopology = { cp = 2 }\n",
                    b = "[run.b]\ntopology = { cp = 2 }\npolicy = \"float64\"\n";
  write("long.toml", head + a + "grads = true\n" + b);
  write("skip.toml", head + a + b);
  write("order.toml", head + b + a + "grads = true\n");
  const auto run = [&](const std::string& other) {
    std::vector<std::string> words = mpirun_command(1);
    const auto add_rank = [&](const std::string& file) {
      for (const std::string& word : {std::string(LOCKSTEP_BINARY_DIR) + "/lockstep",
                                      std::string("run"),
                                      path(file),
                                      std::string("--comm-timeout-ms"),
                                      std::string("3000"),
                                      std::string("--out"),
                                      path("result")}) {
        words.push_back(word);
      }
    };
    add_rank("long.toml");
    for (const char* word : {":", "-n", "1"}) words.emplace_back(word);
    add_rank(other);
    return run_command(words);
  };
  // The gradients' call and the next one belong to different groups: the deadline finds it.
  const Outcome skip = run("skip.toml");
  EXPECT_EQ(skip.exit_code, 3) << skip.errors << skip.output;
  // Whoever's deadline passes first tells it, and names the other's call.
  EXPECT_THAT(
      skip.errors,
      testing::AnyOf(
          testing::AllOf(
              HasSubstr("gradients of unit 4 (norm.weight ...): reduce-scatter got no answer in 3"),
              HasSubstr("waits in all-gather of logprobs")),
          testing::AllOf(HasSubstr("logprobs: all-gather got no answer in 3"),
                         HasSubstr("waits in reduce-scatter of gradients of unit 4"))));
  EXPECT_LT(skip.seconds, 3 + 10);
  const Outcome order = run("order.toml");
  EXPECT_EQ(order.exit_code, 3) << order.errors << order.output;
  EXPECT_THAT(order.errors, HasSubstr("do not make the same calls"));
  EXPECT_THAT(order.errors, HasSubstr("parameters of unit -1"));
  EXPECT_THAT(order.errors, HasSubstr("one of another size on rank"));
  EXPECT_LT(order.seconds, 3 + 10);
}

TEST_F(Ranks, BadInputUnderMpirunIsToldOnce) {
  write("long.toml", "[model]\npreset = \"none\"\n");
  const Outcome outcome = run_under("mpirun");
  EXPECT_EQ(outcome.exit_code, 2) << outcome.errors;
  size_t blocks = 0;
  for (size_t at = outcome.errors.find("lockstep run:"); at != std::string::npos;
       at = outcome.errors.find("lockstep run:", at + 1)) {
    ++blocks;
  }
  EXPECT_EQ(blocks, 1U) << outcome.errors;
}

TEST_F(Ranks, ARunThatIsToldToEndLeavesNeitherRanksNorAResult) {
  for (const char* name : {"TERM", "INT", "KILL"}) {
    SCOPED_TRACE(name);
    fs::remove_all(path("result"));
    // Both ranks note their process. What stands beside rank 1 strikes the program that waits for
    // the launcher.
    const std::string start_ranks = shell_launcher(
        "echo $$ >> " + path("ranks") +
        "\n[ \"$OMPI_COMM_WORLD_RANK\" = 1 ] && (\n"
        "  while [ \"$(cut -d' ' -f14 /proc/$$/stat 2>/dev/null || echo 0)\" -le 100 ]; do "
        "sleep 0.2; done\n"
        "  touch " +
        path("struck") + "; kill -" + name + " $(cat " + path("top") + ")) &\nexec \"$@\"\n");
    fs::remove(path("ranks"));
    // A shell stands for whoever waits for the program, and looks at once. What shells start behind
    // their back ignores SIGINT.
    const Outcome outcome = run_command(
        {"sh",
         "-c",
         "env --default-signal=INT LOCKSTEP_MPIRUN=" + start_ranks + " sh -c 'echo $$ > " +
             path("top") + "; exec " + LOCKSTEP_BINARY_DIR + "/lockstep run " + path("long.toml") +
             " --out " + path("result") + "' & wait $!; code=$?; for p in $(cat " + path("ranks") +
             "); do grep -s State /proc/$p/status | grep -v Z && echo left $p; done; exit $code"});
    EXPECT_EQ(outcome.exit_code,
              128 + (name == std::string("TERM")  ? SIGTERM
                     : name == std::string("INT") ? SIGINT
                                                  : SIGKILL))
        << outcome.errors;
    ASSERT_TRUE(fs::exists(path("struck")));
    if (name != std::string("KILL")) {
      EXPECT_THAT(outcome.output, Not(HasSubstr("left")));
    }
    // Those of a program that was killed end by themselves.
    std::ifstream file(path("ranks"));
    for (int pid = 0; file >> pid;) {
      while (fs::exists("/proc/" + std::to_string(pid))) usleep(10000);
    }
    for (const auto& entry : fs::recursive_directory_iterator(path("result"))) {
      EXPECT_FALSE(entry.is_regular_file()) << entry.path();
    }
  }
}

}  // namespace
}  // namespace lockstep::harness
