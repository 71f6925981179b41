// Checks and times the KDA backward kernels on the device, without a test framework.
//   kda_gradient_device_test check OUT.json     correctness on awkward shapes, adversarial inputs
//   kda_gradient_device_test time OUT.json      timings with the forward pass, memory, errors
//   kda_gradient_device_test small OUT.json     a few small shapes once, for compute-sanitizer
//   kda_gradient_device_test profile OUT.json   two passes at 8192 tokens, for a profiler
// Exit code 0 only if every check passed.

#include <array>

#include "tests/device/kda_inputs.cuh"

namespace lockstep::device_test {
namespace {

using model::KdaBackwardArgs;

enum Gradient { kQ, kK, kV, kF, kBetaLogit, kALog, kDtBias, kState, kGradients };
constexpr const char* kNames[kGradients] = {
    "dq", "dk", "dv", "df", "dbeta", "da_log", "ddt_bias", "dstate"};
/// Relative Frobenius error against float64 that a check may show: the worst case (beta 1, gates
/// near 0) and a third.
using Bounds = std::array<double, kGradients>;
constexpr Bounds kBounds = {7e-3, 8.5e-3, 7e-3, 8.5e-3, 1.1e-2, 2.5e-2, 1.2e-2, 7e-3};

struct Extra {
  bool dfinal = true, dinitial = true;
  float do_scale = 1.0f;
};

/// What a backward pass reads beside the forward pass's inputs.
struct Incoming {
  DeviceArray<uint16_t> dout;
  DeviceArray<float> dfinal;
  Incoming(const Inputs& in, const Extra& extra, uint32_t seed)
      : dout(in.elements()), dfinal(extra.dfinal ? in.documents * in.heads * size_t{kD} * kD : 0) {
    fill_bf16<<<1024, 256>>>(dout.get(), dout.count(), seed * 16 + 8, extra.do_scale, 0.0f);
    fill_float<<<1024, 256>>>(dfinal.get(), dfinal.count(), seed * 16 + 9, 0.3f * extra.do_scale);
    must(cudaDeviceSynchronize(), "incoming gradients");
  }
};

struct Output {
  std::vector<uint16_t> rows[4];  // dq, dk, dv, df
  std::vector<uint16_t> dbeta;
  std::vector<float> da_log, ddt_bias, dstate;
  bool operator==(const Output& other) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
    };
    for (int i = 0; i < 4; ++i)
      if (rows[i] != other.rows[i]) return false;
    return dbeta == other.dbeta && same(da_log, other.da_log) && same(ddt_bias, other.ddt_bias) &&
           same(dstate, other.dstate);
  }
};

void must_run(const model::KdaCudaResult& result, const std::string& name) {
  if (result) return;
  std::fprintf(stderr,
               "%s: status %d cuda %d: %s\n",
               name.c_str(),
               static_cast<int>(result.status),
               result.cuda_error,
               result.detail);
  std::exit(2);
}

