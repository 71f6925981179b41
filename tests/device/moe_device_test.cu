// Checks and times the experts on the device, without a test framework.
//   moe_device_test check OUT.json     correctness on awkward counts and at full width
//   moe_device_test time OUT.json      timings beside cuBLAS in the same process
//   moe_device_test quick OUT.json     the largest of them
//   moe_device_test small OUT.json     a few small sizes once, for compute-sanitizer
//   moe_device_test profile OUT.json   one forward and one backward pass at full size
// Exit code 0 only if every check passed.

#include <limits>
#include <memory>
#include <numeric>

#include "model/ops/moe_cuda.hpp"
#include "tests/device/cublas.hpp"
#include "tests/device/moe_reference.cuh"

namespace lockstep::device_test {
namespace {

using namespace model;

constexpr int64_t kSpare = 70;  // rows behind the last expert, NaN in inputs, untouched in outputs

struct Problem {
  std::string name;
  std::vector<int64_t> counts;
  int64_t width = 256, inner = 128;
  float limit = 10, gate_scale = 1;
  int roundings = 2;
  uint32_t seed = 1;

  int64_t experts() const { return int64_t(counts.size()); }
  int64_t rows() const { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }
  std::vector<int64_t> offsets() const {
    std::vector<int64_t> o{0};
    for (const int64_t c : counts) o.push_back(o.back() + c);
    return o;
  }
};

struct Inputs {
  DeviceArray<uint16_t> x, gate_up, down, dout;
  DeviceArray<int64_t> offsets;
  explicit Inputs(const Problem& p)
      : x((p.rows() + kSpare) * p.width),
        gate_up(p.experts() * 2 * p.inner * p.width),
        down(p.experts() * p.width * p.inner),
        dout((p.rows() + kSpare) * p.width),
        offsets(p.offsets()) {
    fill(x, p.seed * 8, 1);
    fill(gate_up, p.seed * 8 + 1, p.gate_scale / std::sqrt(float(p.width)));
    fill(down, p.seed * 8 + 2, 1 / std::sqrt(float(p.inner)));
    fill(dout, p.seed * 8 + 3, 1);
    const size_t used = p.rows() * p.width, spare = kSpare * p.width * 2;
    must(cudaMemset(x.get() + used, 0xff, spare), "spare");
    must(cudaMemset(dout.get() + used, 0xff, spare), "spare");
  }
};

struct Outputs {
  Poisoned<uint16_t> products, out, dx, dgate_up, ddown;
  DeviceArray<unsigned char> workspace;
  explicit Outputs(const Problem& p)
      : products((p.rows() + kSpare) * 2 * p.inner),
        out((p.rows() + kSpare) * p.width),
        dx((p.rows() + kSpare) * p.width),
        dgate_up(p.experts() * 2 * p.inner * p.width),
        ddown(p.experts() * p.width * p.inner),
        workspace(std::max(moe_experts_forward_workspace_bytes(shape(p, nullptr)),
                           moe_experts_backward_workspace_bytes(shape(p, nullptr))) +
                  128) {
    workspace.fill_bytes(0xff);
  }
  static MoeShape shape(const Problem& p, const int64_t* offsets) {
    return {p.rows() + kSpare, p.experts(), p.width, p.inner, offsets, p.limit, p.roundings};
  }
  void forward(const Problem& p, const Inputs& in, bool keep = true) {
    MoeExpertsForwardArgs a;
    a.shape = shape(p, in.offsets.get());
    a.x = in.x.get(), a.gate_up = in.gate_up.get(), a.down = in.down.get();
    a.products = keep ? products.get() : nullptr;
    a.out = out.get();
    must_launch(moe_experts_forward(a, workspace.get(), workspace.count(), nullptr), p.name);
  }
  void backward(const Problem& p, const Inputs& in) {
    MoeExpertsBackwardArgs a;
    a.shape = shape(p, in.offsets.get());
    a.x = in.x.get(), a.gate_up = in.gate_up.get(), a.down = in.down.get();
    a.products = products.get(), a.dout = in.dout.get();
    a.dx = dx.get(), a.dgate_up = dgate_up.get(), a.ddown = ddown.get();
    must_launch(moe_experts_backward(a, workspace.get(), workspace.count(), nullptr), p.name);
  }
  void run(const Problem& p, const Inputs& in) {
    forward(p, in);
    backward(p, in);
    must(cudaDeviceSynchronize(), p.name.c_str());
  }
};

__global__ void differ_kernel(const uint16_t* a, const uint16_t* b, size_t count, int* found) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x)
    if (a[i] != b[i]) *found = 1;
}
bool same(const uint16_t* a, const uint16_t* b, size_t count) {
  DeviceArray<int> found(1);
  found.fill_bytes(0);
  differ_kernel<<<512, 256>>>(a, b, count, found.get());
  return found.download()[0] == 0;
}
bool untouched(const DeviceArray<uint16_t>& a, size_t first, size_t count) {
  const std::vector<uint16_t> v = a.download(first, count);
  return std::all_of(v.begin(), v.end(), [](uint16_t x) { return x == 0xffff; });
}

