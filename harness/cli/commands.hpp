// The commands of the program: their options as plain structs, and what carries them out. Parsing
// is in command_line.cpp; nothing here knows about it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "harness/launch/scenario.hpp"

namespace lockstep::harness {

/// What every command knows.
struct Context {
  bool quiet = false;                  ///< no progress, no tables; results and errors only
  bool json = false;                   ///< the result as JSON on standard output
  std::vector<std::string> arguments;  ///< as typed, without the program name
};

struct RunOptions {
  std::vector<std::filesystem::path> paths;
  std::vector<std::string> tags, sets;
  std::filesystem::path out = "out";
  int64_t comm_timeout_ms = 0;  ///< 0: those of the scenarios
  bool dry_run = false;
};
int run_command_run(const RunOptions& options, const Context& context);

struct AttributeOptions {
  std::filesystem::path scenario, dump, out = "out";
  std::vector<std::string> sets;
  std::string from, to;  ///< runs of the scenario, or policies; empty: its first comparison
  int64_t seeds = 5;
  int64_t most = 4;  ///< switches that explain a dump
  int64_t comm_timeout_ms = 300000;
};
int run_command_attribute(const AttributeOptions& options, const Context& context);

/// Options of logits and dump, which run one engine over one checkpoint and one set of documents.
struct LogitsOptions {
  std::filesystem::path model, docs, out;
  std::string engine = "trainer", policy = "float32", topology, device = "cpu", modules;
  std::string defaults = "refuse";
  std::vector<std::string> numerics;  ///< "D09=1"
  int64_t prefill_chunk = 0, decode = 0, page_size = 0;
  int64_t comm_timeout_ms = 300000;
  bool grads = false, stream_layers = false, recompute = false, reference_ops = false;
};
int run_command_logits(const LogitsOptions& options, const Context& context);
int run_command_dump(const LogitsOptions& options, const Context& context);

struct InspectOptions {
  std::filesystem::path folder;
  std::string defaults = "refuse";
};
int run_command_inspect(const InspectOptions& options, const Context& context);

struct CompareOptions {
  std::filesystem::path left, right, module_map, floor;
  std::filesystem::path docs;  ///< what a server is asked about
  std::string served_model;
  std::vector<std::string> only;    ///< patterns of names
  std::vector<std::string> limits;  ///< "1e-5" for all tensors, "bfloat16=4" for one dtype
  std::string metric = "rel_l2";
};
int run_command_compare(const CompareOptions& options, const Context& context);

struct ConvertOptions {
  std::filesystem::path from, to;
  std::string format, defaults = "refuse", dtype;
};
int run_command_convert(const ConvertOptions& options, const Context& context);
int run_command_export(const ConvertOptions& options, const Context& context);

struct GoldenOptions {
  std::vector<std::string> cases;
  std::filesystem::path data, other;
  std::vector<std::string> policies;
  std::string device = "cpu";
  std::vector<int64_t> fresh_seeds;  ///< verify: not the stored cases but new ones from these
  std::optional<int64_t> seed;       ///< make: the first seed to try
  bool hashes_only = false;
};
int run_command_golden_list(const GoldenOptions& options, const Context& context);
int run_command_golden_verify(const GoldenOptions& options, const Context& context);
int run_command_golden_make(const GoldenOptions& options, const Context& context);
int run_command_golden_diff(const GoldenOptions& options, const Context& context);

struct BenchOptions {
  std::vector<int64_t> tokens;
  std::string policy = "float32", against, device = "cpu", preset = "mini";
  int repeats = 3;
  bool forward_only = false, peer = false, reference_ops = false, growth = false;
  bool scaling = false;
  std::vector<int64_t> ranks = {1, 2, 4, 8};
  int64_t total_tokens = 0;  ///< of strong scaling; 0: four times those of a rank in weak scaling
  int threads = 1;
};
int run_command_bench(const BenchOptions& options, const Context& context);
int run_command_scaling(const BenchOptions& options, const Context& context);

/// Hidden: the ranks of one step, started by `bench --scaling`.
struct StepWorkerOptions {
  std::string topology, policy, preset;
  std::vector<int64_t> documents;
  int repeats = 1;
};
int run_command_step_worker(const StepWorkerOptions& options, const Context& context);

struct ListOptions {
  std::string what;  ///< scenarios, policies, switches, operators, presets, schema; empty: summary
  std::string policy;
  bool markdown = false;
};
int run_command_list(const ListOptions& options, const Context& context);

/// Scenario files, or one model with a topology.
struct PlanOptions {
  std::vector<std::filesystem::path> paths;
  std::vector<std::string> sets;
  std::string config, topology, policy = "float32", optimizer = "adamw", defaults = "refuse",
                                 offload = "none", engine_policy;
  std::vector<std::string> numerics;        ///< "D61=tp"
  std::vector<int64_t> documents, cp_cuts;  ///< lengths; rows
  int64_t ranks = 0;                        ///< that there are; 0: as many as needed
  bool recompute = false;
  int64_t engine_tp = 0;  ///< of an engine that gets the weights; 0: none
  bool colocated = false;
  // As in StepPlanInput.
  int64_t ranks_per_host = 8;
  double tflops = 400, link = 300, network = 50;
};
int run_command_plan(const PlanOptions& options, const Context& context);

struct ReportOptions {
  std::filesystem::path folder;
};
int run_command_report(const ReportOptions& options, const Context& context);

struct DoctorOptions {
  bool ping = false;  ///< hidden: what doctor starts under mpirun to see whether it works
};
int run_command_doctor(const DoctorOptions& options, const Context& context);

/// Hidden: the ranks of one run of one scenario, started by `run`.
struct WorkerOptions {
  std::filesystem::path scenario, out;
  std::filesystem::path replay;  ///< folder of the run whose experts are taken; empty: own choice
  std::vector<std::string> sets;
  int64_t point = 0;
  int64_t comm_timeout_ms = 300000;  ///< until the scenario is read
  std::string run;
};
int run_command_worker(const WorkerOptions& options, const Context& context);

/// "refuse", "hf" or "trainer"; throws kInput otherwise.
model::ConfigDefaults parse_defaults(std::string_view word);

/// Writes to standard output; throws kInput when it cannot be written (a closed pipe or full disk).
void print(std::string_view text);

}  // namespace lockstep::harness
