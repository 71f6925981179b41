// Timing of the whole model on this machine, against the machine's own matrix product rate and,
// when asked, against a peer program in the same run.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "harness/runner/flops.hpp"
#include "model/config/numerics.hpp"

namespace lockstep::harness {

struct BenchPlan {
  std::string preset = "mini";
  std::vector<int64_t> tokens;  ///< one document each
  model::Numerics numerics = model::Numerics::policy("float32");
  int repeats = 3;
  bool backward = true, reference_ops = false, peer = false;
};

struct BenchRow {
  int64_t tokens = 0;
  double forward_s = 0, forward_backward_s = 0;  ///< fastest of the repeats; 0: not measured
  Flops flops;
  std::optional<double> peer_forward_s, peer_forward_backward_s;
};

struct BenchTable {
  int threads = 1;
  double sgemm_gflops = 0;  ///< of 1024 x 1024 x 1024 float32 products, fastest of several
  std::vector<BenchRow> rows;
};

/// Throws kConfig when the peer is asked for and not installed.
BenchTable run_bench(const BenchPlan& plan, const std::function<void(std::string_view)>& say);

/// Rate of float32 matrix products in GFLOP/s, measured now.
double measure_sgemm_gflops();

}  // namespace lockstep::harness