/// Expert e of `p` as a problem of its own.
struct Alone {
  Problem problem;
  std::unique_ptr<Inputs> in;
  Alone(const Problem& p, const Inputs& from, int64_t e) : problem(p) {
    problem.counts = {p.counts[e]};
    in = std::make_unique<Inputs>(problem);
    const int64_t row = p.offsets()[e], n = p.counts[e];
    const auto copy = [](const DeviceArray<uint16_t>& to, const uint16_t* at, size_t count) {
      must(cudaMemcpy(to.get(), at, count * 2, cudaMemcpyDeviceToDevice), "copy");
    };
    copy(in->x, from.x.get() + row * p.width, n * p.width);
    copy(in->dout, from.dout.get() + row * p.width, n * p.width);
    const int64_t size = p.width * p.inner;
    copy(in->gate_up, from.gate_up.get() + e * 2 * size, 2 * size);
    copy(in->down, from.down.get() + e * size, size);
  }
};

DeviceArray<double>& widen(const DeviceArray<uint16_t>& from,
                           size_t count,
                           std::unique_ptr<DeviceArray<double>>& to) {
  to = std::make_unique<DeviceArray<double>>(count);
  widen_kernel<<<512, 256>>>(from.get(), to->get(), count);
  return *to;
}

/// Errors against float64, at most 1.25 times those of the plain form.
void check_errors(const Problem& p, const Inputs& in, const Outputs& o) {
  std::unique_ptr<DeviceArray<double>> x, gate_up, down, dout;
  widen(in.x, p.rows() * p.width, x);
  widen(in.gate_up, in.gate_up.count(), gate_up);
  widen(in.down, in.down.count(), down);
  widen(in.dout, p.rows() * p.width, dout);
  const auto reference = [&](bool rounded) {
    return std::make_unique<ExpertsReference>(p.offsets(),
                                              p.width,
                                              p.inner,
                                              double(p.limit),
                                              p.roundings,
                                              rounded,
                                              *x,
                                              *gate_up,
                                              *down,
                                              *dout);
  };
  const auto truth = reference(false), plain = reference(true);
  std::string line = "\"check\": \"" + p.name + "\"", shown;
  const auto compare = [&](const char* what,
                           const DeviceArray<uint16_t>& value,
                           const DeviceArray<double>& exact,
                           const DeviceArray<double>& rounded) {
    const Deviation d = deviation(value.get(), exact), r = deviation(rounded.get(), exact);
    expect(d.not_finite == 0, p.name + ": " + what + " not finite");
    expect(d.relative <= 1.25 * r.relative + 1e-7, p.name + ": error of " + what);
    char text[160];
    std::snprintf(text, sizeof text, ", \"%s\": [%.3e, %.3e]", what, d.relative, r.relative);
    line += text;
    std::snprintf(text, sizeof text, " %s %.2e (%.2e)", what, d.relative, r.relative);
    shown += text;
  };
  compare("products", o.products, truth->products, plain->products);
  compare("out", o.out, truth->out, plain->out);
  compare("dx", o.dx, truth->dx, plain->dx);
  compare("dgate_up", o.dgate_up, truth->dgate_up, plain->dgate_up);
  compare("ddown", o.ddown, truth->ddown, plain->ddown);
  record(line);
  std::printf("%-28s error (plain form):%s\n", p.name.c_str(), shown.c_str());
  std::fflush(stdout);
}

void check_padding(const Problem& p, const Outputs& o) {
  const size_t rows = p.rows();
  expect(untouched(o.products, rows * 2 * p.inner, kSpare * 2 * p.inner + kGuard) &&
             untouched(o.out, rows * p.width, kSpare * p.width + kGuard) &&
             untouched(o.dx, rows * p.width, kSpare * p.width + kGuard) &&
             untouched(o.dgate_up, o.dgate_up.count() - kGuard, kGuard) &&
             untouched(o.ddown, o.ddown.count() - kGuard, kGuard),
         p.name + ": wrote outside its outputs");
}

