#include "harness/cli/command_line.hpp"

#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>

#include "harness/cli/commands.hpp"
#include "harness/cli/errors.hpp"
#include "harness/cli/version.hpp"
#include "harness/launch/available.hpp"
#include "harness/launch/mpi_start.hpp"
#include "harness/launch/rank_guard.hpp"
#include "harness/launch/schema.hpp"
#include "harness/runner/file_compare.hpp"

namespace lockstep::harness {
namespace {

/// The parser, and what the chosen command will do. Option structs live here, since CLI11 writes
/// into them while parsing.
struct Program {
  CLI::App app{"Lockstep: a distributed numerics testbed for GLM-5.3 Flash (glm5_next)",
               "lockstep"};
  Context context;
  std::string command;
  bool distributed = false;  ///< every rank of an mpirun takes part
  std::function<int()> action;

  RunOptions run;
  AttributeOptions attribute;
  LogitsOptions logits, dump;
  InspectOptions inspect;
  CompareOptions compare;
  ConvertOptions convert, export_to;
  GoldenOptions golden;
  BenchOptions bench;
  ListOptions list;
  PlanOptions plan;
  ReportOptions report;
  DoctorOptions doctor;
  WorkerOptions worker;
  StepWorkerOptions step_worker;
  std::string comm;
  int64_t hang_rank = 0;

  CLI::App* add(CLI::App& parent,
                const std::string& name,
                const std::string& about,
                const std::string& examples,
                bool all_ranks,
                std::function<int()> act) {
    CLI::App* sub = parent.add_subcommand(name, about);
    const std::string full = &parent == &app ? name : parent.get_name() + " " + name;
    common(*sub);
    if (all_ranks) ranks(*sub);
    if (!examples.empty()) sub->footer("\nExamples:\n" + examples);
    sub->callback([this, full, all_ranks, act = std::move(act)] {
      command = full;
      distributed = all_ranks;
      action = act;
    });
    return sub;
  }

  /// Kept in the environment, so that ranks which this program starts have them too.
  void ranks(CLI::App& sub) {
    sub.add_option("--comm",
                   comm,
                   "What carries tensors between ranks: mpi, or nccl (through a GPU of each rank)")
        ->check(CLI::IsMember({"mpi", "nccl"}))
        ->each([](const std::string& name) { setenv("LOCKSTEP_COMM", name.c_str(), 1); });
    sub.add_option("--hang-rank", hang_rank, "This rank waits for a debugger before it starts")
        ->check(CLI::NonNegativeNumber)
        ->each([](const std::string& rank) { setenv("LOCKSTEP_HANG_RANK", rank.c_str(), 1); });
  }

