#include "harness/runner/bench.hpp"

#include <nlohmann/json.hpp>

#include "harness/cli/commands.hpp"
#include "harness/launch/available.hpp"
#include "harness/runner/progress.hpp"

namespace lockstep::harness {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kGrowthLimit = 9;  // for eight times the tokens

std::string share(double flops, double seconds, double gflops) {
  if (seconds <= 0) return "-";
  return fmt::format("{:.0f}%", 100 * flops * 1e-9 / seconds / gflops);
}

std::string ratio(std::optional<double> peer, double own) {
  return peer && own > 0 ? fmt::format("{:.1f}x", *peer / own) : "-";
}

std::string megabytes(int64_t bytes) {
  return bytes > 0 ? fmt::format("{:.0f}", static_cast<double>(bytes) / (1 << 20)) : "-";
}

/// The pass that growth and operators are shown of.
const BenchPass& longest_pass(const BenchRow& row) {
  return row.forward_backward.seconds > 0 ? row.forward_backward : row.forward;
}

Json operators_json(const BenchPass& pass) {
  Json out = Json::array();
  for (const OpTime& op : pass.operators) {
    out.push_back({{"name", op.name},
                   {"calls", op.calls},
                   {"forward_s", op.forward_s},
                   {"backward_s", op.backward_s},
                   {"share", (op.forward_s + op.backward_s) / pass.seconds}});
  }
  return out;
}

Json growth_json(const BenchRow& from, const BenchRow& to, bool scoring_counts) {
  Json out{{"from", from.documents}, {"to", to.documents}, {"limit", kGrowthLimit}};
  const auto add = [&](const char* pass, const BenchPass& a, const BenchPass& b) {
    if (a.seconds <= 0) return;
    const Growth g = growth(a, b);
    Json operators = Json::object();
    for (const auto& [name, times] : g.operators) operators[name] = times;
    out[pass] = {{"all", g.all},
                 {"without_scoring", g.without_scoring},
                 {"scoring", g.scoring},
                 {"within", (scoring_counts ? g.all : g.without_scoring) <= kGrowthLimit},
                 {"operators", operators}};
  };
  add("forward", from.forward, to.forward);
  add("forward_backward", from.forward_backward, to.forward_backward);
  return out;
}

Json to_json(const BenchTable& table, bool with_growth) {
  Json rows = Json::array();
  for (const BenchRow& row : table.rows) {
    Json out{{"tokens", row.tokens()},
             {"documents", row.documents},
             {"forward_s", row.forward.seconds},
             {"forward_gflop", row.flops.forward() * 1e-9},
             {"forward_peak_bytes", row.forward.peak_bytes},
             {"forward_operators", operators_json(row.forward)},
             {"forward_backward_s", row.forward_backward.seconds},
             {"forward_backward_gflop", row.flops.forward_backward() * 1e-9}};
    if (row.forward_backward.seconds > 0) {
      out["forward_backward_peak_bytes"] = row.forward_backward.peak_bytes;
      out["forward_backward_operators"] = operators_json(row.forward_backward);
    }
    if (row.against_forward.seconds > 0) {
      out["against"] = {{"forward_s", row.against_forward.seconds},
                        {"forward_peak_bytes", row.against_forward.peak_bytes},
                        {"forward_backward_s", row.against_forward_backward.seconds},
                        {"forward_backward_peak_bytes", row.against_forward_backward.peak_bytes}};
    }
    if (row.peer_forward_s) out["peer_forward_s"] = *row.peer_forward_s;
    if (row.peer_forward_backward_s) out["peer_forward_backward_s"] = *row.peer_forward_backward_s;
    rows.push_back(out);
  }
  Json out{{"threads", table.threads},
           {"sgemm_gflops", table.sgemm_gflops},
           {"load_average", {table.load_before, table.load_after}},
           {"peak_by_pass", table.peak_by_pass},
           {"rows", rows}};
  if (with_growth) {
    out["growth"] = {growth_json(table.rows[0], table.rows[1], false),
                     growth_json(table.rows[0], table.rows[2], true)};
  }
  return out;
}

void print_times(const BenchTable& table, bool peer) {
  print(fmt::format("{:>10} {:>10} {:>8} {:>7} {:>8} {:>12} {:>8} {:>7} {:>8}{}\n",
                    "tokens",
                    "forward s",
                    "GFLOP",
                    "share",
                    "peak MB",
                    "+backward s",
                    "GFLOP",
                    "share",
                    "peak MB",
                    peer ? "   peer s   ratio  +backward   ratio" : ""));
  for (const BenchRow& row : table.rows) {
    const BenchPass &f = row.forward, &b = row.forward_backward;
    std::string line =
        fmt::format("{:>10} {:>10.3f} {:>8.2f} {:>7} {:>8} {:>12.3f} {:>8.2f} {:>7} {:>8}",
                    row.name(),
                    f.seconds,
                    row.flops.forward() * 1e-9,
                    share(row.flops.forward(), f.seconds, table.sgemm_gflops),
                    megabytes(f.peak_bytes),
                    b.seconds,
                    row.flops.forward_backward() * 1e-9,
                    share(row.flops.forward_backward(), b.seconds, table.sgemm_gflops),
                    megabytes(b.peak_bytes));
    if (peer) {
      line += fmt::format(" {:>8.3f} {:>7} {:>10.3f} {:>7}",
                          row.peer_forward_s.value_or(0),
                          ratio(row.peer_forward_s, f.seconds),
                          row.peer_forward_backward_s.value_or(0),
                          ratio(row.peer_forward_backward_s, b.seconds));
    }
    print(line + "\n");
  }
  if (!table.peak_by_pass) {
    print("peak: of everything in this process up to then; the kernel's mark cannot be reset\n");
  }
}

/// What the policy costs, as a multiple of the other.
void print_against(const BenchTable& table, const BenchOptions& options) {
  print(fmt::format("\n{} / {}\n", options.policy, options.against));
  print(fmt::format(
      "{:>10} {:>10} {:>9} {:>12} {:>9}\n", "tokens", "forward", "peak", "+backward", "peak"));
  const auto times = [](double own, double other) {
    return own > 0 && other > 0 ? fmt::format("{:.2f}x", own / other) : "-";
  };
  const auto memory = [&](const BenchPass& own, const BenchPass& other) {
    return times(static_cast<double>(own.peak_bytes), static_cast<double>(other.peak_bytes));
  };
  for (const BenchRow& row : table.rows) {
    print(fmt::format("{:>10} {:>10} {:>9} {:>12} {:>9}\n",
                      row.name(),
                      times(row.forward.seconds, row.against_forward.seconds),
                      memory(row.forward, row.against_forward),
                      times(row.forward_backward.seconds, row.against_forward_backward.seconds),
                      memory(row.forward_backward, row.against_forward_backward)));
  }
}

void print_operators(const BenchRow& row) {
  const BenchPass &alone = row.forward, &pass = longest_pass(row);
  const bool both = &pass == &row.forward_backward;
  const auto percent = [](double seconds, double all) {
    return fmt::format("{:.1f}%", 100 * seconds / all);
  };
  print(fmt::format("\n{:<23} {:>6} {:>10} {:>7}{}\n",
                    row.name() + " tokens",
                    "calls",
                    "forward s",
                    "share",
                    both ? "   with backward: forward s  backward s   share" : ""));
  const auto line = [&](const OpTime& op, double forward_s) {
    std::string text = fmt::format("{:<23} {:>6} {:>10.4f} {:>7}",
                                   op.name,
                                   op.calls > 0 ? std::to_string(op.calls) : "",
                                   forward_s,
                                   percent(forward_s, alone.seconds));
    if (both) {
      text += fmt::format("{:>26.4f} {:>11.4f} {:>7}",
                          op.forward_s,
                          op.backward_s,
                          percent(op.forward_s + op.backward_s, pass.seconds));
    }
    print(text + "\n");
  };
  for (const OpTime& op : pass.operators) {
    double forward_s = 0;
    for (const OpTime& other : alone.operators) {
      if (other.name == op.name) forward_s = other.forward_s;
    }
    line(op, forward_s);
  }
  OpTime rest{.name = "outside operators"};
  rest.forward_s = pass.seconds - pass.operator_seconds();
  line(rest, alone.seconds - alone.operator_seconds());
}

void print_growth(const BenchTable& table) {
  const BenchRow &base = table.rows[0], &one = table.rows[1], &packed = table.rows[2];
  const BenchPass &from = longest_pass(base), &to_one = longest_pass(one),
                  &to_packed = longest_pass(packed);
  print(fmt::format("\n{:<23} {:>10} {:>10} {:>7} {:>10} {:>7}\n",
                    &from == &base.forward ? "forward s" : "forward and backward s",
                    base.name(),
                    one.name(),
                    "growth",
                    packed.name(),
                    "growth"));
  const auto seconds = [](const BenchPass& pass, std::string_view name) {
    double sum = pass.seconds - pass.operator_seconds();  // "outside operators"
    for (const OpTime& op : pass.operators) {
      if (op.name == name) sum = op.forward_s + op.backward_s;
    }
    return sum;
  };
  const Growth grown = growth(from, to_one), grown_packed = growth(from, to_packed);
  for (size_t i = 0; i < grown.operators.size(); ++i) {
    const std::string& name = grown.operators[i].first;
    print(fmt::format("{:<23} {:>10.4f} {:>10.4f} {:>6.1f}x {:>10.4f} {:>6.1f}x\n",
                      name,
                      seconds(from, name),
                      seconds(to_one, name),
                      grown.operators[i].second,
                      seconds(to_packed, name),
                      grown_packed.operators[i].second));
  }
  const auto verdict = [&](const BenchRow& to, const char* what, double Growth::*value) {
    std::string text = fmt::format("{} -> {} tokens, {}:", base.name(), to.name(), what);
    bool within = true;
    const auto add = [&](const char* pass, const BenchPass& a, const BenchPass& b) {
      if (a.seconds <= 0) return;
      const double times = growth(a, b).*value;
      within = within && times <= kGrowthLimit;
      text += fmt::format(" {} {:.2f}x,", pass, times);
    };
    add("forward", base.forward, to.forward);
    add("with backward", base.forward_backward, to.forward_backward);
    print(fmt::format("{} at most {:.0f}x: {}\n", text, kGrowthLimit, within ? "yes" : "NO"));
  };
  print("\n");
  verdict(one, "everything but indexer scoring", &Growth::without_scoring);
  verdict(packed, "everything", &Growth::all);
}

}  // namespace

