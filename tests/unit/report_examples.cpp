#include "tests/unit/report_examples.hpp"

#include <array>
#include <cmath>
#include <limits>

namespace lockstep::harness {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Fixed numbers between 0 and 1 that look random.
class Noise {
 public:
  double operator()() {
    state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<double>(state_ >> 11U) / 9007199254740992.0;
  }

 private:
  uint64_t state_ = 42;
};

Environment environment() {
  Environment e;
  e.lockstep_version = "0.1.0";
  e.git_commit = "3f2a9c1d07be";
  e.compiler = "g++ 12.2.0";
  e.march = "x86-64-v3";
  e.build_type = "Release";
  e.os = "Linux 6.1.0 x86_64";
  e.cpu_model = "AMD EPYC 9654 96-Core Processor";
  e.cores = 192;
  e.threads = 24;
  e.torch = "2.11.0";
  e.mpi = "Open MPI 4.1.4";
  e.hdf5 = "1.10.8";
  e.blas = "MKL 2024.2";
  e.extra = {{"torch CPU capability", "AVX512"}};
  return e;
}

RunRecord run(std::string name, std::string engine, std::string policy, std::string topology) {
  RunRecord r;
  r.name = std::move(name);
  r.engine = std::move(engine);
  r.policy = std::move(policy);
  r.topology = std::move(topology);
  r.device = "cpu";
  r.checkpoint = "tiny";
  r.provenance = {{"weights", "seed 3, formula 1"},
                  {"sha256", "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"}};
  r.seconds = 1.84;
  r.tokens = 372;
  r.peak_bytes = 811'597'824;
  r.measures = {{"loss", 6.23841, ""}};
  return r;
}

Comparison compared(std::string left,
                    std::string right,
                    std::string what,
                    std::string metric,
                    double value,
                    std::optional<double> limit,
                    std::optional<double> noise_floor = {},
                    std::string unit = "",
                    Bound bound = Bound::kAtMost) {
  Comparison c;
  c.left = std::move(left);
  c.right = std::move(right);
  c.what = std::move(what);
  c.metric = std::move(metric);
  c.value = value;
  c.limit = limit;
  c.noise_floor = noise_floor;
  c.unit = std::move(unit);
  c.bound = bound;
  judge(c);
  return c;
}

Series series(
    ChartKind kind, std::string chart, std::string name, std::string x_label, std::string y_label) {
  Series s;
  s.kind = kind;
  s.chart = std::move(chart);
  s.name = std::move(name);
  s.x_label = std::move(x_label);
  s.y_label = std::move(y_label);
  return s;
}

/// Points at 0, 1, 2, ...
template <typename Values>
void fill(Series& s, const Values& values) {
  for (const double value : values) {
    s.points.push_back({static_cast<double>(s.points.size()), value});
  }
}

Series layers(std::string name, int count, double start, double growth, Noise& noise) {
  Series s = series(ChartKind::kLayer, "Error by layer", std::move(name), "layer", "relative L2");
  for (int i = 0; i < count; ++i) {
    s.points.push_back(
        {static_cast<double>(i), start * std::pow(growth, i) * (0.7 + 0.6 * noise())});
    s.x_names.push_back(fmt::format("{} {}", i, i % 4 == 3 ? "DSA" : "KDA"));
  }
  return s;
}

Series tokens(std::string name, int count, double level, Noise& noise) {
  Series s = series(ChartKind::kToken,
                    "Error by token position",
                    std::move(name),
                    "token",
                    "max abs error of logits");
  for (int i = 0; i < count; ++i) {
    const double drift = level * (1 + 3.0 * i / count);
    s.points.push_back({static_cast<double>(i), drift * std::pow(10.0, 1.2 * noise() - 0.6)});
  }
  s.noise_floor = {level * 0.4};
  return s;
}

Report report(std::string title) {
  Report r;
  r.title = std::move(title);
  r.started = "2026-03-01T04:00:07Z";
  r.seconds = 94.2;
  r.command = "lockstep run scenarios --tag nightly --out out/nightly";
  r.seed = 3;
  r.environment = environment();
  return r;
}

Comparison differing_logits() {
  Comparison c = compared("cp1", "cp4", "logits", "ulp_max", 16, 0, {}, "ulp");
  c.rank = 1;
  c.first_divergence =
      "layers.2.kda.state[0,3,17,5] cp_rank 1: got 0x3f800010 want 0x3f800000, 16 ulp; first bad "
      "token 256";
  c.ranks = {{0, "cp 0", 0, ""},
             {1, "cp 1", 16, "first bad token 256"},
             {2, "cp 2", 12, ""},
             {3, "cp 3", 9, ""}};
  return c;
}

Comparison differing_grads(Noise& noise) {
  Comparison c = compared("cp1", "cp4", "grads", "rel_l2", 3.1e-6, 0);
  for (const std::string_view name : {"embed_tokens.weight",
                                      "layers.0.kda.q_proj.weight",
                                      "layers.2.kda.A_log",
                                      "layers.2.kda.dt_bias",
                                      "layers.3.mla.kv_a_proj.weight"}) {
    Detail d;
    d.name = name;
    d.metric = "rel_l2";
    d.limit = 0;
    d.value = name.starts_with("layers.2") ? 3.1e-6 * (0.5 + noise() / 2) : 0;
    d.noise_floor = 1.1e-7;
    d.status = d.value > 0 ? Status::kFail : Status::kPass;
    c.details.push_back(d);
  }
  c.first_divergence =
      "layers.2.kda.A_log (3 of 5 in backward order): layers.2.kda.A_log[3]: got -1.2040173 want "
      "-1.2040136, 31 ulp";
  c.worst = "layers.2.kda.dt_bias: rel_l2 3.1e-6, limit 0";
  return c;
}

ScenarioResult cp_equivalence(bool differs) {
  Noise noise;
  ScenarioResult s;
  s.name = "cp_equivalence";
  s.description = "Does splitting documents over context-parallel ranks change a single bit?";
  s.file = "scenarios/cp_equivalence.toml";
  s.tags = {"nightly", "cpu"};
  s.seconds = 11.3;
  s.runs = {run("cp1", "trainer", "invariant-f32", "1 rank"),
            run("cp2", "trainer", "invariant-f32", "cp=2"),
            run("cp4", "trainer", "invariant-f32", "cp=4")};
  s.runs[2].ranks = 4;
  s.comparisons = {
      compared("cp1", "cp2", "logits", "ulp_max", 0, 0, {}, "ulp"),
      differs ? differing_logits() : compared("cp1", "cp4", "logits", "ulp_max", 0, 0, {}, "ulp"),
      differs ? differing_grads(noise) : compared("cp1", "cp4", "grads", "rel_l2", 0, 0),
      compared("cp2", "golden:tiny/f64", "logits", "rel_l2", 1.21e-6, 2e-5, 6.4e-7),
      compared("cp2", "golden:tiny/f64", "loss", "abs", 4.4e-8, 1e-6, 2.1e-8)};
  Series off = layers("cp4 vs cp1", 8, differs ? 2e-7 : 0, 1.9, noise);
  if (differs) off.points[0].y = off.points[1].y = 0;
  s.series = {layers("cp2 vs cp1", 8, 0, 1, noise), off, tokens("cp2 vs golden", 372, 8e-7, noise)};
  s.series[1].noise_floor = {2e-7};
  s.series[2].limit = 2e-5;
  conclude(s);
  return s;
}

ScenarioResult engines() {
  Noise noise;
  ScenarioResult s;
  s.name = "trainer_vs_inference";
  s.description = "Is the trainer the same function as the inference engine?";
  s.file = "scenarios/trainer_vs_inference.toml";
  s.tags = {"nightly", "cpu", "rl"};
  s.seconds = 23.9;
  s.runs = {run("train", "trainer", "fsdp-fp32-islands", "fsdp=2"),
            run("serve", "inference", "vllm-bf16", "tp=2"),
            run("serve_f32", "inference", "vllm-bf16", "tp=2")};
  s.runs[2].numerics = {{"D09", "hc_mix_roundings", "0", "1"}, {"D26", "kda_state", "f32", "bf16"}};
  s.comparisons = {
      compared("train", "serve", "logprobs", "kl", 0.0034, 0.015, 0.0011, "nat"),
      compared("train", "serve_f32", "logprobs", "kl", 0.0021, 0.015, 0.0011, "nat"),
      compared("train", "serve", "logits", "cosine", 0.99987, 0.9995, {}, "", Bound::kAtLeast),
      compared("train", "serve", "top1", "agreement", 0.984, {}),
      compared("train", "serve", "logits", "rel_l2", 1.41e-2, 2.2e-2, 9.1e-3)};
  s.series = {layers("serve", 8, 1.1e-3, 1.35, noise),
              layers("serve_f32", 8, 9e-4, 1.22, noise),
              tokens("serve", 372, 4e-3, noise),
              tokens("serve_f32", 372, 2.6e-3, noise)};
  for (const double floor : {1.2e-3, 1.6e-3, 2e-3, 2.3e-3, 2.5e-3, 2.6e-3, 2.7e-3, 2.7e-3}) {
    s.series[0].noise_floor.push_back(floor);
  }
  Series sweep =
      series(ChartKind::kSweep, "Mismatch by policy of the trainer", "KL to serve", "policy", "KL");
  sweep.unit = "nat";
  sweep.x_names = {"float32", "hf-bf16", "fsdp-bf16", "fsdp-fp32-islands", "invariant-bf16"};
  fill(sweep, std::array{0.0061, 0.0074, 0.0112, 0.0034, 0.0});
  sweep.limit = 0.015;
  sweep.noise_floor = {0.0011};
  s.series.push_back(sweep);
  for (const auto* name : {"trainer", "inference"}) {
    Series time = series(ChartKind::kTiming, "Time of a forward pass", name, "tokens", "time");
    time.unit = "s";
    time.log_x = true;
    time.log_y = false;
    for (int n = 128; n <= 8192; n *= 2) {
      time.points.push_back(
          {1.0 * n, (time.name == "trainer" ? 1.2e-3 : 8e-4) * n * (1 + 0.1 * noise())});
    }
    s.series.push_back(time);
  }
  Series ulps = series(
      ChartKind::kHistogram, "Distance of logits", "train vs serve", "ulp", "number of logits");
  ulps.x_names = {"0", "1", "2", "3-4", "5-8", "9-16", "17-32", "more"};
  fill(ulps, std::array<double, 8>{91022, 30412, 8012, 2201, 512, 77, 3, 0});
  s.series.push_back(ulps);
  conclude(s);
  return s;
}

ScenarioResult awkward_series() {
  ScenarioResult s;
  s.name = "awkward_series";
  s.description = "Empty, single, constant, zero, NaN and infinite values";
  const auto make = [](std::string chart) {
    return series(ChartKind::kOther, std::move(chart), "value", "x", "y");
  };
  Series one = make("One point"), zero = make("All zero"), bad = make("NaN, infinity and zero"),
         only_nan = make("Only NaN"), negative = make("Negative values"),
         far = make("A limit far away"), same = make("All the same");
  one.points = {{7, 3e-9}};
  one.noise_floor = {1e-9};
  fill(zero, std::array<double, 6>{});
  fill(bad, std::array{1e-7, 0.0, 3e-6, kNan, 2e-6, kInfinity, 1e-5, 0.0, 5e-6});
  bad.points.push_back({kNan, 1});
  fill(only_nan, std::array{kNan, kNan});
  fill(negative, std::array{-1.5, 2.0, 0.5, -0.25});
  fill(far, std::array{1e-12, 2e-12, 1.5e-12});
  far.limit = 1e-3;
  fill(same, std::array{4e-5, 4e-5, 4e-5});
  s.series = {make("No points"), one, zero, bad, only_nan, negative, far, same};
  conclude(s);
  return s;
}

ScenarioResult ended(std::string name, Status status, std::string reason) {
  ScenarioResult s;
  s.name = std::move(name);
  s.status = status;
  s.phase = Phase::kSetup;
  s.reason = std::move(reason);
  return s;
}

}  // namespace

