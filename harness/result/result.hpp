// What a run of Lockstep found, as plain values: everything the reports show is in here, and
// report.json holds all of it. Writers render these structs; they compute nothing of their own.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/base/error.hpp"

namespace lockstep::harness {

/// Version of report.json. Raised when a field changes its meaning; new fields do not raise it.
inline constexpr int kReportVersion = 1;

/// kRecorded: measured, without a limit to judge it by. kSkipped always has a reason.
enum class Status : uint8_t { kPass, kFail, kSkipped, kError, kRecorded };

/// Where a scenario ended. kRecord means that it went all the way.
enum class Phase : uint8_t { kLoad, kSetup, kRun, kCompare, kRecord };

/// Which side of the limit is good.
enum class Bound : uint8_t { kAtMost, kAtLeast };

/// What a chart is about; fixes its place in the report and how it is drawn.
enum class ChartKind : uint8_t { kLayer, kToken, kSweep, kTiming, kHistogram, kOther };

struct Attribute {
  std::string name, value;
};

/// A number beside a run that is nobody's pass or fail: loss, mean logprob, tokens per second.
struct Measure {
  std::string name;
  double value = 0;
  std::string unit;
};

/// What the numbers were computed with. Holds no host name, user or path. Empty strings are parts
/// that this machine or build does not have.
struct Environment {
  std::string lockstep_version, git_commit, compiler, march, build_type, os, cpu_model;
  int64_t cores = 0;    ///< logical cores of the machine
  int64_t threads = 0;  ///< compute threads of each rank
  std::string torch, mpi, hdf5, blas, cuda, nccl;
  std::vector<std::string> devices;  ///< GPU names, one per device
  std::vector<Attribute> extra;      ///< anything else worth keeping: driver, environment variables
};

/// A numerics switch of a run that differs from the run's policy or from the other side.
struct NumericsDifference {
  std::string id, name, value, baseline;  ///< "D09", "hc_mix_roundings", "1", "2"
};

struct RunRecord {
  std::string name, engine, policy;
  std::vector<NumericsDifference> numerics;
  std::string topology;  ///< "cp=2 ep=2"; "1 rank" for a single one
  int64_t ranks = 1;
  std::string device;                 ///< "cpu", "cuda"
  std::string checkpoint;             ///< preset, folder name or golden case the weights came from
  std::vector<Attribute> provenance;  ///< hash, seed, generator, versions of checkpoint or golden
  double seconds = 0;
  int64_t tokens = 0;
  int64_t peak_bytes = 0;  ///< largest over ranks; 0: not measured
  std::vector<Measure> measures;
  Status status = Status::kPass;
  std::string reason;  ///< for kSkipped and kError
};

struct Point {
  double x = 0, y = 0;
};

/// One line of a chart. Series of one scenario with the same kind and `chart` share a chart.
struct Series {
  ChartKind kind = ChartKind::kOther;
  std::string chart;  ///< title of the chart: "relative L2 error of activations"
  std::string name;   ///< legend entry: "cp2 against cp1"
  std::string x_label, y_label, unit;
  bool log_x = false, log_y = true;
  std::vector<Point> points;
  std::vector<std::string> x_names;  ///< empty, or one per point: "layers.2 KDA"
  std::vector<double> noise_floor;   ///< empty: none; one: a level; else one per point
  std::optional<double> limit;       ///< drawn as a line when given
};

/// Value seen by one rank. `place` is its coordinate, such as "fsdp 0, cp 1".
struct RankValue {
  int64_t world_rank = 0;
  std::string place;
  double value = 0;
  std::string note;
};

/// A row below a comparison: one gradient, one layer, one more metric of the same pair.
struct Detail {
  std::string name, metric;
  double value = 0;
  std::optional<double> limit, noise_floor;
  std::string unit;
  Status status = Status::kRecorded;
  std::string note;
};

struct Comparison {
  std::string left, right;  ///< run names or golden references
  std::string what;         ///< "logits", "grads", "layers.2.kda.state"
  std::string metric;       ///< "ulp_max", "rel_l2", "kl"
  double value = 0;
  std::optional<double> limit, noise_floor;
  Bound bound = Bound::kAtMost;
  std::string unit;
  Status status = Status::kRecorded;
  std::string reason;                   ///< why it failed, was skipped or could not be computed
  std::optional<ErrorKind> error_kind;  ///< for kError
  /// First tensor over its limit in model order (gradients: backward order), or without a limit the
  /// first that differs; then coordinate, both values, distance. For logits and logprobs the first
  /// element, also of a comparison that passes. Empty: none seen.
  std::string first_divergence;
  std::string worst;            ///< worst tensor of grads and trace with its value; empty: none
  std::optional<int64_t> rank;  ///< world rank of the worst value
  std::vector<RankValue> ranks;
  std::vector<Detail> details;