/// Forward and backward once, on poisoned outputs and workspaces with guard bands behind them.
Output run(KdaForwardArgs f,
           const uint16_t* dout,
           const float* dfinal,
           bool dinitial,
           const std::string& name) {
  constexpr size_t kGuard = 4096;
  const size_t elements = static_cast<size_t>(f.tokens) * f.heads * kD;
  const size_t states = static_cast<size_t>(f.documents) * f.heads * kD * kD;
  const size_t forward_bytes = model::kda_forward_workspace_bytes(f.tokens, f.documents, f.heads);
  const size_t bytes = model::kda_backward_workspace_bytes(f.tokens, f.documents, f.heads);
  const size_t checkpoint_bytes = model::kda_checkpoint_bytes(f.tokens, f.documents, f.heads);
  DeviceArray<uint16_t> o(elements);
  DeviceArray<float> final_state(states);
  DeviceArray<unsigned char> forward_workspace(forward_bytes), workspace(bytes + kGuard);
  DeviceArray<unsigned char> checkpoints(checkpoint_bytes + kGuard);
  DeviceArray<uint16_t> dq(elements + kGuard), dk(elements + kGuard), dv(elements + kGuard),
      df(elements + kGuard), dbeta(elements / kD + kGuard);
  DeviceArray<float> da_log(f.heads + kGuard), ddt_bias(f.heads * kD + kGuard);
  DeviceArray<float> dstate(dinitial ? states + kGuard : 0);
  f.o_THV = o.get();
  f.final_state_NHKV = final_state.get();
  f.checkpoints = reinterpret_cast<float*>(checkpoints.get());
  must_run(model::kda_forward(f, forward_workspace.get(), forward_bytes, nullptr), name);
  KdaBackwardArgs a;
  a.forward = f;
  a.forward.o_THV = nullptr;
  a.forward.final_state_NHKV = nullptr;
  a.do_THV = dout;
  a.dfinal_state_NHKV = dfinal;
  a.dq_THK = dq.get();
  a.dk_THK = dk.get();
  a.dv_THV = dv.get();
  a.df_THK = df.get();
  a.dbeta_logit_TH = dbeta.get();
  a.da_log_H = da_log.get();
  a.ddt_bias_HK = ddt_bias.get();
  a.dinitial_state_NHKV = dinitial ? dstate.get() : nullptr;
  must_run(model::kda_backward(a, workspace.get(), bytes, nullptr), name);
  must(cudaDeviceSynchronize(), name.c_str());
  bool intact = true;
  const auto take = [&](auto& from, auto& to, size_t count) {
    to = from.download();
    for (size_t i = count; i < to.size(); ++i) {
      const auto poison = to[i];
      const unsigned char* byte = reinterpret_cast<const unsigned char*>(&poison);
      for (size_t b = 0; b < sizeof poison; ++b) intact = intact && byte[b] == 0xff;
    }
    to.resize(count);
  };
  Output out;
  take(dq, out.rows[0], elements);
  take(dk, out.rows[1], elements);
  take(dv, out.rows[2], elements);
  take(df, out.rows[3], elements);
  take(dbeta, out.dbeta, elements / kD);
  take(da_log, out.da_log, f.heads);
  take(ddt_bias, out.ddt_bias, f.heads * kD);
  if (dinitial) take(dstate, out.dstate, states);
  std::vector<unsigned char> scratch;
  const auto tail = [&](const DeviceArray<unsigned char>& from, size_t count) {
    scratch.resize(kGuard);
    must(cudaMemcpy(scratch.data(), from.get() + count, kGuard, cudaMemcpyDeviceToHost), "guard");
    for (const unsigned char b : scratch) intact = intact && b == 0xff;
  };
  tail(workspace, bytes);
  tail(checkpoints, checkpoint_bytes);
  expect(intact, name + ": wrote outside its outputs");
  return out;
}

