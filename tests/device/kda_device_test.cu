// Checks and times the KDA forward kernels on the device, without a test framework.
//   kda_device_test check OUT.json     correctness on awkward shapes and adversarial inputs
//   kda_device_test time OUT.json      timings, and errors of the timed shapes on two heads
//   kda_device_test quick OUT.json     timings only
//   kda_device_test small OUT.json     a few small shapes once, for compute-sanitizer
//   kda_device_test profile OUT.json   two calls at 8192 tokens, for a profiler
// Exit code 0 only if every check passed.

#include "tests/device/kda_inputs.cuh"

namespace lockstep::device_test {
namespace {

constexpr double kErrorBound = 8e-3;  // relative Frobenius, bf16 operands

struct Output {
  std::vector<uint16_t> o;
  std::vector<float> state;
  bool operator==(const Output& other) const {
    return o == other.o && state.size() == other.state.size() &&
           std::memcmp(state.data(), other.state.data(), state.size() * sizeof(float)) == 0;
  }
};

/// Runs once on poisoned outputs and workspace, with guard bands behind the outputs.
Output run(KdaForwardArgs a, const std::string& name) {
  constexpr size_t kGuard = 4096;
  const size_t o_count = static_cast<size_t>(a.tokens) * a.heads * kD;
  const size_t state_count = static_cast<size_t>(a.documents) * a.heads * kD * kD;
  DeviceArray<uint16_t> o(o_count + kGuard);
  DeviceArray<float> state(state_count + kGuard);
  const size_t bytes = model::kda_forward_workspace_bytes(a.tokens, a.documents, a.heads);
  DeviceArray<unsigned char> workspace(bytes + kGuard);
  o.fill_bytes(0xff);
  state.fill_bytes(0xff);
  workspace.fill_bytes(0xff);
  a.o_THV = o.get();
  a.final_state_NHKV = state.get();
  const model::KdaCudaResult result = model::kda_forward(a, workspace.get(), bytes, nullptr);
  if (!result) {
    std::fprintf(stderr,
                 "%s: status %d cuda %d: %s\n",
                 name.c_str(),
                 static_cast<int>(result.status),
                 result.cuda_error,
                 result.detail);
    std::exit(2);
  }
  must(cudaDeviceSynchronize(), name.c_str());
  Output out{o.download(), state.download()};
  const std::vector<unsigned char> scratch = workspace.download();
  bool intact = true;
  for (size_t i = 0; i < kGuard; ++i)
    intact = intact && out.o[o_count + i] == 0xffff && scratch[bytes + i] == 0xff &&
             std::memcmp(&out.state[state_count + i], "\xff\xff\xff\xff", 4) == 0;
  expect(intact, name + ": wrote outside its outputs");
  out.o.resize(o_count);
  out.state.resize(state_count);
  return out;
}

/// Error of o and the final state of the given heads against the float64 recurrence.
std::pair<Error, Error> errors(const Inputs& in, const Output& out, const std::vector<int>& heads) {
  struct Task {
    int64_t document;
    int head;
  };
  std::vector<Task> tasks;
  for (int64_t d = 0; d < in.documents; ++d)
    for (const int h : heads) tasks.push_back({d, h});
  const std::vector<float> a_log = in.a_log.download(), dt_bias = in.dt_bias.download();
  std::vector<float> initial;
  if (in.state.count() > 0) initial = in.state.download();
  std::vector<ErrorSum> of_o(tasks.size()), of_state(tasks.size());
  const auto work = [&](size_t index) {
    const auto [d, h] = tasks[index];
    const int64_t first = in.bounds[d], rows = in.bounds[d + 1] - first;
    const auto q = head_rows(in.q, first, rows, in.heads, h, kD);
    const auto k = head_rows(in.k, first, rows, in.heads, h, kD);
    const auto v = head_rows(in.v, first, rows, in.heads, h, kD);
    const auto f = head_rows(in.f, first, rows, in.heads, h, kD);
    const auto beta = head_rows(in.beta, first, rows, in.heads, h, 1);
    const size_t at = (static_cast<size_t>(d) * in.heads + h) * kD * kD;
    std::vector<double> state(kD * kD, 0.0), o(static_cast<size_t>(rows) * kD);
    if (!initial.empty()) std::copy_n(initial.begin() + at, kD * kD, state.begin());
    kda_recurrence({q.data(),
                    k.data(),
                    v.data(),
                    f.data(),
                    beta.data(),
                    rows,
                    a_log[h],
                    &dt_bias[h * kD],
                    -5.0},
                   state,
                   o.data());
    for (int64_t t = 0; t < rows; ++t)
      for (int c = 0; c < kD; ++c)
        of_o[index].add(from_bf16(out.o[((first + t) * in.heads + h) * kD + c]), o[t * kD + c]);
    for (int i = 0; i < kD * kD; ++i) of_state[index].add(out.state[at + i], state[i]);
  };
  on_all_cores(tasks.size(), work);
  ErrorSum o, state;
  for (const auto& e : of_o) o.add(e);
  for (const auto& e : of_state) state.add(e);
  return {o.result(), state.result()};
}

std::string error_fields(const std::pair<Error, Error>& e) {
  char text[320];
  std::snprintf(
      text,
      sizeof text,
      "\"o_rel_fro\": %.3e, \"o_max\": %.3e, \"state_rel_fro\": %.3e, \"state_max\": %.3e, "
      "\"not_finite\": %zu",
      e.first.frobenius,
      e.first.largest,
      e.second.frobenius,
      e.second.largest,
      e.first.not_finite + e.second.not_finite);
  return text;
}

void check_problem(const Problem& p, int repeats) {
  const Inputs in(p);
  std::vector<int> heads;
  for (int h = 0; h < p.heads; h += std::max(1, p.heads / 4)) heads.push_back(h);
  const Output out = run(arguments(in), p.name);
  const auto e = errors(in, out, heads);
  const bool good = e.first.frobenius <= kErrorBound && e.second.frobenius <= kErrorBound &&
                    e.first.not_finite + e.second.not_finite == 0;
  expect(good, p.name + ": error against float64");
  std::printf("%-44s o %.2e (max %.2e)  state %.2e (max %.2e)%s\n",
              p.name.c_str(),
              e.first.frobenius,
              e.first.largest,
              e.second.frobenius,
              e.second.largest,
              good ? "" : "  FAIL");
  record("\"check\": \"" + p.name + "\", " + error_fields(e));
  for (int i = 0; i < repeats; ++i)
    expect(run(arguments(in), p.name) == out, p.name + ": runs must give the same bytes");
  std::fflush(stdout);
}

/// Each document of a packed batch must give the bytes it gives alone.
void check_packing() {
  Problem p{"packed", {70, 0, 1, 129, 64, 15, 200}, 3};
  const Inputs in(p);
  const Output packed = run(arguments(in), "packed");
  for (int64_t d = 0; d < in.documents; ++d) {
    const int64_t first = in.bounds[d], rows = in.bounds[d + 1] - first;
    KdaForwardArgs a = arguments(in);
    DeviceArray<int64_t> cu(2);
    cu.upload({0, rows});
    const size_t at = static_cast<size_t>(first) * in.heads * kD;
    a.tokens = rows;
    a.documents = 1;
    a.cu_seqlens = cu.get();
    // A row offset keeps the 16-byte alignment of everything but the logits, which need none.
    a.q_THK += at;
    a.k_THK += at;
    a.v_THV += at;
    a.f_THK += at;
    a.beta_logit_TH += first * in.heads;
    const size_t state_at = static_cast<size_t>(d) * in.heads * kD * kD;
    a.initial_state_NHKV += state_at;
    const Output alone = run(a, "alone");
    const bool same =
        std::equal(alone.o.begin(), alone.o.end(), packed.o.begin() + at) &&
        std::memcmp(alone.state.data(), packed.state.data() + state_at, alone.state.size() * 4) ==
            0;
    expect(same, "document " + std::to_string(d) + " packed and alone must give the same bytes");
  }
}

void check_zero_state() {
  Problem p{"zero state", {130, 64}, 2};
  const Inputs in(p);
  KdaForwardArgs a = arguments(in);
  DeviceArray<float> zeros(in.state.count());
  zeros.fill_bytes(0);
  a.initial_state_NHKV = zeros.get();
  const Output explicit_zeros = run(a, "zeros");
  a.initial_state_NHKV = nullptr;
  expect(run(a, "null") == explicit_zeros,
         "zero state given and left out must give the same bytes");
}

/// Bad arguments are refused with a reason, before anything is launched.
void check_refusals() {
  const Inputs in({"refusals", {70}, 2});
  DeviceArray<uint16_t> o(in.elements());
  const size_t bytes = model::kda_forward_workspace_bytes(in.tokens, in.documents, in.heads);
  DeviceArray<unsigned char> workspace(bytes);
  KdaForwardArgs good = arguments(in);
  good.o_THV = o.get();
  const auto status = [&](const KdaForwardArgs& a, size_t size) {
    const model::KdaCudaResult result = model::kda_forward(a, workspace.get(), size, nullptr);
    expect(result || result.detail[0] != '\0', "a refusal must say why");
    return result.status;
  };
  using model::KdaCudaStatus;
  expect(status(good, bytes) == KdaCudaStatus::kOk, "good arguments must be accepted");
  expect(status(good, bytes - 1) == KdaCudaStatus::kWorkspaceTooSmall, "small workspace");
  KdaForwardArgs a = good;
  a.lower_bound = -5.5f;
  expect(status(a, bytes) == KdaCudaStatus::kBadArgument, "lower bound below -5");
  a = good;
  a.k_THK = nullptr;
  expect(status(a, bytes) == KdaCudaStatus::kBadArgument, "null k");
  a = good;
  a.v_THV += 1;
  expect(status(a, bytes) == KdaCudaStatus::kBadArgument, "misaligned v");
  a = good;
  a.documents = 0;
  expect(status(a, bytes) == KdaCudaStatus::kBadArgument, "tokens without documents");
  must(cudaDeviceSynchronize(), "refusals");
}

void check_all() {
  check_refusals();
  for (const int64_t n : {1, 15, 16, 17, 63, 64, 65, 127, 128, 193})
    check_problem({"length " + std::to_string(n), {n}, 2}, 1);
  check_problem({"empty only", {0, 0}, 2}, 0);
  check_problem({"no initial state", {100}, 2, Gate::kMixed, Key::kRandom, Beta::kRandom, false},
                0);
  check_problem({"packed", {70, 0, 1, 129, 0, 64, 15, 1, 200}, 5}, 1);
  const std::vector<int64_t> long_documents = {700, 321};
  check_problem({"gates all -5", long_documents, 2, Gate::kStrong}, 0);
  check_problem({"gates near 0", long_documents, 2, Gate::kWeak}, 0);
  check_problem({"one channel at -5", long_documents, 2, Gate::kChannels}, 0);
  check_problem(
      {"equal keys, gates near 0, beta 1", long_documents, 2, Gate::kWeak, Key::kEqual, Beta::kOne},
      0);
  check_problem({"equal keys, mixed gates", long_documents, 2, Gate::kMixed, Key::kEqual}, 0);
  check_problem(
      {"equal keys, gates -5, beta 1", long_documents, 2, Gate::kStrong, Key::kEqual, Beta::kOne},
      0);
  check_problem({"zero keys", long_documents, 2, Gate::kMixed, Key::kZero}, 0);
  check_problem({"beta 0", long_documents, 2, Gate::kMixed, Key::kRandom, Beta::kZero}, 0);
  check_problem({"beta 1", long_documents, 2, Gate::kMixed, Key::kRandom, Beta::kOne}, 0);
  check_problem({"beta 1, gates near 0", long_documents, 2, Gate::kWeak, Key::kRandom, Beta::kOne},
                0);
  check_problem({"64 heads, 2000 tokens", {2000}, 64}, 20);
  check_problem({"64 heads, packed", {511, 0, 64, 1025, 1, 300}, 64}, 20);
  check_problem({"70 heads (two launches), 150 tokens", {150}, 70}, 1);
  check_packing();
  check_zero_state();
}

/// Two calls at 8192 tokens, for a profiler.
void profile() {
  const Inputs in({"profile", {8192}, 64});
  for (int i = 0; i < 2; ++i) run(arguments(in), "profile");
}

void check_small() {
  check_problem({"small", {70, 0, 1, 129}, 2}, 0);
  check_problem({"small, gates -5", {65}, 1, Gate::kStrong}, 0);
}

/// Median milliseconds of one call, inputs rotated over two sets so that none stays in L2.
double median_ms(const std::vector<KdaForwardArgs>& sets,
                 void* workspace,
                 size_t bytes,
                 int count) {
  std::vector<float> times;
  cudaEvent_t begin, end;
  must(cudaEventCreate(&begin), "event");
  must(cudaEventCreate(&end), "event");
  for (int i = 0; i < count + 3; ++i) {
    must(cudaEventRecord(begin), "record");
    const auto result = model::kda_forward(sets[i % sets.size()], workspace, bytes, nullptr);
    must(cudaEventRecord(end), "record");
    if (!result) {
      std::fprintf(stderr, "timed run: %s\n", result.detail);
      std::exit(2);
    }
    must(cudaEventSynchronize(end), "timed run");
    float ms = 0;
    must(cudaEventElapsedTime(&ms, begin, end), "elapsed");
    if (i >= 3) times.push_back(ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void time_all(bool with_errors) {
  struct Row {
    const char* name;
    std::vector<int64_t> lengths;
    int heads;
  };
  std::vector<int64_t> many(32, 1024);
  const std::vector<Row> rows = {{"8192", {8192}, 64},
                                 {"32768", {32768}, 64},
                                 {"131072", {131072}, 64},
                                 {"32 x 1024", many, 64},
                                 {"8192, 32 heads", {8192}, 32},
                                 {"8192, 8 heads", {8192}, 8}};
  for (const Row& row : rows) {
    Problem p{row.name, row.lengths, row.heads};
    p.state = false;
    const Inputs first(p);
    p.seed = 2;
    const Inputs second(p);
    DeviceArray<uint16_t> o(first.elements());
    DeviceArray<float> state(first.documents * size_t{static_cast<size_t>(row.heads)} * kD * kD);
    const size_t bytes =
        model::kda_forward_workspace_bytes(first.tokens, first.documents, row.heads);
    DeviceArray<unsigned char> workspace(bytes);
    std::vector<KdaForwardArgs> sets = {arguments(first), arguments(second)};
    for (auto& a : sets) {
      a.o_THV = o.get();
      a.final_state_NHKV = state.get();
    }
    const int count = first.tokens > 100000 ? 30 : 60;
    const double ms = median_ms(sets, workspace.get(), bytes, count);
    const double again = median_ms(sets, workspace.get(), bytes, count);
    std::printf(
        "T %-16s %8.4f ms, again %8.4f, workspace %.1f MB\n", row.name, ms, again, bytes * 1e-6);
    char text[320];
    std::snprintf(text,
                  sizeof text,
                  "\"time\": \"%s\", \"tokens\": %" PRId64
                  ", \"heads\": %d, "
                  "\"ms\": %.4f, \"ms_again\": %.4f, \"workspace_bytes\": %zu",
                  row.name,
                  first.tokens,
                  row.heads,
                  ms,
                  again,
                  bytes);
    record(text);
    std::fflush(stdout);
    if (with_errors && row.lengths.size() == 1) {
      Output out = run(arguments(first), row.name);
      const auto e = errors(first, out, {0, row.heads - 1});
      expect(e.first.frobenius <= kErrorBound && e.first.not_finite == 0,
             std::string(row.name) + ": error against float64");
      std::printf(
          "T %-16s error o %.2e state %.2e\n", row.name, e.first.frobenius, e.second.frobenius);
      record(std::string("\"error_at\": \"") + row.name + "\", " + error_fields(e));
    }
  }
}

}  // namespace
}  // namespace lockstep::device_test

int main(int argc, char** argv) {
  using namespace lockstep::device_test;
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s check|time|quick|small|profile OUT.json\n", argv[0]);
    return 2;
  }
  const std::string mode = argv[1];
  open_records(argv[2]);
  if (mode == "check") check_all();
  if (mode == "small") check_small();
  if (mode == "profile") profile();
  if (mode == "time") time_all(true);
  if (mode == "quick") time_all(false);
  return close_records();
}