  void common(CLI::App& sub) {
    sub.add_flag("-q,--quiet", context.quiet, "No progress and no tables: only results and errors");
    sub.add_flag("--json", context.json, "Result as JSON on standard output");
    sub.set_version_flag("--version", version_text);
    sub.set_help_flag("-h,--help", "This text");
  }
};

const std::string kDefaultsHelp =
    "What a missing layer_types, swiglu_limit or index_kpool means: refuse, hf or trainer";

/// "rel_l2 is norm(left - right) / norm(right); ..." of the metrics that files can be compared by.
std::string metrics_text() {
  std::string text;
  for (const std::string& name : file_metrics()) {
    const MetricInfo& metric = *find_metric(name);
    text += fmt::format("{}{}: {}{}",
                        text.empty() ? "" : "; ",
                        name,
                        metric.doc,
                        metric.at_least ? " (the limit is the least that passes)" : "");
  }
  return text + ". Tensors named like logits also show kl and top1.";
}

const std::string kTimeoutHelp = "Deadline of every wait for another rank";
/// For the time and rates of a plan: CLI::PositiveNumber takes nan and inf.
const CLI::Validator kRate(
    [](std::string& text) {
      char* end = nullptr;
      const double value = std::strtod(text.c_str(), &end);
      return *end == '\0' && value > 0 && value <= 1e12
                 ? std::string()
                 : text + " is not a number above 0, at most 1e12";
    },
    "");
const CLI::Range kTokenCount(int64_t{1}, kMostTokens), kRankCount(int64_t{1}, int64_t{1} << 20);
constexpr int64_t kLongestTimeout = int64_t{366} * 24 * 3600 * 1000;

void add_engine_options(CLI::App& sub, LogitsOptions& o) {
  sub.add_option("--model", o.model, "Checkpoint folder in Hugging Face format")->required();
  sub.add_option("--docs", o.docs, "Documents: {\"documents\": [[ids], [ids]]}")->required();
  sub.add_option("--engine", o.engine, "trainer or inference")->capture_default_str();
  sub.add_option("--prefill-chunk", o.prefill_chunk, "Inference: tokens per prefill step");
  sub.add_option("--decode", o.decode, "Inference: last N tokens through decode steps");
  sub.add_option("--page-size", o.page_size, "Inference: tokens per latent page");
  sub.add_option("--policy", o.policy, "Numerics policy; see `lockstep list policies`")
      ->capture_default_str();
  sub.add_option(
      "--numerics", o.numerics, "Switch that differs from the policy: D09=1 (repeatable)");
  sub.add_option("--topology", o.topology, "Ranks per axis: cp=2 (starts mpirun when outside one)");
  sub.add_option("--device", o.device, "cpu or cuda")->capture_default_str();
  sub.add_flag("--grads", o.grads, "Also the gradient of the loss for every parameter");
  sub.add_flag("--recompute", o.recompute, "Recompute each layer in backward; less memory");
  sub.add_flag(
      "--reference-ops", o.reference_ops, "Plain reference operators instead of fast ones");
  sub.add_option("--defaults", o.defaults, kDefaultsHelp)->capture_default_str();
  sub.add_option("--comm-timeout-ms", o.comm_timeout_ms, kTimeoutHelp)
      ->capture_default_str()
      ->check(CLI::Range(int64_t{1}, kLongestTimeout));
}

void add_run_commands(Program& p) {
  CLI::App* run = p.add(p.app,
                        "run",
                        "Run scenario files and write a report",
                        "  lockstep run scenarios/cp_equivalence.toml\n"
                        "  lockstep run scenarios --tag cpu --out out/nightly\n"
                        "  lockstep run scenarios/demo.toml --set run.*.policy=float64 --dry-run\n",
                        true,
                        [&p] { return run_command_run(p.run, p.context); });
  run->add_option("paths", p.run.paths, "Scenario files, or folders of them")->required();
  run->add_option("--tag", p.run.tags, "Only scenarios with this tag (repeatable: any of them)");
  run->add_option("--out", p.run.out, "Folder for report and results")->capture_default_str();
  run->add_option("--set",
                  p.run.sets,
                  "key=value put into every scenario, run.*.KEY for all runs (repeatable)");
  run->add_option("--comm-timeout-ms",
                  p.run.comm_timeout_ms,
                  kTimeoutHelp + ", in all scenarios; default: theirs (300000)")
      ->check(CLI::Range(int64_t{1}, kLongestTimeout));
  run->add_flag("--dry-run", p.run.dry_run, "Check everything and print the plan; compute nothing");

  CLI::App* logits = p.add(
      p.app,
      "logits",
      "Logits, log-probabilities, loss and gradients of a checkpoint for given documents",
      "  lockstep logits --model ckpt --docs docs.json --out out.safetensors\n"
      "  lockstep logits --model ckpt --docs docs.json --out ref.safetensors --policy float64 "
      "--grads\n"
      "  lockstep logits --model ckpt --docs docs.json --out cp2.safetensors --topology cp=2\n",
      true,
      [&p] { return run_command_logits(p.logits, p.context); });
  add_engine_options(*logits, p.logits);
  logits->add_option("--out", p.logits.out, "File to write (.safetensors)")->required();
  logits->add_flag("--stream-layers",
                   p.logits.stream_layers,
                   "Weights stay on disk and are mapped layer by layer; no gradients");

  CLI::App* dump =
      p.add(p.app,
            "dump",
            "Named activations (and gradients) of a checkpoint, to compare with anyone's",
            "  lockstep dump --model ckpt --docs docs.json --modules 'layers.*' --out acts.h5\n"
            "  lockstep dump --model ckpt --docs docs.json --modules "
            "'layers.0.*,layers.3.self_attn' --grads --out acts.safetensors\n",
            true,
            [&p] { return run_command_dump(p.dump, p.context); });
  add_engine_options(*dump, p.dump);
  dump->add_option("--modules",
                   p.dump.modules,
                   "Pattern of module names: * any characters, ? one, commas between alternatives")
      ->required();
  dump->add_option("--out", p.dump.out, "File to write (.h5 or .safetensors)")->required();

  CLI::App* worker =
      p.add(p.app, "worker", "Ranks of one run (started by `lockstep run`)", "", true, [&p] {
        return run_command_worker(p.worker, p.context);
      });
  worker->group("");
  worker->add_option("--scenario", p.worker.scenario)->required();
  worker->add_option("--set", p.worker.sets);
  worker->add_option("--point", p.worker.point);
  worker->add_option("--comm-timeout-ms", p.worker.comm_timeout_ms);
  worker->add_option("--run", p.worker.run)->required();
  worker->add_option("--out", p.worker.out)->required();
  worker->add_option("--replay", p.worker.replay);
}

void add_attribute_command(Program& p) {
  CLI::App* sub = p.add(
      p.app,
      "attribute",
      "Which numerics switch makes how much of the distance between two runs",
      "  lockstep attribute scenarios/trainer_vs_serving_bf16.toml\n"
      "  lockstep attribute scenarios/demo.toml --from fsdp-bf16 --to vllm-bf16 --seeds 10\n"
      "  lockstep attribute scenarios/router_replay.toml --from serving --to trainer-replay\n"
      "  lockstep attribute scenarios/demo.toml --dump theirs.safetensors\n\n"
      "Each switch in which the two sides differ is changed alone, left out alone, and added in "
      "the order of cost. The first seed has the scenario's tokens; later ones have random tokens "
      "in documents of the same lengths, and other weights where those come from a seed.\n"
      "With --dump there is one side, and the numerics of the other are unknown: the switches "
      "are searched for that come nearest to the dump's `logprobs`.\n",
      true,
      [&p] { return run_command_attribute(p.attribute, p.context); });
  AttributeOptions& o = p.attribute;
  sub->add_option("scenario", o.scenario, "Scenario file; of a sweep the first point")->required();
  sub->add_option("--from",
                  o.from,
                  "Run of the scenario, or policy, whose switches are the start; default: the "
                  "trainer of its first comparison");
  CLI::Option* to =
      sub->add_option("--to", o.to, "Run or policy to explain; default: the other side of it");
  sub->add_option("--dump",
                  o.dump,
                  "File with `logprobs` [tokens] of another program on the scenario's documents "
                  "(safetensors, HDF5, npz)")
      ->excludes(to);
  sub->add_option("--seeds", o.seeds, "Seeds to measure over")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{1}, int64_t{1000}));
  sub->add_option("--most", o.most, "With --dump: switches to find at most")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{1}, int64_t{72}));
  sub->add_option("--set", o.sets, "key=value put into the scenario, run.*.KEY for all runs")
      ->allow_extra_args(false);
  sub->add_option("--out", o.out, "Folder for the report")->capture_default_str();
  sub->add_option("--comm-timeout-ms", o.comm_timeout_ms, kTimeoutHelp)
      ->capture_default_str()
      ->check(CLI::Range(int64_t{1}, kLongestTimeout));
}