Report example_pass() {
  Report r = report("nightly");
  r.scenarios = {cp_equivalence(false), engines()};
  conclude(r);
  return r;
}

Report example_fail() {
  Report r = report("nightly");
  r.scenarios = {engines(), cp_equivalence(true)};
  conclude(r);
  return r;
}

Report example_mixed() {
  Report r = report("every <kind> of \"ending\" & 'escape'");
  ScenarioResult golden = ended("golden_missing",
                                Status::kError,
                                "golden/data/wide/3.h5 is not there; make it with 'lockstep golden "
                                "make wide'");
  golden.description = "Compares with a golden that is not there";
  golden.error_kind = ErrorKind::kGolden;
  ScenarioResult stalled = ended("stalled_rank", Status::kPass, "");
  stalled.description = "Does a rank that stops answering end the run?";
  stalled.expected = "exit 3, deadline of cp/state_handoff";
  stalled.comparisons = {compared("a", "b", "logits", "ulp_max", 5, 0)};
  ScenarioResult missed =
      ended("stale_conv_cache", Status::kFail, "the run ended with exit 0 and no detector fired");
  missed.expected = "exit 1, detector weight_version";
  ScenarioResult odd;
  odd.name = "<script>alert('x')</script>";
  odd.description = "Names | with \x01 bytes \xff of `any` kind";
  Comparison skipped = compared("a", "b", "grads", "cosine", 0, {});
  skipped.status = Status::kSkipped;
  skipped.reason = "run b has no gradients";
  Comparison broken = skipped;
  broken.status = Status::kError;
  broken.error_kind = ErrorKind::kShape;
  broken.reason = "logits: left is [7, 128] and right [8, 128]";
  odd.comparisons = {compared("left & right", "<b>", "logits]]>", "rel_l2", kNan, 1e-5),
                     compared("a", "b", "grads", "rel_l2", kInfinity, 1e-5, 1e-7),
                     compared("a", "b", "loss", "abs", 1.00004e-6, 1e-6),
                     skipped,
                     broken,
                     compared("a", "b", "time", "s", 2.5, {})};
  odd.runs = {run("a", "trainer", "float32", "1 rank")};
  odd.runs[0].numerics = {{"D01", "hc_fn", "bf16", "fp32"}};
  r.scenarios = {cp_equivalence(true),
                 golden,
                 stalled,
                 missed,
                 ended("cuda_forward", Status::kSkipped, "no CUDA device on this machine"),
                 odd,
                 awkward_series()};
  conclude(r);
  return r;
}