/// Each expert in `experts` alone gives the same bytes.
void check_alone(const Problem& p,
                 const Inputs& in,
                 const Outputs& o,
                 const std::vector<int64_t>& experts) {
  for (const int64_t e : experts) {
    const Alone alone(p, in, e);
    Outputs other(alone.problem);
    other.run(alone.problem, *alone.in);
    const int64_t row = p.offsets()[e], n = p.counts[e], size = p.width * p.inner;
    expect(same(o.out.get() + row * p.width, other.out.get(), n * p.width) &&
               same(o.products.get() + row * 2 * p.inner, other.products.get(), n * 2 * p.inner) &&
               same(o.dx.get() + row * p.width, other.dx.get(), n * p.width) &&
               same(o.dgate_up.get() + e * 2 * size, other.dgate_up.get(), 2 * size) &&
               same(o.ddown.get() + e * size, other.ddown.get(), size),
           p.name + ": expert " + std::to_string(e) + " alone differs");
  }
}

void check_problem(const Problem& p, int repeats = 1) {
  const Inputs in(p);
  Outputs o(p);
  o.run(p, in);
  check_errors(p, in, o);
  check_padding(p, o);
  for (int i = 0; i < repeats; ++i) {
    Outputs again(p);
    again.forward(p, in, false);
    must(cudaDeviceSynchronize(), "without products");
    const bool same_out = same(o.out.get(), again.out.get(), p.rows() * p.width);
    expect(same_out, p.name + ": products kept or not differ");
    again.run(p, in);
    expect(same(o.out.get(), again.out.get(), p.rows() * p.width) &&
               same(o.products.get(), again.products.get(), p.rows() * 2 * p.inner) &&
               same(o.dx.get(), again.dx.get(), p.rows() * p.width) &&
               same(o.dgate_up.get(), again.dgate_up.get(), in.gate_up.count()) &&
               same(o.ddown.get(), again.ddown.get(), in.down.count()),
           p.name + ": two runs differ");
  }
}

/// NaN in one expert's rows reaches no other expert.
void check_contained(Problem p, int64_t sick) {
  const Inputs in(p);
  Outputs before(p), after(p);
  before.run(p, in);
  const int64_t first = p.offsets()[sick], n = p.counts[sick], size = p.width * p.inner;
  must(cudaMemset(in.x.get() + first * p.width, 0xff, n * p.width * 2), "NaN");
  must(cudaMemset(in.dout.get() + first * p.width, 0xff, n * p.width * 2), "NaN");
  after.run(p, in);
  for (int64_t e = 0; e < p.experts(); ++e) {
    if (e == sick) continue;
    const int64_t row = p.offsets()[e], rows = p.counts[e];
    expect(
        same(before.out.get() + row * p.width, after.out.get() + row * p.width, rows * p.width) &&
            same(before.dx.get() + row * p.width, after.dx.get() + row * p.width, rows * p.width) &&
            same(before.dgate_up.get() + e * 2 * size,
                 after.dgate_up.get() + e * 2 * size,
                 2 * size) &&
            same(before.ddown.get() + e * size, after.ddown.get() + e * size, size),
        p.name + ": NaN of another expert reached expert " + std::to_string(e));
  }
}

// ---- order, rows, combination -------------------------------------------------------------------