void add_file_commands(Program& p) {
  CLI::App* inspect =
      p.add(p.app,
            "inspect",
            "Tensors and resolved configuration of a checkpoint, from headers alone",
            "  lockstep inspect ckpt\n  lockstep inspect ckpt --json\n",
            false,
            [&p] { return run_command_inspect(p.inspect, p.context); });
  inspect->add_option("folder", p.inspect.folder, "Checkpoint folder")->required();
  inspect->add_option("--defaults", p.inspect.defaults, kDefaultsHelp)->capture_default_str();

  CLI::App* compare = p.add(
      p.app,
      "compare",
      "Compare tensors of two files by name (safetensors, HDF5, npz, JSON of a completion server)",
      "  lockstep compare mine.safetensors theirs.npz\n"
      "  lockstep compare mine.h5 theirs.h5 --module-map names.toml --limit 1e-5\n"
      "  lockstep compare bf16.h5 f64.h5 --floor other-bf16.h5\n"
      "  lockstep compare mixed.h5 f64.h5 --metric ulp_max --limit bfloat16=4 --limit "
      "float32=64\n"
      "  lockstep compare mine.safetensors http://localhost:8000/v1/completions --docs docs.json "
      "--only logprobs --metric mismatch_kl --limit 1e-3\n\n"
      "Values are compared in float64, whatever the dtypes; max ulp counts steps of the coarser "
      "dtype, after rounding to it.\n"
      "Tensors are listed in model order: embedding, layers by number with their operators as "
      "computed, final norm, head, logits, log-probabilities, loss, then gradients in backward "
      "order; other names last. The first one over its limit in that order is where two runs part; "
      "it is named beside the worst one.\n"
      "Metrics: " +
          metrics_text() +
          "\nA module map is a TOML table from names on the left to names on the right; each * is "
          "put "
          "into the next {}:\n"
          "  \"model.layers.*.self_attn.o_proj\" = \"layers.{}.mixer.out\"\n",
      false,
      [&p] { return run_command_compare(p.compare, p.context); });
  compare->add_option("left", p.compare.left, "File to judge, or address of a completion server")
      ->required();
  compare->add_option("right", p.compare.right, "File held to be true, or such an address")
      ->required();
  compare->add_option(
      "--docs", p.compare.docs, "Documents to ask a server about: {\"documents\": [[ids], [ids]]}");
  compare->add_option("--served-model",
                      p.compare.served_model,
                      "Model to ask a server for; default: the first that it lists");
  compare->add_option("--module-map", p.compare.module_map, "TOML table of name patterns");
  compare
      ->add_option("--only",
                   p.compare.only,
                   "Patterns of left names to compare, with commas between (repeatable)")
      ->delimiter(',');
  compare->add_option("--floor",
                      p.compare.floor,
                      "A third file whose distance to the right one is the noise floor");
  compare
      ->add_option("--metric",
                   p.compare.metric,
                   fmt::format("Metric that --limit judges: {}", fmt::join(file_metrics(), ", ")))
      ->capture_default_str();
  compare->add_option(
      "--limit",
      p.compare.limits,
      "Pass bound; exit 1 beyond it. A number for every tensor, or DTYPE=number for "
      "pairs whose coarser dtype it is (repeatable). Default: dtype and bytes equal");

  CLI::App* convert =
      p.add(p.app,
            "convert",
            "Convert a checkpoint between Hugging Face and internal names, lossless",
            "  lockstep convert --from ckpt --to internal --format internal\n"
            "  lockstep convert --from internal --to back --format hf\n",
            false,
            [&p] { return run_command_convert(p.convert, p.context); });
  convert->add_option("--from", p.convert.from, "Checkpoint folder")->required();
  convert->add_option("--to", p.convert.to, "Folder to write; must not hold a checkpoint")
      ->required();
  convert->add_option("--format", p.convert.format, "hf or internal")->required();
  convert->add_option("--defaults", p.convert.defaults, kDefaultsHelp)->capture_default_str();

  CLI::App* exporter = p.add(p.app,
                             "export",
                             "Write a folder that transformers and inference engines open",
                             "  lockstep export --from ckpt --to release\n",
                             false,
                             [&p] { return run_command_export(p.export_to, p.context); });
  exporter->add_option("--from", p.export_to.from, "Checkpoint folder, either format")->required();
  exporter->add_option("--to", p.export_to.to, "Folder to write; must not hold a checkpoint")
      ->required();
  exporter->add_option("--defaults", p.export_to.defaults, kDefaultsHelp)->capture_default_str();
}