Report example_huge() {
  Noise noise;
  Report r = report("every topology");
  for (int i = 0; i < 240; ++i) {
    const bool differs = i % 60 == 17;
    ScenarioResult s;
    s.name = fmt::format("topology_{:03}", i);
    s.description =
        fmt::format("fsdp={} cp={} ep={} against one rank", 1 + i % 4, 1 + i % 8, 1 + i % 2);
    s.tags = {"nightly"};
    s.seconds = 1 + 8 * noise();
    s.runs = {run("one", "trainer", "float32", "1 rank"),
              run("many", "trainer", "float32", fmt::format("cp={}", 1 + i % 8))};
    for (int layer = 0; layer < 14; ++layer) {
      const double limit = 2e-5;
      const bool is_odd = layer == 5;
      const double value =
          differs && is_odd ? limit * 40 : limit * std::pow(10.0, -3 * noise() - 0.02);
      Comparison c = compared(
          "one", "many", fmt::format("layers.{}.out", layer), "rel_l2", value, limit, 5e-7);
      for (int rank = 0; is_odd && rank < 64; ++rank) {
        c.rank = 41;
        c.ranks.push_back({rank,
                           fmt::format("fsdp {}, cp {}", rank / 8, rank % 8),
                           rank == 41 ? value : value * noise(),
                           ""});
      }
      for (int row = 0; is_odd && i == 17 && row < 1200; ++row) {
        Detail d;
        d.name = fmt::format("layers.{}.moe.experts.{}.down_proj.weight", row / 288, row % 288);
        d.value = 4e-6 * noise();
        d.limit = row == 700 ? 1e-9 : 1e-5;
        d.status = d.value > *d.limit ? Status::kFail : Status::kPass;
        c.details.push_back(d);
      }
      s.comparisons.push_back(c);
    }
    if (differs) {
      s.series = {tokens("many vs one", i == 17 ? 131072 : 4096, 3e-6, noise),
                  tokens("many vs golden", 4096, 8e-6, noise)};
      for (int line = 0; line < 10; ++line) {
        s.series.push_back(
            layers(fmt::format("cp={}", line + 1), 62, 1e-8 * (line + 1), 1.12, noise));
      }
    }
    r.scenarios.push_back(std::move(s));
  }
  conclude(r);
  return r;
}

Report example_skipped() {
  Report r = report("gpu");
  for (const auto* name : {"cuda_forward", "cuda_backward"}) {
    r.scenarios.push_back(ended(
        name, Status::kSkipped, "this build has no CUDA (lockstep doctor says what to install)"));
    r.scenarios.back().description = "Does the device path match the CPU?";
  }
  conclude(r);
  return r;
}

Report example_empty() {
  Report r;
  conclude(r);
  return r;
}

std::vector<std::pair<std::string, Report>> all_examples() {
  return {{"pass", example_pass()},
          {"fail", example_fail()},
          {"mixed", example_mixed()},
          {"huge", example_huge()},
          {"skipped", example_skipped()},
          {"empty", example_empty()}};
}

}  // namespace lockstep::harness