int run_command_bench(const BenchOptions& options, const Context& context) {
  const std::string problem = device_problem(options.device);
  LOCKSTEP_CHECK(problem.empty(), kConfig, "bench --device {}: {}", options.device, problem);
  for (const int64_t tokens : options.tokens) {
    LOCKSTEP_CHECK(tokens >= 2 && tokens <= kMostTokens,
                   kInput,
                   "bench --tokens {}: give 2 or more, at most {}",
                   tokens,
                   kMostTokens);
  }
  BenchPlan plan;
  plan.preset = options.preset;
  if (options.growth) {
    LOCKSTEP_CHECK(options.tokens.size() <= 1,
                   kInput,
                   "bench --growth compares one length with eight times as many tokens; --tokens "
                   "gave {} lengths",
                   options.tokens.size());
    plan.rows = growth_rows(options.tokens.empty() ? 4096 : options.tokens.front());
  } else {
    for (const int64_t tokens :
         options.tokens.empty() ? std::vector<int64_t>{256, 1024, 4096} : options.tokens) {
      plan.rows.push_back({tokens});
    }
  }
  plan.numerics = model::Numerics::policy(options.policy);
  if (!options.against.empty()) plan.against = model::Numerics::policy(options.against);
  plan.repeats = options.repeats;
  plan.backward = !options.forward_only;
  plan.reference_ops = options.reference_ops;
  plan.device = options.device;
  plan.peer = options.peer;
  Progress progress(context.quiet ? Progress::Mode::kQuiet : Progress::Mode::kAuto);
  const BenchTable table = run_bench(plan, [&](std::string_view line) { progress.line(line); });
  if (context.json) {
    print(to_json(table, options.growth).dump(2) + "\n");
    return 0;
  }
  print(
      fmt::format("model {}, policy {}, device {}, {} threads, sgemm {:.0f} GFLOP/s in this run; "
                  "fastest of {}, load "
                  "average {:.1f} before, {:.1f} after\n",
                  options.preset,
                  options.policy,
                  options.device,
                  table.threads,
                  table.sgemm_gflops,
                  plan.repeats,
                  table.load_before,
                  table.load_after));
  print_times(table, plan.peer);
  if (plan.against) print_against(table, options);
  if (options.growth) {
    print_operators(table.rows[0]);
    print_growth(table);
  } else {
    for (const BenchRow& row : table.rows) print_operators(row);
  }
  return 0;
}

}  // namespace lockstep::harness