void add_golden_commands(Program& p) {
  CLI::App* golden =
      p.app.add_subcommand("golden", "Stored reference tensors: list, verify, make, diff");
  p.common(*golden);
  golden->require_subcommand(1);
  const std::string data_help =
      "Folder with MANIFEST.json; default: golden/data of the source tree";
  CLI::App* list = p.add(*golden, "list", "Stored cases", "  lockstep golden list\n", false, [&p] {
    return run_command_golden_list(p.golden, p.context);
  });
  list->add_option("--data", p.golden.data, data_help);

  CLI::App* verify =
      p.add(*golden,
            "verify",
            "Check hashes, then run stored cases and hold them against their limits",
            "  lockstep golden verify\n  lockstep golden verify tiny packing --policy "
            "float32\n  lockstep golden verify --hashes-only\n"
            "  lockstep golden verify tiny packing --fresh-seed 101,202\n",
            false,
            [&p] { return run_command_golden_verify(p.golden, p.context); });
  verify->add_option("cases", p.golden.cases, "Cases; default: all");
  verify
      ->add_option("--policy",
                   p.golden.policies,
                   "Policies with commas between, POLICY/replay with the experts of a float64 run; "
                   "default: float64,float32,hf-bf16,hf-bf16/replay")
      ->delimiter(',');
  verify->add_option("--device", p.golden.device, "cpu or cuda")->capture_default_str();
  CLI::Option* hashes =
      verify->add_flag("--hashes-only", p.golden.hashes_only, "Only the hashes of the manifest");
  CLI::Option* folder = verify->add_option("--data", p.golden.data, data_help);
  verify
      ->add_option("--fresh-seed",
                   p.golden.fresh_seeds,
                   "Not the stored cases: make them anew from these seeds, with commas between, in "
                   "the cache folder (needs scripts/setup --golden)")
      ->delimiter(',')
      ->excludes(hashes)
      ->excludes(folder)
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 31));

  CLI::App* make =
      p.add(*golden,
            "make",
            "Make the stored cases again with transformers (needs scripts/setup --golden)",
            "  lockstep golden make tiny --data out/golden\n",
            false,
            [&p] { return run_command_golden_make(p.golden, p.context); });
  make->add_option("cases", p.golden.cases, "Cases; default: all");
  make->add_option("--data", p.golden.data, "Folder to write")->required();
  make->add_option("--seed",
                   p.golden.seed,
                   "First seed to try; later ones follow while a top-k choice is nearly tied "
                   "[the stored cases start at 1]");

  CLI::App* diff = p.add(*golden,
                         "diff",
                         "Compare two golden folders tensor by tensor",
                         "  lockstep golden diff out/golden --data golden/data\n",
                         false,
                         [&p] { return run_command_golden_diff(p.golden, p.context); });
  diff->add_option("other", p.golden.other, "Folder with MANIFEST.json")->required();
  diff->add_option("cases", p.golden.cases, "Cases; default: all");
  diff->add_option("--data", p.golden.data, data_help);
}

