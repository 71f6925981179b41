// Checks and times the KDA decode step on the device, without a test framework.
//   kda_decode_device_test check OUT.json     against the float64 recurrence
//   kda_decode_device_test time OUT.json      timings, beside a copy of as many bytes
//   kda_decode_device_test small OUT.json     a few small shapes once, for compute-sanitizer
// Exit code 0 only if every check passed.

#include "tests/device/kda_inputs.cuh"

namespace lockstep::device_test {
namespace {

using model::KdaDecodeArgs;
constexpr double kOutputBound = 2.5e-3;  // one bf16 rounding
constexpr double kStateBound = 1e-6;     // fp32

/// `sequences` rows over a pool of `slots` states; rows take slots in a scattered order.
struct Batch {
  Inputs in;  // one document of one token per row: its `state` has one slot per document
  DeviceArray<float> pool;
  DeviceArray<int32_t> slots;
  std::vector<int32_t> slot_of;
  int64_t count;
  Batch(const std::string& name,
        int64_t sequences,
        int heads,
        int64_t pool_slots,
        Gate gate,
        uint32_t seed)
      : in(Problem{name,
                   std::vector<int64_t>(sequences, 1),
                   heads,
                   gate,
                   Key::kRandom,
                   Beta::kRandom,
                   false,
                   seed}),
        pool(pool_slots * heads * size_t{kD} * kD),
        slots(sequences),
        count(pool_slots) {
    fill_float<<<1024, 256>>>(pool.get(), pool.count(), seed * 16 + 7, 0.5f);
    for (int64_t i = 0; i < sequences; ++i)
      slot_of.push_back(static_cast<int32_t>((i * 5 + 3) % pool_slots));  // 5 does not divide it
    slots.upload(slot_of);
    must(cudaDeviceSynchronize(), "batch");
  }
  KdaDecodeArgs arguments(uint16_t* o) const {
    KdaDecodeArgs a;
    a.sequences = in.tokens;
    a.heads = in.heads;
    a.q_BHK = in.q.get();
    a.k_BHK = in.k.get();
    a.v_BHV = in.v.get();
    a.f_BHK = in.f.get();
    a.beta_logit_BH = in.beta.get();
    a.a_log_H = in.a_log.get();
    a.dt_bias_HK = in.dt_bias.get();
    a.slots_B = slots.get();
    a.state_SHKV = pool.get();
    a.o_BHV = o;
    return a;
  }
};

void must_run(const model::KdaCudaResult& result) {
  if (result) return;
  std::fprintf(stderr, "kda_decode: %s\n", result.detail);
  std::exit(2);
}

void check_batch(
    const std::string& name, int64_t sequences, int heads, Gate gate, bool padding = false) {
  Batch b(name, sequences, heads, sequences + 3 + (sequences % 5 == 2), gate, 1);
  if (padding) {
    for (size_t i = 0; i < b.slot_of.size(); i += 3) b.slot_of[i] = -1;
    b.slots.upload(b.slot_of);
  }
  const size_t states = size_t{static_cast<size_t>(heads)} * kD * kD;
  const std::vector<float> before = b.pool.download();
  DeviceArray<uint16_t> o(b.in.elements());
  must_run(model::kda_decode(b.arguments(o.get()), nullptr));
  must(cudaDeviceSynchronize(), name.c_str());
  const std::vector<float> after = b.pool.download();
  const std::vector<uint16_t> out = o.download();
  const auto q = b.in.q.download(), k = b.in.k.download(), v = b.in.v.download();
  const auto f = b.in.f.download(), beta = b.in.beta.download();
  const auto a_log = b.in.a_log.download(), dt_bias = b.in.dt_bias.download();
  std::vector<bool> used(static_cast<size_t>(b.count), false);
  ErrorSum of_o, of_state;
  bool zeros = true;
  for (int64_t i = 0; i < sequences; ++i) {
    const int slot = b.slot_of[i];
    if (slot >= 0) used[slot] = true;
    for (int h = 0; h < heads; ++h) {
      const size_t at = (static_cast<size_t>(i) * heads + h) * kD;
      if (slot < 0) {
        for (int c = 0; c < kD; ++c) zeros = zeros && out[at + c] == 0;
        continue;
      }
      const size_t state_at = slot * states + static_cast<size_t>(h) * kD * kD;
      std::vector<double> state(before.begin() + state_at, before.begin() + state_at + kD * kD);
      std::vector<double> truth(kD);
      kda_recurrence(
          {&q[at], &k[at], &v[at], &f[at], &beta[at / kD], 1, a_log[h], &dt_bias[h * kD], -5.0},
          state,
          truth.data());
      for (int c = 0; c < kD; ++c) of_o.add(from_bf16(out[at + c]), truth[c]);
      for (int c = 0; c < kD * kD; ++c) of_state.add(after[state_at + c], state[c]);
    }
  }
  bool untouched = true;
  for (int64_t slot = 0; slot < b.count; ++slot)
    if (!used[slot])
      untouched =
          untouched &&
          std::memcmp(&before[slot * states], &after[slot * states], states * sizeof(float)) == 0;
  const Error eo = of_o.result(), es = of_state.result();
  const bool good = eo.frobenius <= kOutputBound && es.frobenius <= kStateBound &&
                    eo.not_finite + es.not_finite == 0;
  expect(good, name + ": error against float64");
  expect(untouched, name + ": slots of other sequences must keep their bytes");
  expect(zeros, name + ": padding rows must be zero");
  std::printf("%-32s o %.2e state %.2e\n", name.c_str(), eo.frobenius, es.frobenius);
  char text[200];
  std::snprintf(text,
                sizeof text,
                "\"check\": \"%s\", \"o_rel_fro\": %.3e, \"state_rel_fro\": %.3e",
                name.c_str(),
                eo.frobenius,
                es.frobenius);
  record(text);

  // The last row alone gives the same bytes.
  if (padding || sequences == 0) return;
  b.pool.upload(before);
  DeviceArray<uint16_t> alone(static_cast<size_t>(heads) * kD);
  KdaDecodeArgs a = b.arguments(alone.get());
  const int64_t row = sequences - 1, at = row * heads * kD;
  a.sequences = 1;
  a.q_BHK += at;
  a.k_BHK += at;
  a.v_BHV += at;
  a.f_BHK += at;
  a.beta_logit_BH += row * heads;
  a.slots_B += row;
  must_run(model::kda_decode(a, nullptr));
  const std::vector<uint16_t> single = alone.download();
  const std::vector<float> pool = b.pool.download();
  const size_t state_at = b.slot_of[row] * states;
  expect(std::equal(single.begin(), single.end(), out.begin() + at) &&
             std::memcmp(&pool[state_at], &after[state_at], states * sizeof(float)) == 0,
         name + ": a row alone and in the batch must give the same bytes");
}

void check_refusals() {
  Batch b("refusals", 2, 2, 4, Gate::kMixed, 1);
  DeviceArray<uint16_t> o(b.in.elements());
  KdaDecodeArgs a = b.arguments(o.get());
  a.state_SHKV = nullptr;
  expect(model::kda_decode(a, nullptr).status == model::KdaCudaStatus::kBadArgument, "null state");
  a = b.arguments(o.get());
  a.lower_bound = 1.0f;
  expect(model::kda_decode(a, nullptr).status == model::KdaCudaStatus::kBadArgument, "lower bound");
  a = b.arguments(o.get());
  a.sequences = 0;
  expect(static_cast<bool>(model::kda_decode(a, nullptr)), "no rows");
}

/// The copy to compare with: a memcpy node of a graph may run on a slower engine.
__global__ void copy_words(uint4* to, const uint4* from, size_t count) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
    uint4 value[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) value[j] = __ldcs(from + i + j * step);
#pragma unroll
    for (int j = 0; j < 4; ++j) __stcs(to + i + j * step, value[j]);
  }
  for (; i < count; i += step) to[i] = from[i];
}