/// Errors of the given heads' gradients against the float64 recurrence.
std::array<Error, kGradients> errors(const Inputs& in,
                                     const Incoming& incoming,
                                     const Output& out,
                                     const std::vector<int>& heads) {
  struct Task {
    int64_t document;
    int head;
  };
  std::vector<Task> tasks;
  for (int64_t d = 0; d < in.documents; ++d)
    for (const int h : heads) tasks.push_back({d, h});
  const std::vector<float> a_log = in.a_log.download(), dt_bias = in.dt_bias.download();
  const std::vector<float> initial = in.state.download(), dfinal = incoming.dfinal.download();
  std::vector<std::array<ErrorSum, kGradients>> sums(tasks.size());
  std::vector<HeadGradients> truths(tasks.size());
  on_all_cores(tasks.size(), [&](size_t index) {
    const auto [d, h] = tasks[index];
    const int64_t first = in.bounds[d], rows = in.bounds[d + 1] - first;
    const auto q = head_rows(in.q, first, rows, in.heads, h, kD);
    const auto k = head_rows(in.k, first, rows, in.heads, h, kD);
    const auto v = head_rows(in.v, first, rows, in.heads, h, kD);
    const auto f = head_rows(in.f, first, rows, in.heads, h, kD);
    const auto dout = head_rows(incoming.dout, first, rows, in.heads, h, kD);
    const auto beta = head_rows(in.beta, first, rows, in.heads, h, 1);
    const size_t at = (static_cast<size_t>(d) * in.heads + h) * kD * kD;
    std::vector<double> state(kD * kD, 0.0), dstate(kD * kD, 0.0);
    if (!initial.empty()) std::copy_n(initial.begin() + at, kD * kD, state.begin());
    if (!dfinal.empty()) std::copy_n(dfinal.begin() + at, kD * kD, dstate.begin());
    const HeadInput input = {q.data(),
                             k.data(),
                             v.data(),
                             f.data(),
                             beta.data(),
                             rows,
                             a_log[h],
                             &dt_bias[h * kD],
                             -5.0};
    HeadGradients& g = truths[index];
    g = kda_recurrence_backward(input, state, dout.data(), dstate);
    auto& sum = sums[index];
    const std::vector<double>* of[4] = {&g.dq, &g.dk, &g.dv, &g.df};
    for (int64_t t = 0; t < rows; ++t) {
      for (int i = 0; i < 4; ++i)
        for (int c = 0; c < kD; ++c)
          sum[i].add(from_bf16(out.rows[i][((first + t) * in.heads + h) * kD + c]),
                     (*of[i])[t * kD + c]);
      sum[kBetaLogit].add(from_bf16(out.dbeta[(first + t) * in.heads + h]), g.dbeta[t]);
    }
    if (!out.dstate.empty())
      for (int i = 0; i < kD * kD; ++i) sum[kState].add(out.dstate[at + i], g.dstate[i]);
  });
  std::array<ErrorSum, kGradients> total;
  for (const auto& sum : sums)
    for (int i = 0; i < kGradients; ++i) total[i].add(sum[i]);
  for (const int h : heads) {
    double da_log = 0;
    std::vector<double> ddt_bias(kD, 0.0);
    for (size_t i = 0; i < tasks.size(); ++i) {
      if (tasks[i].head != h) continue;
      da_log += truths[i].da_log;
      for (int c = 0; c < kD; ++c) ddt_bias[c] += truths[i].ddt_bias[c];
    }
    total[kALog].add(out.da_log[h], da_log);
    for (int c = 0; c < kD; ++c) total[kDtBias].add(out.ddt_bias[h * kD + c], ddt_bias[c]);
  }
  std::array<Error, kGradients> result;
  for (int i = 0; i < kGradients; ++i) result[i] = total[i].result();
  return result;
}

void report(const std::string& name,
            const std::array<Error, kGradients>& e,
            const Bounds& bounds,
            const char* kind) {
  std::string line = std::string("\"") + kind + "\": \"" + name + "\"";
  bool good = true;
  std::printf("%-40s", name.c_str());
  for (int i = 0; i < kGradients; ++i) {
    const bool fine = e[i].frobenius <= bounds[i] && e[i].not_finite == 0;
    good = good && fine;
    char text[160];
    std::snprintf(text,
                  sizeof text,
                  ", \"%s\": %.3e, \"%s_max\": %.3e, \"%s_not_finite\": %zu",
                  kNames[i],
                  e[i].frobenius,
                  kNames[i],
                  e[i].largest,
                  kNames[i],
                  e[i].not_finite);
    line += text;
    std::printf(" %s %.2e%s", kNames[i], e[i].frobenius, fine ? "" : "(!)");
    if (e[i].not_finite > 0) std::printf("[%zu NaN]", e[i].not_finite);
  }
  std::printf("%s\n", good ? "" : "  FAIL");
  expect(good, name + ": error against float64");
  record(line);
  std::fflush(stdout);
}

void check_problem(const Problem& p,
                   int repeats,
                   const Extra& extra = {},
                   const Bounds& bounds = kBounds) {
  const Inputs in(p);
  const Incoming incoming(in, extra, p.seed);
  std::vector<int> heads;
  for (int h = 0; h < p.heads; h += std::max(1, p.heads / 4)) heads.push_back(h);
  const float* dfinal = extra.dfinal ? incoming.dfinal.get() : nullptr;
  const auto once = [&] {
    return run(arguments(in), incoming.dout.get(), dfinal, extra.dinitial, p.name);
  };
  const Output out = once();
  report(p.name, errors(in, incoming, out, heads), bounds, "check");
  for (int i = 0; i < repeats; ++i)
    expect(once() == out, p.name + ": runs must give the same bytes");
}