void add_plan_command(Program& p) {
  CLI::App* plan =
      p.add(p.app,
            "plan",
            "A training step on paper: ranks and their groups, tokens, memory of ranks and hosts, "
            "size of "
            "a checkpoint, bytes moved on every axis and by a weight sync, time",
            "  lockstep plan scenarios/cp_equivalence.toml\n"
            "  lockstep plan --config glm-5.3-flash --topology fsdp=2,cp=8,ep=8 --documents "
            "131072,131072 --policy fsdp-fp32-islands --recompute --offload full --engine-tp 8\n\n"
            "Computes nothing and needs no mpirun. Bytes of ep are those of an even load of the "
            "experts.\n",
            false,
            [&p] { return run_command_plan(p.plan, p.context); });
  PlanOptions& o = p.plan;
  plan->add_option("paths", o.paths, "Scenario files, or folders of them");
  plan->add_option(
      "--set", o.sets, "key=value put into every scenario, run.*.KEY for all runs (repeatable)");
  CLI::Option* config = plan->add_option(
      "--config", o.config, "Instead of a scenario: a preset, or a config.json or its folder");
  plan->add_option("--topology", o.topology, "Ranks per axis: fsdp=2,cp=8,ep=8")->needs(config);
  plan->add_option("--documents", o.documents, "Tokens of each document of the batch")
      ->delimiter(',')
      ->needs(config);
  plan->add_option("--cp-cuts", o.cp_cuts, "Rows where cp cuts the row, from 0; default near-even")
      ->delimiter(',')
      ->needs(config);
  plan->add_option("--policy", o.policy, "Numerics policy; see `lockstep list policies`")
      ->capture_default_str()
      ->needs(config);
  plan->add_option(
          "--numerics", o.numerics, "Switch that differs from the policy: D61=tp (repeatable)")
      ->needs(config);
  plan->add_flag("--recompute", o.recompute, "Layers are recomputed in backward")->needs(config);
  plan->add_option("--optimizer", o.optimizer, "Optimizer: adamw, sgd or muon")
      ->capture_default_str();
  plan->add_option(
          "--offload",
          o.offload,
          "What the host keeps: none, optimizer (its state) or full (masters and gradients, "
          "too)")
      ->capture_default_str();
  CLI::Option* engine_tp =
      plan->add_option("--engine-tp",
                       o.engine_tp,
                       "Weight sync into an inference engine of this many tp ranks")
          ->check(kRankCount)
          ->needs(config);
  plan->add_option("--engine-policy", o.engine_policy, "Numerics policy of it; default: --policy")
      ->needs(engine_tp);
  plan->add_flag("--colocated", o.colocated, "It runs on the first ranks of the trainer")
      ->needs(engine_tp);
  plan->add_option("--defaults", o.defaults, kDefaultsHelp)->capture_default_str()->needs(config);
  plan->add_option("--ranks", o.ranks, "Ranks that there are; a plan that needs more is refused")
      ->check(kRankCount);
  plan->add_option("--ranks-per-host", o.ranks_per_host, "Consecutive ranks that share a host")
      ->capture_default_str()
      ->check(kRankCount);
  plan->add_option("--tflops", o.tflops, "For the time: TFLOP/s that a rank sustains")
      ->capture_default_str()
      ->check(kRate);
  plan->add_option("--link", o.link, "For the time: GB/s of a rank to others of its host, each way")
      ->capture_default_str()
      ->check(kRate);
  plan->add_option("--network", o.network, "For the time: GB/s of a rank to other hosts, each way")
      ->capture_default_str()
      ->check(kRate);
}