float from_bf16(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
uint16_t bf16_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

struct Routed {
  std::vector<int64_t> chosen;
  DeviceArray<int64_t> chosen_d, token, slot, place, offsets;
  DeviceArray<unsigned char> workspace;
  MoeOrderArgs order;
  MoeRowsArgs rows;
  Routed(int64_t T, int64_t k, int64_t E, int64_t D, int kind)
      : chosen(choose(T, k, E, kind)),
        chosen_d(chosen),
        token(T * k),
        slot(T * k),
        place(T * k),
        offsets(E + 1),
        workspace(moe_order_workspace_bytes(T, k, E)) {
    order = {T, k, E, chosen_d.get(), token.get(), slot.get(), place.get(), offsets.get()};
    rows = {T, k, D, slot.get(), place.get()};
  }
  void sort() {
    must_launch(moe_order(order, workspace.get(), workspace.count(), nullptr), "order");
  }
  /// kind 0: k different experts at random; 1: all to expert E / 2; 2: the first half of them only.
  static std::vector<int64_t> choose(int64_t T, int64_t k, int64_t E, int kind) {
    std::vector<int64_t> to(T * k);
    uint64_t state = 88172645463325252ull + T * 31 + k;
    const auto next = [&](int64_t n) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      return int64_t((state >> 20) % uint64_t(n));
    };
    for (int64_t t = 0; t < T; ++t)
      for (int64_t j = 0; j < k; ++j) {
        int64_t e = E / 2;
        if (kind != 1) {
          bool again = true;
          while (again) {
            e = next(kind == 2 ? (E + 1) / 2 : E);
            again = false;
            for (int64_t i = 0; i < j && E >= 2 * k; ++i) again = again || to[t * k + i] == e;
          }
        }
        to[t * k + j] = e;
      }
    return to;
  }
};

void check_rows(int64_t T, int64_t k, int64_t E, int64_t D, int kind) {
  const std::string name = "rows T " + std::to_string(T) + " k " + std::to_string(k) + " E " +
                           std::to_string(E) + " kind " + std::to_string(kind);
  Routed r(T, k, E, D, kind);
  r.sort();
  const size_t S = T * k;
  std::vector<int64_t> slot(S), place(S), row_of(S), offsets(E + 1, 0);
  std::iota(slot.begin(), slot.end(), 0);
  std::stable_sort(
      slot.begin(), slot.end(), [&](int64_t a, int64_t b) { return r.chosen[a] < r.chosen[b]; });
  for (size_t i = 0; i < S; ++i) row_of[slot[i]] = int64_t(i), ++offsets[r.chosen[i] + 1];
  for (int64_t e = 0; e < E; ++e) offsets[e + 1] += offsets[e];
  place = row_of;
  for (int64_t t = 0; t < T; ++t) std::sort(place.begin() + t * k, place.begin() + (t + 1) * k);
  expect(r.slot.download() == slot, name + ": slot");
  expect(r.place.download() == place, name + ": place");
  expect(r.offsets.download() == offsets, name + ": offsets");
  const std::vector<int64_t> token = r.token.download();
  for (size_t i = 0; i < S; ++i)
    if (token[i] != slot[i] / k) {
      expect(false, name + ": token");
      break;
    }

  DeviceArray<uint16_t> x(T * D), values(S * D), dy(T * D);
  DeviceArray<float> weights(S);
  fill(x, 1, 1), fill(values, 2, 1), fill(dy, 3, 1), fill(weights, 4, 0.1f, 0.3f);
  Poisoned<uint16_t> rows(S * D), y(T * D), dx(T * D), drows(S * D);
  Poisoned<float> dweights(S);
  must_launch(moe_gather(r.rows, x.get(), rows.get(), nullptr), name);
  must_launch(moe_gather_backward(r.rows, values.get(), dx.get(), nullptr), name);
  must_launch(
      moe_combine_backward(
          r.rows, values.get(), weights.get(), dy.get(), drows.get(), dweights.get(), nullptr),
      name);
  const std::vector<uint16_t> xs = x.download(), vs = values.download(), gs = dy.download(),
                              got = rows.checked(name), gdx = dx.checked(name),
                              gdr = drows.checked(name);
  const std::vector<float> ws = weights.download(), gdw = dweights.checked(name);
  bool gathered = true, summed = true, scaled = true;
  double worst = 0;
  for (size_t i = 0; i < S; ++i) {
    gathered = gathered && std::memcmp(&got[i * D], &xs[token[i] * D], D * 2) == 0;
    double dot = 0, size = 0;
    for (int64_t d = 0; d < D; ++d) {
      const float g = from_bf16(gs[token[i] * D + d]), v = from_bf16(vs[i * D + d]);
      dot += double(g) * v, size += std::fabs(double(g) * v);
      scaled = scaled && gdr[i * D + d] == bf16_bits(ws[slot[i]] * g);
    }
    worst = std::max(worst, std::fabs(gdw[slot[i]] - dot) / size);
  }
  for (int64_t t = 0; t < T; ++t)
    for (int64_t d = 0; d < D; ++d) {
      float s = 0;
      for (int64_t j = 0; j < k; ++j) s += from_bf16(vs[place[t * k + j] * D + d]);
      summed = summed && gdx[t * D + d] == bf16_bits(s);
    }
  expect(gathered, name + ": gather");
  expect(summed, name + ": sum over a token's rows");
  expect(scaled, name + ": drows");
  expect(worst < 1e-6, name + ": dweights");
  for (int mode = 0; mode < 4; ++mode) {
    const MoeCombineRounding rounding{(mode & 1) != 0, (mode & 2) != 0};
    y.fill_bytes(0xff);
    must_launch(moe_combine(r.rows, values.get(), weights.get(), rounding, y.get(), nullptr), name);
    const std::vector<uint16_t> gy = y.checked(name);
    size_t flipped = 0;
    for (int64_t t = 0; t < T; ++t)
      for (int64_t d = 0; d < D; ++d) {
        float s = 0;
        for (int64_t j = 0; j < k; ++j) {
          const int64_t row = place[t * k + j];
          const float v = from_bf16(vs[row * D + d]), w = ws[slot[row]];
          if (rounding.weighed) {
            s += from_bf16(bf16_bits(v * w));
          } else {
            s = std::fma(v, w, s);
          }
          if (rounding.sum) s = from_bf16(bf16_bits(s));
        }
        flipped += gy[t * D + d] != bf16_bits(s);
      }
    // Without the first rounding the compiler may fuse product and sum or not.
    expect(flipped == 0 || (!rounding.weighed && flipped * 1000 < size_t(T * D) + 1000),
           name + ": combine, rounding mode " + std::to_string(mode));
  }
  char text[200];
  std::snprintf(text, sizeof text, "\"check\": \"%s\", \"dweights\": %.2e", name.c_str(), worst);
  record(text);
  std::printf("%-28s dweights %.1e of the sum of magnitudes\n", name.c_str(), worst);
}