/// Each document of a packed batch must give the bytes it gives alone.
void check_packing() {
  const Inputs in({"packed", {70, 0, 1, 129, 64, 15, 200}, 3});
  const Incoming incoming(in, {}, 1);
  const Output packed =
      run(arguments(in), incoming.dout.get(), incoming.dfinal.get(), true, "packed");
  for (int64_t d = 0; d < in.documents; ++d) {
    const int64_t first = in.bounds[d], rows = in.bounds[d + 1] - first;
    KdaForwardArgs a = arguments(in);
    DeviceArray<int64_t> cu(2);
    cu.upload({0, rows});
    const size_t at = static_cast<size_t>(first) * in.heads * kD;
    const size_t state_at = static_cast<size_t>(d) * in.heads * kD * kD;
    a.tokens = rows;
    a.documents = 1;
    a.cu_seqlens = cu.get();
    a.q_THK += at;
    a.k_THK += at;
    a.v_THV += at;
    a.f_THK += at;
    a.beta_logit_TH += first * in.heads;
    a.initial_state_NHKV += state_at;
    const Output alone =
        run(a, incoming.dout.get() + at, incoming.dfinal.get() + state_at, true, "alone");
    bool same = std::memcmp(alone.dstate.data(),
                            packed.dstate.data() + state_at,
                            alone.dstate.size() * sizeof(float)) == 0;
    for (int i = 0; i < 4; ++i)
      same = same && std::equal(alone.rows[i].begin(),
                                alone.rows[i].end(),
                                packed.rows[i].begin() + static_cast<int64_t>(at));
    same =
        same &&
        std::equal(alone.dbeta.begin(), alone.dbeta.end(), packed.dbeta.begin() + first * in.heads);
    expect(same, "document " + std::to_string(d) + " packed and alone must give the same bytes");
  }
}

/// Zeros given and left out must give the same bytes; inputs are not written to.
void check_zeros_and_inputs() {
  const Inputs in({"zeros", {130, 0, 64}, 2});
  const Incoming incoming(in, {}, 1);
  KdaForwardArgs a = arguments(in);
  DeviceArray<float> zeros(in.state.count());
  zeros.fill_bytes(0);
  a.initial_state_NHKV = zeros.get();
  const Output given = run(a, incoming.dout.get(), zeros.get(), true, "zeros");
  a.initial_state_NHKV = nullptr;
  expect(run(a, incoming.dout.get(), nullptr, true, "null") == given,
         "zero states given and left out must give the same bytes");
  const auto all = [&] {
    std::vector<std::vector<uint16_t>> r;
    for (const auto* x : {&in.q, &in.k, &in.v, &in.f, &in.beta, &incoming.dout})
      r.push_back(x->download());
    return r;
  };
  const auto before = all();
  run(arguments(in), incoming.dout.get(), incoming.dfinal.get(), true, "inputs");
  expect(all() == before, "inputs must not be written to");
}

void check_refusals() {
  const Inputs in({"refusals", {70}, 2});
  const Incoming incoming(in, {}, 1);
  DeviceArray<uint16_t> rows(in.elements());
  const size_t bytes = model::kda_backward_workspace_bytes(in.tokens, in.documents, in.heads);
  DeviceArray<unsigned char> workspace(bytes);
  DeviceArray<float> states(in.state.count());
  KdaBackwardArgs good;
  good.forward = arguments(in);
  good.forward.checkpoints = states.get();
  good.do_THV = incoming.dout.get();
  good.dq_THK = good.dk_THK = good.dv_THV = good.df_THK = good.dbeta_logit_TH = rows.get();
  good.da_log_H = good.ddt_bias_HK = states.get();
  const auto status = [&](const KdaBackwardArgs& a, size_t size) {
    const model::KdaCudaResult result = model::kda_backward(a, workspace.get(), size, nullptr);
    expect(result || result.detail[0] != '\0', "a refusal must say why");
    return result.status;
  };
  using model::KdaCudaStatus;
  expect(status(good, bytes - 1) == KdaCudaStatus::kWorkspaceTooSmall, "small workspace");
  KdaBackwardArgs a = good;
  a.forward.checkpoints = nullptr;
  expect(status(a, bytes) == KdaCudaStatus::kBadArgument, "null checkpoints");
  a = good;
  a.dk_THK = nullptr;
  expect(status(a, bytes) == KdaCudaStatus::kBadArgument, "null dk");
  a = good;
  a.do_THV += 1;
  expect(status(a, bytes) == KdaCudaStatus::kBadArgument, "misaligned do");
  a = good;
  a.forward.lower_bound = -5.5f;
  expect(status(a, bytes) == KdaCudaStatus::kBadArgument, "lower bound below -5");
}