void add_machine_commands(Program& p) {
  CLI::App* bench =
      p.add(p.app,
            "bench",
            "Time forward and backward by operator, as a share of the matrix product rate",
            "  lockstep bench\n  lockstep bench --tokens 1024 4096 --peer\n"
            "  lockstep bench --growth\n  lockstep bench --scaling --ranks 1 2 4\n"
            "  lockstep bench --policy invariant-f32 --against float32\n",
            false,
            [&p] {
              return p.bench.scaling ? run_command_scaling(p.bench, p.context)
                                     : run_command_bench(p.bench, p.context);
            });
  bench->add_option("--tokens",
                    p.bench.tokens,
                    "Document lengths; default: 256 1024 4096; with --scaling tokens of a rank, "
                    "default 1024");
  bench->add_option("--policy", p.bench.policy, "Numerics policy")->capture_default_str();
  bench->add_option("--against",
                    p.bench.against,
                    "A second policy, timed in turns in the same run; prints the ratios");
  bench->add_option("--preset", p.bench.preset, "Model")->capture_default_str();
  bench->add_option("--device", p.bench.device, "cpu or cuda")->capture_default_str();
  bench->add_option("--repeats", p.bench.repeats, "Runs of each size; the fastest counts")
      ->capture_default_str()
      ->check(CLI::Range(1, 100));
  bench->add_flag("--growth",
                  p.bench.growth,
                  "Compare one length (default 4096) with eight times the tokens, in one document "
                  "and in eight");
  bench->add_flag("--forward-only", p.bench.forward_only, "No backward pass");
  bench->add_flag("--reference-ops", p.bench.reference_ops, "Time the plain reference operators");
  bench->add_flag("--peer",
                  p.bench.peer,
                  "Also time transformers in the same run (needs scripts/setup --golden)");

  CLI::Option* scaling = bench->add_flag(
      "--scaling",
      p.bench.scaling,
      "Training steps on more and more ranks, over fsdp, ep and cp: time, efficiency, time in "
      "calls and bytes of each axis; weak (the same tokens for each rank) and strong (the same "
      "tokens for all)");
  bench->add_option("--ranks", p.bench.ranks, "Numbers of ranks, from 1")
      ->capture_default_str()
      ->check(kRankCount)
      ->needs(scaling);
  bench
      ->add_option(
          "--total-tokens", p.bench.total_tokens, "Of strong scaling; default 4 times --tokens")
      ->check(kTokenCount)
      ->needs(scaling);
  bench->add_option("--threads", p.bench.threads, "Compute threads of a rank")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096))
      ->needs(scaling);
  for (const char* other :
       {"--growth", "--forward-only", "--reference-ops", "--peer", "--device", "--against"})
    scaling->excludes(other);

  CLI::App* step =
      p.add(p.app, "step-worker", "Ranks of one step (started by bench)", "", true, [&p] {
        return run_command_step_worker(p.step_worker, p.context);
      });
  step->group("");
  step->add_option("--topology", p.step_worker.topology)->required();
  step->add_option("--documents", p.step_worker.documents)->delimiter(',')->required();
  step->add_option("--policy", p.step_worker.policy)->required();
  step->add_option("--preset", p.step_worker.preset)->required();
  step->add_option("--repeats", p.step_worker.repeats)->required();

  CLI::App* list = p.add(p.app,
                         "list",
                         "Scenarios, policies, switches, operators, presets, the scenario schema",
                         "  lockstep list switches\n  lockstep list switches --policy hf-bf16\n"
                         "  lockstep list schema\n",
                         false,
                         [&p] { return run_command_list(p.list, p.context); });
  list->add_option(
      "what", p.list.what, "scenarios, policies, switches, operators, presets or schema");
  list->add_option("--policy", p.list.policy, "Show the values of this policy beside the switches");
  list->add_flag("--markdown", p.list.markdown, "Schema as the tables of docs/scenarios.md");

  CLI::App* report = p.add(p.app,
                           "report",
                           "Render a report again from its report.json",
                           "  lockstep report out\n",
                           false,
                           [&p] { return run_command_report(p.report, p.context); });
  report->add_option("folder", p.report.folder, "Folder with report.json")->required();

  CLI::App* doctor = p.add(p.app,
                           "doctor",
                           "What this machine has and lacks, with fixes",
                           "  lockstep doctor\n",
                           true,
                           [&p] { return run_command_doctor(p.doctor, p.context); });
  doctor->add_flag("--ping", p.doctor.ping)->group("");
}

