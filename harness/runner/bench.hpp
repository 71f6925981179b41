// Timing of the whole model on this machine, by operator, against the machine's own matrix product
// rate and, when asked, against a peer program in the same run.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "harness/runner/flops.hpp"
#include "model/base/op_timer.hpp"
#include "model/config/numerics.hpp"

namespace lockstep::harness {

struct BenchPlan {
  std::string preset = "mini";
  std::vector<std::vector<int64_t>> rows;  ///< each a packed row: lengths of its documents
  model::Numerics numerics = model::Numerics::policy("float32");
  int repeats = 3;
  bool backward = true, reference_ops = false;
  std::string device = "cpu";
  bool peer = false;                       ///< for rows of one document
  std::optional<model::Numerics> against;  ///< a second policy, measured in turns with the first
};

/// One document of `tokens`, one of 8 x tokens, 8 of `tokens` packed: what growth is read from.
std::vector<std::vector<int64_t>> growth_rows(int64_t tokens);

/// The fastest of the repeats. Operators are those of that run.
struct BenchPass {
  double seconds = 0;  ///< 0: not measured
  std::vector<OpTime> operators;
  int64_t peak_bytes = 0;  ///< resident high-water mark of the process; 0: unknown

  /// Sum over operators; the rest of `seconds` is outside of them.
  [[nodiscard]] double operator_seconds() const;
};

struct BenchRow {
  std::vector<int64_t> documents;
  BenchPass forward;                                    ///< without gradients, with all logits
  BenchPass forward_backward;                           ///< no logits
  BenchPass against_forward, against_forward_backward;  ///< of BenchPlan::against
  Flops flops;
  std::optional<double> peer_forward_s, peer_forward_backward_s;

  [[nodiscard]] int64_t tokens() const;
  [[nodiscard]] std::string name() const;  ///< "4096", "8 x 4096", "3 + 700"
};

struct BenchTable {
  int threads = 1;
  double sgemm_gflops = 0;  ///< of 1024 x 1024 x 1024 float32 products, fastest of several
  double load_before = 0, load_after = 0;  ///< processes that wanted to run, over a minute
  bool peak_by_pass = false;  ///< peaks are of their pass; false: of everything before it too
  std::vector<BenchRow> rows;
};

/// Rows and policies take turns, repeat by repeat, so that other load on the machine falls on all
/// of them. An untimed run of each row measures memory, one policy in the process at a time. Throws
/// kConfig when the peer is asked for and not installed.
BenchTable run_bench(const BenchPlan& plan, const std::function<void(std::string_view)>& say);

/// Rate of float32 matrix products in GFLOP/s, measured now.
double measure_sgemm_gflops();

/// How much longer one pass takes than another. The indexer's scores are of every query with every
/// pool before it, quadratic by nature, and counted apart.
struct Growth {
  double all = 0, without_scoring = 0, scoring = 0;       ///< 0: nothing to divide by
  std::vector<std::pair<std::string, double>> operators;  ///< forward and backward together
};
Growth growth(const BenchPass& from, const BenchPass& to);

}  // namespace lockstep::harness