std::vector<int64_t> spread(int64_t rows, int64_t experts) {
  std::vector<int64_t> counts(experts);
  int64_t left = rows;
  for (int64_t e = 0; e + 1 < experts; ++e) {
    counts[e] = rows / experts + (e * 7919 % 601) - 300;
    left -= counts[e];
  }
  counts.back() = left;
  return counts;
}

/// Without the float64 products, which a sanitizer slows down most.
void check_small() {
  check_rows(40, 8, 36, 256, 0);
  for (const Problem& p : {Problem{"small", {1, 0, 130, 64}},
                           Problem{"small, pairs and a tail", {300, 70}, 384, 384}}) {
    const Inputs in(p);
    Outputs o(p), again(p);
    o.run(p, in);
    again.run(p, in);
    check_padding(p, o);
    expect(same(o.out.get(), again.out.get(), p.rows() * p.width) &&
               same(o.dgate_up.get(), again.dgate_up.get(), in.gate_up.count()),
           p.name + ": two runs differ");
  }
}

void check_all() {
  check_small();
  check_problem({"pairs and a tail", {300, 70}, 384, 384});
  check_rows(1, 8, 36, 4096, 0);
  check_rows(1000, 8, 288, 512, 0);
  check_rows(777, 3, 5, 4096, 2);
  check_rows(500, 8, 512, 256, 1);
  const std::vector<int64_t> odd = {0, 1, 63, 64, 65, 127, 128, 129, 0, 255, 256, 257, 385, 700, 0};
  check_problem({"odd counts", odd}, 3);
  check_problem({"odd counts, 384 x 384", odd, 384, 384});
  check_problem({"odd counts, 512 x 640", odd, 512, 640});
  check_problem({"one token", {0, 0, 1, 0}, 512, 256});
  check_problem({"all to one expert", {0, 3000, 0}, 512, 256});
  check_problem({"no rows", {0, 0, 0}, 256, 128});
  check_problem({"clamps active", odd, 256, 256, 1.0f, 2});
  check_problem({"clamp 10, wide gates", odd, 256, 256, 10.0f, 8});
  check_problem({"no clamp", odd, 256, 256, std::numeric_limits<float>::infinity(), 4});
  check_problem({"one rounding", odd, 256, 256, 10, 1, 1});
  check_problem({"three roundings", odd, 256, 256, 10, 1, 3});
  check_contained({"NaN rows", {65, 130, 200, 10}, 256, 256}, 1);
  {
    const Problem p{"alone", odd, 384, 256};
    const Inputs in(p);
    Outputs o(p);
    o.run(p, in);
    check_alone(p, in, o, {1, 2, 5, 7, 9, 12, 13});
  }
  check_problem({"full width", {700, 0, 129, 1, 400}, 4096, 2048});
  {
    const Problem p{"full size", spread(131072, 36), 4096, 2048};
    const Inputs in(p);
    Outputs o(p);
    o.run(p, in);
    check_padding(p, o);
    check_alone(p, in, o, {0, 35});
    const Alone one(p, in, 5);
    Outputs alone(one.problem);
    alone.run(one.problem, *one.in);
    check_errors(one.problem, *one.in, alone);
    check_alone(p, in, o, {5});
    for (int i = 0; i < 3; ++i) {
      Outputs again(p);
      again.run(p, in);
      expect(same(o.out.get(), again.out.get(), p.rows() * p.width) &&
                 same(o.dx.get(), again.dx.get(), p.rows() * p.width) &&
                 same(o.dgate_up.get(), again.dgate_up.get(), in.gate_up.count()) &&
                 same(o.ddown.get(), again.ddown.get(), in.down.count()),
             p.name + ": two runs differ");
    }
  }
  {
    const Problem p{"beyond 2^31 elements", {599000, 1003}, 4096, 2048};
    const Inputs in(p);
    Outputs o(p);
    o.run(p, in);
    check_alone(p, in, o, {1});
    check_padding(p, o);
  }
}