/// An empty value is a slip (an unset shell variable), never a wish.
void refuse_empty_values(CLI::App& app) {
  const CLI::Validator not_empty(
      [](std::string& value) { return value.empty() ? "is empty" : std::string(); }, "");
  for (CLI::Option* option : app.get_options()) {
    if (option->get_expected_max() > 0 && option->get_type_size_max() > 0) option->check(not_empty);
  }
  for (CLI::App* sub : app.get_subcommands({})) refuse_empty_values(*sub);
}

/// An option that may be repeated takes one word each time where files may follow it: it would
/// swallow them.
void keep_files(CLI::App& app) {
  const std::vector<CLI::Option*> options = app.get_options();
  const bool files = std::any_of(options.begin(), options.end(), [](const CLI::Option* option) {
    return option->get_positional();
  });
  for (CLI::Option* option : options) {
    if (files && !option->get_positional()) option->allow_extra_args(false);
  }
  for (CLI::App* sub : app.get_subcommands({})) keep_files(*sub);
}

/// Reports one failure on all channels it belongs to; only one rank of a launcher talks.
int report_failure(const Failure& failure, const Program& p) {
  std::fflush(stdout);
  if (p.context.json && launcher_rank() == 0) std::cout << error_json(failure) << std::flush;
  std::fputs(error_block(failure, p.command).c_str(), stderr);
  return exit_code(failure.kind);
}