  /// How far along the way to the limit: value / limit. For kAtLeast the distances from 1 count
  /// where the limit is at most 1 (cosine, agreement, shares), else limit / value. Above 1 is a
  /// failure, 0 / 0 is 0, anything over 0 is infinity, NaN without a limit or with a NaN value.
  [[nodiscard]] double ratio() const;
};

struct ScenarioResult {
  std::string name, description, file;
  std::vector<std::string> tags;
  /// Empty: the scenario is meant to pass. Else how it is meant to fail ("exit 3, deadline of
  /// cp/state_handoff"); then status says whether it did exactly that.
  std::string expected;
  Status status = Status::kPass;
  Phase phase = Phase::kRecord;         ///< last phase entered
  std::string reason;                   ///< for kFail, kSkipped and kError
  std::optional<ErrorKind> error_kind;  ///< for kError
  std::vector<RunRecord> runs;
  std::vector<Comparison> comparisons;
  std::vector<Series> series;
  double seconds = 0;
};

struct Report {
  std::string title;
  std::string started;  ///< ISO 8601, UTC: "2026-03-01T04:00:00Z"
  double seconds = 0;
  std::string command;  ///< shell line that repeats this run
  uint64_t seed = 0;
  Environment environment;
  std::vector<ScenarioResult> scenarios;
  // Set by conclude().
  Status status = Status::kPass;
  int exit_code = 0;
  std::string verdict;
};

std::string_view name(Status status) noexcept;
std::string_view name(Phase phase) noexcept;
std::string_view name(Bound bound) noexcept;
std::string_view name(ChartKind kind) noexcept;

/// Sets status (and a reason when it fails) from value, limit and bound. Without a limit the
/// comparison is kRecorded; a NaN never passes, not even without a limit.
void judge(Comparison& comparison);

/// Sets status and reason from the comparisons and runs: error before fail before pass; everything
/// skipped is kSkipped, nothing judged is kRecorded. A worse status already there is kept, and a
/// scenario that is expected to fail is left as the runner set it. Doing it twice changes nothing.
void conclude(ScenarioResult& scenario);

/// Concludes every scenario, then sets status, exit_code and verdict.
void conclude(Report& report);

/// 0 pass, 1 numerics differ, 2 bad input, 3 communication, 4 golden missing or stale, 5 internal.
/// The highest code wins. Skipped and recorded scenarios give 0 and are named in the verdict.
int exit_code(const ScenarioResult& scenario);
int exit_code(const Report& report);

struct Counts {
  int64_t pass = 0, fail = 0, skipped = 0, error = 0, recorded = 0;
  int64_t expected = 0;  ///< comparisons that failed in a scenario whose failure was asked for
  [[nodiscard]] int64_t total() const {
    return pass + fail + skipped + error + recorded + expected;
  }
};
Counts count_scenarios(const Report& report);
Counts count_comparisons(const Report& report);

/// The judged comparison nearest to or farthest over its limit: failures before passes, then by
/// ratio, a NaN value above all. Null when nothing was judged.
const Comparison* worst_comparison(const ScenarioResult& scenario);
/// The same over all scenarios that were meant to pass.
struct Worst {
  const ScenarioResult* scenario = nullptr;
  const Comparison* comparison = nullptr;
};
Worst worst_comparison(const Report& report);

/// "All 14 comparisons in 3 scenarios are within their limits; the closest is ..."
std::string verdict_sentence(const Report& report);

/// A number as people read it, in that many significant digits without trailing zeros: "1.2e-9",
/// "0.034", "4096", "0.99987", "NaN", "inf".
std::string format_number(double value, int digits = 3);
/// A ratio as percent: "43%", "over 99%", "less than 0.1%".
std::string format_percent(double ratio);

/// JSON text, indented, keys in a fixed order. Not-a-number and infinities are the strings "NaN",
/// "Infinity", "-Infinity"; every other number reads back to the same bits.
std::string to_json(const Report& report);
std::string to_json(const ScenarioResult& scenario);
std::string to_json(const Comparison& comparison);

/// Reads what to_json wrote. `source` names the text in messages. Absent fields keep their
/// defaults, unknown ones are ignored. Throws kInput naming the field, what was expected and what
/// came, or the version if it is a newer one.
Report report_from_json(std::string_view text, std::string_view source);
ScenarioResult scenario_from_json(std::string_view text, std::string_view source);

/// What can be known without MPI, HDF5 or a device: compiler, instruction set, CPU, cores, torch
/// and its BLAS. The caller adds the rest.
Environment local_environment();

}  // namespace lockstep::harness