double median_us(const std::vector<float>& ms) {
  std::vector<float> sorted = ms;
  std::sort(sorted.begin(), sorted.end());
  return 1e3 * static_cast<double>(sorted[sorted.size() / 2]);
}

/// Graphs of ten steps, each on its own slots so that states do not stay in L2.
void time_all() {
  constexpr int kSteps = 10;
  for (const int64_t sequences : {1, 8, 32, 128, 256}) {
    const int heads = 64;
    const int64_t sets = std::max<int64_t>(2, std::min<int64_t>(kSteps, 512 / sequences));
    Batch b("time", sequences, heads, sequences * sets, Gate::kMixed, 1);
    std::vector<int32_t> all;
    for (int64_t i = 0; i < sequences * sets; ++i) all.push_back(static_cast<int32_t>(i));
    DeviceArray<int32_t> slots(all.size());
    slots.upload(all);
    DeviceArray<uint16_t> o(b.in.elements());
    const size_t state_bytes = sequences * heads * size_t{kD} * kD * 4;
    DeviceArray<unsigned char> copy(state_bytes);
    const auto timed = [&](const auto& step) {
      cudaStream_t stream;
      cudaGraph_t graph;
      cudaGraphExec_t replay;
      cudaEvent_t begin, end;
      must(cudaStreamCreate(&stream), "stream");
      must(cudaEventCreate(&begin), "event");
      must(cudaEventCreate(&end), "event");
      must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
      for (int i = 0; i < kSteps; ++i) step(i % sets, stream);
      must(cudaStreamEndCapture(stream, &graph), "capture");
      must(cudaGraphInstantiate(&replay, graph, 0), "graph");
      std::vector<float> times;
      for (int i = 0; i < 25; ++i) {
        must(cudaEventRecord(begin, stream), "record");
        must(cudaGraphLaunch(replay, stream), "graph");
        must(cudaEventRecord(end, stream), "record");
        must(cudaEventSynchronize(end), "timed run");
        float ms = 0;
        must(cudaEventElapsedTime(&ms, begin, end), "elapsed");
        if (i >= 5) times.push_back(ms / kSteps);
      }
      cudaGraphExecDestroy(replay);
      cudaGraphDestroy(graph);
      cudaEventDestroy(begin);
      cudaEventDestroy(end);
      cudaStreamDestroy(stream);
      return median_us(times);
    };
    const double us = timed([&](int64_t set, cudaStream_t stream) {
      KdaDecodeArgs a = b.arguments(o.get());
      a.slots_B = slots.get() + set * sequences;
      must_run(model::kda_decode(a, stream));
    });
    const double copy_us = timed([&](int64_t set, cudaStream_t stream) {
      copy_words<<<4 * 132, 512, 0, stream>>>(
          reinterpret_cast<uint4*>(copy.get()),
          reinterpret_cast<const uint4*>(b.pool.get()) + set * (state_bytes / 16),
          state_bytes / 16);
    });
    const double bytes =
        2.0 * static_cast<double>(state_bytes) + 5.0 * static_cast<double>(b.in.elements()) * 2.0;
    const double rate = bytes * 1e-3 / us,
                 copy_rate = 2e-3 * static_cast<double>(state_bytes) / copy_us;
    std::printf("T %4" PRId64
                " sequences %9.2f us %7.0f GB/s, copy %9.2f us %7.0f GB/s, share %.3f\n",
                sequences,
                us,
                rate,
                copy_us,
                copy_rate,
                rate / copy_rate);
    char text[240];
    std::snprintf(text,
                  sizeof text,
                  "\"time\": \"%" PRId64
                  "\", \"us\": %.3f, \"gb_per_s\": %.1f, \"copy_us\": %.3f, "
                  "\"copy_gb_per_s\": %.1f",
                  sequences,
                  us,
                  rate,
                  copy_us,
                  copy_rate);
    record(text);
  }
}

void check_small() {
  check_batch("3 rows, 2 heads", 3, 2, Gate::kMixed);
  check_batch("4 rows, 1 head, padding", 4, 1, Gate::kStrong, true);
}

void check_all() {
  check_refusals();
  check_small();
  check_batch("1 row, 64 heads", 1, 64, Gate::kMixed);
  check_batch("17 rows, 5 heads", 17, 5, Gate::kMixed);
  check_batch("17 rows, gates -5", 17, 5, Gate::kStrong);
  check_batch("17 rows, gates near 0", 17, 5, Gate::kWeak);
  check_batch("33 rows, 64 heads, padding", 33, 64, Gate::kMixed, true);
}

}  // namespace
}  // namespace lockstep::device_test

int main(int argc, char** argv) {
  using namespace lockstep::device_test;
  const std::string mode = argc == 3 ? argv[1] : "";
  if (mode != "check" && mode != "time" && mode != "small") {
    std::fprintf(stderr, "usage: %s check|time|small OUT.json\n", argv[0]);
    return 2;
  }
  open_records(argv[2]);
  if (mode == "check") check_all();
  if (mode == "small") check_small();
  if (mode == "time") time_all();
  return close_records();
}