/// "run" when the words start like that, for messages about words the parser did not understand.
std::string command_of(const CLI::App& app, int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    for (const CLI::App* sub : app.get_subcommands({})) {
      if (sub->get_name() == argv[i]) return argv[i];
    }
  }
  return {};
}

}  // namespace

int run_program(int argc, char** argv) {
  // A reader that stops reading (`| head`) is not a crash: writes fail and print() says so.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // likewise over a file size limit
  Program p;
  p.context.arguments.assign(argv + 1, argv + argc);
  p.app.set_version_flag("--version", version_text);
  p.app.set_help_flag("-h,--help", "This text");
  p.app.require_subcommand(1);
  p.app.footer(
      "\nExit codes: 0 pass, 1 numerics differ, 2 bad input or configuration, 3 communication or "
      "peer failure, 4 golden missing or stale, 5 internal.\n"
      "`lockstep COMMAND --help` shows the options of a command with examples.");
  add_run_commands(p);
  add_attribute_command(p);
  add_file_commands(p);
  add_golden_commands(p);
  add_plan_command(p);
  add_machine_commands(p);
  refuse_empty_values(p.app);
  keep_files(p.app);
  try {
    p.app.parse(argc, argv);
  } catch (const CLI::Success& wanted) {  // --help or --version
    return launcher_rank() == 0 ? p.app.exit(wanted) : 0;
  } catch (const CLI::ParseError& wrong) {
    p.command = command_of(p.app, argc, argv);
    std::string message = wrong.what();
    if (p.command.empty() && argc > 1 && argv[1][0] != '-') {
      message = fmt::format("there is no command '{}'", argv[1]);
      std::vector<std::string> names;
      for (const CLI::App* sub : p.app.get_subcommands({})) {
        if (!sub->get_group().empty()) names.push_back(sub->get_name());
      }
      message += did_you_mean(argv[1], names);
    }
    if (launcher_rank() != 0) return 2;
    message += fmt::format(
        "; `lockstep{}{} --help` shows what is accepted", p.command.empty() ? "" : " ", p.command);
    for (int i = 1; i < argc; ++i) p.context.json |= std::string_view(argv[i]) == "--json";
    return report_failure({ErrorKind::kInput, "command line: " + message}, p);
  }
  if (!p.distributed && launcher_rank() != 0) return 0;
  if (p.distributed) guard_rank(p.command);
  try {
    const int code = p.action();
    std::cout.flush();
    wake_guard();
    return code;
  } catch (const std::exception& error) {
    return report_failure(explain(error), p);
  }
}

}  // namespace lockstep::harness