void check_all() {
  check_refusals();
  for (const int64_t n : {1, 15, 16, 17, 63, 64, 65, 127, 128, 193})
    check_problem({"length " + std::to_string(n), {n}, 2}, 1);
  check_problem({"empty only", {0, 0}, 2}, 0);
  check_problem({"no initial state", {100}, 2, Gate::kMixed, Key::kRandom, Beta::kRandom, false},
                0,
                {false, false});
  check_problem({"packed", {70, 0, 1, 129, 0, 64, 15, 1, 200}, 5}, 1);
  const std::vector<int64_t> two = {700, 321};
  check_problem({"gates all -5", two, 2, Gate::kStrong}, 0);
  check_problem({"gates near 0", two, 2, Gate::kWeak}, 0);
  check_problem({"one channel at -5", two, 2, Gate::kChannels}, 0);
  check_problem({"equal keys, mixed gates", two, 2, Gate::kMixed, Key::kEqual}, 0);
  check_problem({"zero keys", two, 2, Gate::kMixed, Key::kZero}, 0);
  check_problem({"beta 0", two, 2, Gate::kMixed, Key::kRandom, Beta::kZero}, 0);
  check_problem({"beta 1", two, 2, Gate::kMixed, Key::kRandom, Beta::kOne}, 0);
  check_problem({"beta 1, gates near 0", two, 2, Gate::kWeak, Key::kRandom, Beta::kOne}, 0);
  check_problem({"do times 1e12, gates -5", two, 2, Gate::kStrong}, 0, {true, true, 1e12f});
  check_problem({"do times 1e-12", two, 2}, 0, {true, true, 1e-12f});
  // Several windows: 64 chunks each at 128 heads, 1024 at few heads.
  check_problem({"128 heads, windows", {4000, 300, 0, 5000}, 128}, 1);
  check_problem({"64 heads, 2000 tokens", {2000}, 64}, 10);
  check_problem({"64 heads, windows, packed", {8200, 511, 0, 64, 9025, 1, 300}, 64}, 2);
  check_packing();
  check_zeros_and_inputs();
}

void check_small() {
  check_problem({"small", {70, 0, 1, 129}, 2}, 0);
  check_problem({"small, gates -5", {65}, 2, Gate::kStrong}, 0);
}

