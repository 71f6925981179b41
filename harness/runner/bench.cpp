#include "harness/runner/bench.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>

#include "harness/launch/mpi_start.hpp"
#include "harness/launch/paths.hpp"
#include "harness/trainer/trainer.hpp"
#include "model/base/blas.hpp"
#include "model/base/device.hpp"
#include "model/base/heap.hpp"
#include "model/base/parallel.hpp"

namespace lockstep::harness {
namespace {

template <typename Body>
double fastest(int repeats, Body&& body) {
  double best = std::numeric_limits<double>::infinity();
  for (int r = 0; r < repeats; ++r) {
    const auto start = std::chrono::steady_clock::now();
    body();
    best = std::min(
        best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

double load_average() {
  double minute = 0;
  return getloadavg(&minute, 1) == 1 ? minute : 0;
}

/// The trainers of one policy, and where a row keeps what they take.
struct Contestant {
  Contestant(const BenchPlan& plan,
             const model::Numerics& num,
             const std::shared_ptr<const model::WeightSource>& source,
             const parallel::Mesh& mesh,
             BenchPass BenchRow::*forward_in,
             BenchPass BenchRow::*forward_backward_in)
      : forward_pass(forward_in),
        forward_backward_pass(forward_backward_in),
        forward(source, options(plan, num, false), mesh),
        forward_backward(source, options(plan, num, true), mesh) {}

  static TrainerOptions options(const BenchPlan& plan, const model::Numerics& num, bool grads) {
    TrainerOptions o;
    o.numerics = num;
    o.reference_ops = plan.reference_ops;
    o.device = device_of(plan.device);
    o.grads = grads;
    o.logits = !grads;
    return o;
  }

  BenchPass BenchRow::*forward_pass;
  BenchPass BenchRow::*forward_backward_pass;
  Trainer forward, forward_backward;
};

/// One run that counts for memory only. False if the mark also holds what was before.
bool measure_peak(Trainer& trainer, const Documents& documents, BenchPass& pass) {
  const bool reset = reset_peak_memory();
  trainer.run(documents);
  pass.peak_bytes = peak_memory_bytes();
  return reset;
}

/// Keeps the run if it is the fastest so far.
void time_once(Trainer& trainer, const Documents& documents, BenchPass& pass) {
  const OpTimer timer;
  const double seconds = fastest(1, [&] { trainer.run(documents); });
  if (pass.seconds > 0 && seconds >= pass.seconds) return;
  pass.seconds = seconds;
  pass.operators = timer.times();
}

void add_peer(const BenchPlan& plan,
              BenchTable& table,
              const std::function<void(std::string_view)>& say) {
  const auto python = require_golden_python("bench --peer");
  const auto script = source_path(std::filesystem::path("golden") / "make" / "peer_cpu.py");
  std::vector<std::string> command = {
      python.string(), script.string(), "--threads", std::to_string(table.threads)};
  command.emplace_back("--repeats");
  command.push_back(std::to_string(plan.repeats));
  if (!plan.backward) command.emplace_back("--forward-only");
  command.emplace_back("--tokens");
  for (const auto& lengths : plan.rows) {
    if (lengths.size() == 1) command.push_back(std::to_string(lengths.front()));
  }
  say("timing the peer (transformers, eager)");
  std::string bad;
  // Its waiting threads sleep early too (model/base/parallel.cpp): where something else runs on the
  // machine, spinning costs it a multiple.
  const std::vector<std::string> environment = {"GOMP_SPINCOUNT=100"};
  const Outcome outcome = run_command(command, environment, [&](std::string_view line) {
    try {
      const auto row = nlohmann::json::parse(line);
      for (BenchRow& own : table.rows) {
        if (own.documents != std::vector{row.at("tokens").get<int64_t>()}) continue;
        own.peer_forward_s = row.at("forward_s").get<double>();
        if (row.contains("forward_backward_s")) {
          own.peer_forward_backward_s = row.at("forward_backward_s").get<double>();
        }
        say(fmt::format("peer, {} tokens: {}", own.name(), line));
      }
    } catch (const nlohmann::json::exception&) {
      bad = line;
    }
  });
  LOCKSTEP_CHECK(
      outcome.exit_code == 0,
      kConfig,
      "bench --peer: {} ended with {}: {}{}",
      script.string(),
      outcome.exit_code,
      outcome.errors.substr(outcome.errors.size() > 400 ? outcome.errors.size() - 400 : 0),
      bad);
}

}  // namespace

double measure_sgemm_gflops() {
  constexpr int64_t kSize = 1024;
  const Tensor a = at::ones({kSize, kSize}, at::kFloat), b = at::ones({kSize, kSize}, at::kFloat);
  Tensor c = at::empty({kSize, kSize}, at::kFloat);
  const double seconds = fastest(8, [&] {
    gemm(Op::kNone,
         Op::kNone,
         kSize,
         kSize,
         kSize,
         1.0F,
         a.const_data_ptr<float>(),
         kSize,
         b.const_data_ptr<float>(),
         kSize,
         0.0F,
         c.mutable_data_ptr<float>(),
         kSize);
  });
  return 2.0 * kSize * kSize * kSize / seconds * 1e-9;
}

BenchTable run_bench(const BenchPlan& plan, const std::function<void(std::string_view)>& say) {
  if (plan.peer) require_golden_python("bench --peer");
  BenchTable table;
  table.threads = num_threads();
  table.load_before = load_average();
  const model::ModelConfig config = model::preset_config(plan.preset);
  const std::shared_ptr<const model::WeightSource> source = model::seeded_source(config, 0);
  const parallel::Mesh mesh = parallel::Mesh::single();
  say("measuring the matrix product rate");
  table.sgemm_gflops = measure_sgemm_gflops();
  std::vector<Documents> documents;
  for (const std::vector<int64_t>& lengths : plan.rows) {
    documents.push_back(
        random_documents(lengths, config.vocab_size, config.pad_token_id.value_or(-1), 1));
    BenchRow row;
    row.documents = lengths;
    row.flops = count_flops(config, lengths);
    table.rows.push_back(row);
  }
  const auto enter = [&](bool against) {
    return against ? std::make_unique<Contestant>(plan,
                                                  *plan.against,
                                                  source,
                                                  mesh,
                                                  &BenchRow::against_forward,
                                                  &BenchRow::against_forward_backward)
                   : std::make_unique<Contestant>(plan,
                                                  plan.numerics,
                                                  source,
                                                  mesh,
                                                  &BenchRow::forward,
                                                  &BenchRow::forward_backward);
  };
  const auto measure_peaks = [&](Contestant& one) {
    for (size_t r = 0; r < table.rows.size(); ++r) {
      BenchRow& row = table.rows[r];
      table.peak_by_pass &= measure_peak(one.forward, documents[r], row.*one.forward_pass);
      if (plan.backward)
        measure_peak(one.forward_backward, documents[r], row.*one.forward_backward_pass);
    }
  };
  table.peak_by_pass = true;
  if (plan.against) measure_peaks(*enter(true));
  std::vector<std::unique_ptr<Contestant>> contestants;
  contestants.push_back(enter(false));
  measure_peaks(*contestants.front());
  if (plan.against) contestants.push_back(enter(true));

  for (int repeat = 0; repeat < plan.repeats; ++repeat) {
    for (size_t r = 0; r < table.rows.size(); ++r) {
      BenchRow& row = table.rows[r];
      for (const auto& one : contestants) {
        time_once(one->forward, documents[r], row.*one->forward_pass);
        if (plan.backward)
          time_once(one->forward_backward, documents[r], row.*one->forward_backward_pass);
      }
      say(fmt::format("{} tokens, {} of {}: forward {:.3f} s{}",
                      row.name(),
                      repeat + 1,
                      plan.repeats,
                      row.forward.seconds,
                      plan.backward
                          ? fmt::format(", with backward {:.3f} s", row.forward_backward.seconds)
                          : ""));
      // The rate once more: other load on the machine during the run shows as a difference.
      table.sgemm_gflops = std::max(table.sgemm_gflops, measure_sgemm_gflops());
    }
  }
  if (plan.peer) add_peer(plan, table, say);
  table.load_after = load_average();
  return table;
}

}  // namespace lockstep::harness