// ---- times --------------------------------------------------------------------------------------

void report(const std::string& name, double ms, double flops, double dense, double grouped) {
  const double rate = flops / ms * 1e-9;
  std::printf("%-44s %8.3f ms", name.c_str(), ms);
  if (flops > 0) std::printf(" %6.0f TFLOP/s", rate);
  if (flops > 0 && dense > 0)
    std::printf(
        "; share of cuBLAS 8192^3 %.3f, of cuBLAS per expert %.3f", rate / dense, rate / grouped);
  std::printf("\n");
  std::fflush(stdout);
  char text[300];
  std::snprintf(text,
                sizeof text,
                "\"time\": \"%s\", \"ms\": %.4f, \"tflops\": %.1f, \"cublas_dense\": %.1f, "
                "\"cublas_per_expert\": %.1f",
                name.c_str(),
                ms,
                flops > 0 ? rate : 0,
                dense,
                grouped);
  record(text);
}

void time_experts(const Problem& p, const Cublas& cublas) {
  const Inputs in(p);
  Outputs o(p);
  const double unit = 2.0 * double(p.rows()) * double(p.width) * double(p.inner);
  double dense = 0, grouped = 0;
  const auto measure_cublas = [&] {
    if (cublas.gemm == nullptr) return;
    DeviceArray<uint16_t> c(size_t{8192} * 8192);
    const double ms = median_ms(15, 1, [&](int) {
      cublas(true, false, 8192, 8192, 8192, in.x.get(), in.dout.get(), c.get());
    });
    dense = 2.0 * 8192 * 8192 * 8192 / ms * 1e-9;
    report("cuBLAS 8192 x 8192 x 8192", ms, 2.0 * 8192 * 8192 * 8192, 0, 0);
    // products of gate and up, one call per expert
    const std::vector<int64_t> offsets = p.offsets();
    const double each = median_ms(9, 1, [&](int) {
      for (int64_t e = 0; e < p.experts(); ++e)
        if (p.counts[e] > 0)
          cublas(true,
                 false,
                 2 * p.inner,
                 p.counts[e],
                 p.width,
                 in.gate_up.get() + e * 2 * p.inner * p.width,
                 in.x.get() + offsets[e] * p.width,
                 o.products.get() + offsets[e] * 2 * p.inner);
    });
    grouped = 2 * unit / each * 1e-9;
    report("cuBLAS gate and up, a call per expert", each, 2 * unit, dense, grouped);
    const double sums = median_ms(9, 1, [&](int) {
      for (int64_t e = 0; e < p.experts(); ++e)
        if (p.counts[e] > 0)
          cublas(false,
                 true,
                 p.width,
                 2 * p.inner,
                 p.counts[e],
                 in.x.get() + offsets[e] * p.width,
                 o.products.get() + offsets[e] * 2 * p.inner,
                 o.dgate_up.get() + e * 2 * p.inner * p.width);
    });
    report("cuBLAS gradient of gate and up, likewise", sums, 2 * unit, dense, grouped);
  };
  if (p.rows() >= 8192 * 2) measure_cublas();
  const double forward = median_ms(11, 1, [&](int) { o.forward(p, in); });
  const double backward = median_ms(11, 1, [&](int) { o.backward(p, in); });
  const double both = median_ms(7, 1, [&](int) {
    o.forward(p, in);
    o.backward(p, in);
  });
  report(p.name + ": forward", forward, 3 * unit, dense, grouped);
  report(p.name + ": backward", backward, 6 * unit, dense, grouped);
  report(p.name + ": forward and backward", both, 9 * unit, dense, grouped);
}

