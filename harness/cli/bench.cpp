#include "harness/runner/bench.hpp"

#include <nlohmann/json.hpp>

#include "harness/cli/commands.hpp"
#include "harness/launch/available.hpp"
#include "harness/runner/progress.hpp"

namespace lockstep::harness {
namespace {

std::string share(double flops, double seconds, double gflops) {
  if (seconds <= 0) return "-";
  return fmt::format("{:.0f}%", 100 * flops * 1e-9 / seconds / gflops);
}

std::string ratio(std::optional<double> peer, double own) {
  return peer && own > 0 ? fmt::format("{:.1f}x", *peer / own) : "-";
}

nlohmann::ordered_json to_json(const BenchTable& table) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const BenchRow& row : table.rows) {
    nlohmann::ordered_json out{{"tokens", row.tokens},
                               {"forward_s", row.forward_s},
                               {"forward_gflop", row.flops.forward() * 1e-9},
                               {"forward_backward_s", row.forward_backward_s},
                               {"forward_backward_gflop", row.flops.forward_backward() * 1e-9}};
    if (row.peer_forward_s) out["peer_forward_s"] = *row.peer_forward_s;
    if (row.peer_forward_backward_s) out["peer_forward_backward_s"] = *row.peer_forward_backward_s;
    rows.push_back(out);
  }
  return {{"threads", table.threads}, {"sgemm_gflops", table.sgemm_gflops}, {"rows", rows}};
}

}  // namespace

int run_command_bench(const BenchOptions& options, const Context& context) {
  const std::string problem = device_problem(options.device);
  LOCKSTEP_CHECK(problem.empty(), kConfig, "bench --device {}: {}", options.device, problem);
  BenchPlan plan;
  plan.preset = options.preset;
  plan.tokens = options.tokens.empty() ? std::vector<int64_t>{256, 1024, 4096} : options.tokens;
  for (const int64_t tokens : plan.tokens) {
    LOCKSTEP_CHECK(tokens >= 2, kInput, "bench --tokens {}: give 2 or more", tokens);
  }
  plan.numerics = model::Numerics::policy(options.policy);
  plan.repeats = options.repeats;
  plan.backward = !options.forward_only;
  plan.reference_ops = options.reference_ops;
  plan.peer = options.peer;
  Progress progress(context.quiet ? Progress::Mode::kQuiet : Progress::Mode::kAuto);
  const BenchTable table = run_bench(plan, [&](std::string_view line) { progress.line(line); });
  if (context.json) {
    print(to_json(table).dump(2) + "\n");
    return 0;
  }
  print(fmt::format("model {}, policy {}, {} threads, sgemm {:.0f} GFLOP/s in this run\n",
                    options.preset,
                    options.policy,
                    table.threads,
                    table.sgemm_gflops));
  print(fmt::format("{:>7} {:>10} {:>8} {:>7} {:>12} {:>8} {:>7}{}\n",
                    "tokens",
                    "forward s",
                    "GFLOP",
                    "share",
                    "+backward s",
                    "GFLOP",
                    "share",
                    plan.peer ? "   peer s   ratio  +backward   ratio" : ""));
  for (const BenchRow& row : table.rows) {
    std::string line = fmt::format(
        "{:>7} {:>10.3f} {:>8.2f} {:>7} {:>12.3f} {:>8.2f} {:>7}",
        row.tokens,
        row.forward_s,
        row.flops.forward() * 1e-9,
        share(row.flops.forward(), row.forward_s, table.sgemm_gflops),
        row.forward_backward_s,
        row.flops.forward_backward() * 1e-9,
        share(row.flops.forward_backward(), row.forward_backward_s, table.sgemm_gflops));
    if (plan.peer) {
      line += fmt::format(" {:>8.3f} {:>7} {:>10.3f} {:>7}",
                          row.peer_forward_s.value_or(0),
                          ratio(row.peer_forward_s, row.forward_s),
                          row.peer_forward_backward_s.value_or(0),
                          ratio(row.peer_forward_backward_s, row.forward_backward_s));
    }
    print(line + "\n");
  }
  return 0;
}

}  // namespace lockstep::harness