void time_all(bool profile) {
  struct Row {
    const char* name;
    std::vector<int64_t> lengths;
    int heads;
    bool with_errors;
  };
  std::vector<Row> rows = {{"8192", {8192}, 64, true},
                           {"32768", {32768}, 64, true},
                           {"131072", {131072}, 64, false},
                           {"32 x 1024", std::vector<int64_t>(32, 1024), 64, false},
                           {"8192, 8 heads", {8192}, 8, false}};
  if (profile) rows = {{"8192", {8192}, 64, false}};
  for (const Row& row : rows) {
    size_t free_before = 0, free_after = 0, total = 0;
    must(cudaMemGetInfo(&free_before, &total), "memory");
    Problem p{row.name, row.lengths, row.heads};
    p.state = false;
    const Inputs in(p);
    Extra extra;
    extra.dfinal = false;
    const Incoming incoming(in, extra, p.seed);
    KdaForwardArgs f = arguments(in);
    const size_t elements = in.elements();
    const size_t forward_bytes = model::kda_forward_workspace_bytes(f.tokens, f.documents, f.heads);
    const size_t bytes = model::kda_backward_workspace_bytes(f.tokens, f.documents, f.heads);
    const size_t checkpoint_bytes = model::kda_checkpoint_bytes(f.tokens, f.documents, f.heads);
    DeviceArray<uint16_t> o(elements), dq(elements), dk(elements), dv(elements), df(elements),
        dbeta(elements / kD);
    DeviceArray<unsigned char> workspace(std::max(bytes, forward_bytes)),
        checkpoints(checkpoint_bytes);
    DeviceArray<float> da_log(f.heads), ddt_bias(f.heads * kD);
    must(cudaMemGetInfo(&free_after, &total), "memory");
    f.o_THV = o.get();
    f.checkpoints = reinterpret_cast<float*>(checkpoints.get());
    KdaBackwardArgs a;
    a.forward = f;
    a.do_THV = incoming.dout.get();
    a.dq_THK = dq.get();
    a.dk_THK = dk.get();
    a.dv_THV = dv.get();
    a.df_THK = df.get();
    a.dbeta_logit_TH = dbeta.get();
    a.da_log_H = da_log.get();
    a.ddt_bias_HK = ddt_bias.get();
    const auto forward = [&] {
      must_run(model::kda_forward(f, workspace.get(), forward_bytes, nullptr), row.name);
    };
    const auto backward = [&] {
      must_run(model::kda_backward(a, workspace.get(), bytes, nullptr), row.name);
    };
    if (profile) {
      for (int i = 0; i < 2; ++i) {
        forward();
        backward();
      }
      must(cudaDeviceSynchronize(), "profile");
      return;
    }
    const auto median = [&](const auto& work) {
      std::vector<float> times;
      cudaEvent_t begin, end;
      must(cudaEventCreate(&begin), "event");
      must(cudaEventCreate(&end), "event");
      const int count = in.tokens > 100000 ? 12 : 40;
      for (int i = 0; i < count + 3; ++i) {
        must(cudaEventRecord(begin), "record");
        work();
        must(cudaEventRecord(end), "record");
        must(cudaEventSynchronize(end), row.name);
        float ms = 0;
        must(cudaEventElapsedTime(&ms, begin, end), "elapsed");
        if (i >= 3) times.push_back(ms);
      }
      cudaEventDestroy(begin);
      cudaEventDestroy(end);
      std::sort(times.begin(), times.end());
      return static_cast<double>(times[times.size() / 2]);
    };
    const double forward_ms = median(forward), backward_ms = median(backward);
    const double both_ms = median([&] {
      forward();
      backward();
    });
    const double gigabytes = static_cast<double>(free_before - free_after) * 1e-9;
    std::printf("T %-16s forward %.4f backward %.4f both %.4f ms, workspace %.3f GB, all %.2f GB\n",
                row.name,
                forward_ms,
                backward_ms,
                both_ms,
                static_cast<double>(bytes) * 1e-9,
                gigabytes);
    char text[400];
    std::snprintf(text,
                  sizeof text,
                  "\"time\": \"%s\", \"tokens\": %" PRId64
                  ", \"heads\": %d, \"forward_ms\": %.4f, \"backward_ms\": %.4f, \"both_ms\": "
                  "%.4f, \"workspace_bytes\": %zu, \"checkpoint_bytes\": %zu, \"all_gb\": %.3f",
                  row.name,
                  in.tokens,
                  row.heads,
                  forward_ms,
                  backward_ms,
                  both_ms,
                  bytes,
                  checkpoint_bytes,
                  gigabytes);
    record(text);
    std::fflush(stdout);
    if (row.with_errors) {
      Output out;
      const DeviceArray<uint16_t>* from[4] = {&dq, &dk, &dv, &df};
      for (int i = 0; i < 4; ++i) out.rows[i] = from[i]->download();
      out.dbeta = dbeta.download();
      out.da_log = da_log.download();
      out.ddt_bias = ddt_bias.download();
      report(row.name, errors(in, incoming, out, {0, row.heads - 1}), kBounds, "error_at");
    }
  }
}

}  // namespace
}  // namespace lockstep::device_test

int main(int argc, char** argv) {
  using namespace lockstep::device_test;
  const std::string mode = argc == 3 ? argv[1] : "";
  if (mode != "check" && mode != "time" && mode != "small" && mode != "profile") {
    std::fprintf(stderr, "usage: %s check|time|small|profile OUT.json\n", argv[0]);
    return 2;
  }
  open_records(argv[2]);
  if (mode == "check") check_all();
  if (mode == "small") check_small();
  if (mode == "time" || mode == "profile") time_all(mode == "profile");
  return close_records();
}