/// With order, gather, combination and their gradients, 8 of 36 experts for each token.
void time_layer(int64_t tokens) {
  constexpr int64_t k = 8, E = 36, D = 4096, I = 2048;
  Routed r(tokens, k, E, D, 0);
  r.sort();
  const std::vector<int64_t> offsets = r.offsets.download();
  Problem p{"layer", {}, D, I};
  for (int64_t e = 0; e < E; ++e) p.counts.push_back(offsets[e + 1] - offsets[e]);
  const Inputs in(p);
  Outputs o(p);
  DeviceArray<uint16_t> x(tokens * D), y(tokens * D), dy(tokens * D), dx(tokens * D);
  DeviceArray<float> weights(tokens * k), dweights(tokens * k);
  fill(x, 1, 1), fill(dy, 2, 1), fill(weights, 3, 0.1f, 0.3f);
  const auto order = [&](int) { r.sort(); };
  const auto gather = [&](int) {
    must_launch(moe_gather(r.rows, x.get(), in.x.get(), nullptr), "gather");
  };
  const auto combine = [&](int) {
    must_launch(moe_combine(r.rows, o.out.get(), weights.get(), {}, y.get(), nullptr), "combine");
  };
  const auto combine_backward = [&](int) {
    must_launch(
        moe_combine_backward(
            r.rows, o.out.get(), weights.get(), dy.get(), in.dout.get(), dweights.get(), nullptr),
        "combine backward");
  };
  const auto gather_backward = [&](int) {
    must_launch(moe_gather_backward(r.rows, o.dx.get(), dx.get(), nullptr), "gather backward");
  };
  const auto forward = [&](int i) { order(i), gather(i), o.forward(p, in), combine(i); };
  const auto backward = [&](int i) { combine_backward(i), o.backward(p, in), gather_backward(i); };
  const double unit = 2.0 * double(tokens * k) * double(D) * double(I);
  const std::string name = "layer, " + std::to_string(tokens) + " tokens: ";
  report(name + "order", median_ms(15, 1, order), 0, 0, 0);
  report(name + "gather", median_ms(15, 1, gather), 0, 0, 0);
  forward(0);
  report(name + "combine", median_ms(15, 1, combine), 0, 0, 0);
  report(name + "combine backward", median_ms(15, 1, combine_backward), 0, 0, 0);
  backward(0);
  report(name + "gather backward", median_ms(15, 1, gather_backward), 0, 0, 0);
  report(name + "forward", median_ms(9, 1, forward), 3 * unit, 0, 0);
  report(name + "backward", median_ms(9, 1, backward), 6 * unit, 0, 0);
  report(name + "forward and backward",
         median_ms(7, 1, [&](int i) { forward(i), backward(i); }),
         9 * unit,
         0,
         0);
}

void time_all(bool quick) {
  const Cublas cublas;
  time_experts({"36 experts, 131072 rows", spread(131072, 36), 4096, 2048}, cublas);
  if (quick) return;
  time_experts({"36 experts, 65536 rows", spread(65536, 36), 4096, 2048}, cublas);
  time_experts({"288 experts, 65536 rows", std::vector<int64_t>(288, 227), 4096, 2048}, cublas);
  time_experts({"36 experts, 1024 rows", std::vector<int64_t>(36, 28), 4096, 2048}, cublas);
  time_layer(16384);
}

void profile() {
  const Problem p{"profile", spread(131072, 36), 4096, 2048};
  const Inputs in(p);
  Outputs o(p);
  o.run(p, in);
}

}  // namespace
}  // namespace lockstep::device_test

int main(int argc, char** argv) {
  using namespace lockstep::device_test;
  return device_main(argc, argv, "check|time|quick|small|profile", [](const std::string& mode) {
    if (mode == "check") check_all();
    if (mode == "small") check_small();
    if (mode == "time" || mode == "quick") time_all(mode == "quick");
    if (mode == "profile") profile();
  });
}
