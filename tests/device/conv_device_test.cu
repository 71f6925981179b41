// Checks and times the short convolution with silu on the device, without a test framework.
//   conv_device_test check OUT.json     correctness on awkward sizes and packed documents
//   conv_device_test time OUT.json      timings beside a device copy
//   conv_device_test small OUT.json     a few small sizes once, for compute-sanitizer
//   conv_device_test profile OUT.json   one call each way at 8192 tokens, for a profiler
// Exit code 0 only if every check passed.

#include <cinttypes>
#include <numeric>

#include "model/ops/conv_cuda.hpp"
#include "tests/device/device_support.hpp"

namespace lockstep::device_test {
namespace {

using model::ConvArgs;
using model::ConvGradients;

double from_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}
/// Nearest bf16, ties to even, straight from float64.
double to_bf16(double value) {
  if (value == 0 || !std::isfinite(value)) return value;
  int exponent;
  std::frexp(value, &exponent);
  const double unit = std::ldexp(1.0, std::max(exponent - 8, -133));
  return std::nearbyint(value / unit) * unit;
}

struct Problem {
  std::string name;
  std::vector<int64_t> lengths;  // of documents
  int64_t channels = 264;
  bool halo = true;
  float x_scale = 1, weight_scale = 0.5f;
  bool bf16_weight = true;
  int64_t gap = 0;  // x_stride - channels
};

class Inputs {
 public:
  explicit Inputs(const Problem& p)
      : problem(p),
        cu_host(bounds(p.lengths)),
        tokens(cu_host.back()),
        documents(static_cast<int64_t>(p.lengths.size())),
        channels(p.channels),
        stride(p.channels + p.gap),
        cu(cu_host),
        x(size_t(tokens) * stride),
        dy(size_t(tokens) * channels),
        halo(size_t(documents) * 3 * channels),
        weight(size_t(channels) * 4) {
    fill(x, 1, p.x_scale);
    fill(dy, 2, 1);
    fill(halo, 3, p.x_scale);
    fill(weight, 4, p.weight_scale, 0);
    must(cudaDeviceSynchronize(), "inputs");
  }
  static std::vector<int64_t> bounds(const std::vector<int64_t>& lengths) {
    std::vector<int64_t> cu(lengths.size() + 1);
    std::partial_sum(lengths.begin(), lengths.end(), cu.begin() + 1);
    return cu;
  }
  ConvArgs arguments() const {
    ConvArgs a;
    a.tokens = tokens, a.channels = channels, a.documents = documents;
    a.cu = cu.get(), a.x = x.get(), a.x_stride = stride, a.weight = weight.get();
    a.halo = problem.halo ? halo.get() : nullptr;
    a.bf16_weight = problem.bf16_weight;
    return a;
  }

  Problem problem;
  std::vector<int64_t> cu_host;
  int64_t tokens, documents, channels, stride;
  DeviceArray<int64_t> cu;
  DeviceArray<uint16_t> x, dy, halo;
  DeviceArray<float> weight;
};

struct Output {
  std::vector<uint16_t> y, dx, dhalo;
  std::vector<float> dweight;
  bool operator==(const Output&) const = default;
};

/// Both passes on poisoned outputs and workspace, with guard bands behind them.
Output run(const ConvArgs& a, const uint16_t* dy, const std::string& name) {
  const size_t elements = size_t(a.tokens) * a.channels;
  const size_t bytes = model::conv_silu_backward_workspace_bytes(a.tokens, a.channels);
  Poisoned<uint16_t> y(elements), dx(elements),
      dhalo(a.halo != nullptr ? size_t(a.documents) * 3 * a.channels : 0);
  Poisoned<float> dweight(size_t(a.channels) * 4);
  Poisoned<unsigned char> workspace(bytes);
  must_launch(model::conv_silu_forward(a, y.get(), nullptr), name);
  ConvGradients g;
  g.dy = dy, g.dx = dx.get(), g.dhalo = a.halo != nullptr ? dhalo.get() : nullptr;
  g.dweight = dweight.get();
  must_launch(model::conv_silu_backward(a, g, workspace.get(), bytes, nullptr), name);
  must(cudaDeviceSynchronize(), name.c_str());
  workspace.checked(name);
  return {y.checked(name), dx.checked(name), dhalo.checked(name), dweight.checked(name)};
}

struct Errors {
  Error y, dx, dhalo, dweight, plain_y, plain_dx, plain_dhalo;
  void add(const Errors& e) {
    y.add(e.y), dx.add(e.dx), dhalo.add(e.dhalo), dweight.add(e.dweight);
    plain_y.add(e.plain_y), plain_dx.add(e.plain_dx), plain_dhalo.add(e.plain_dhalo);
  }
};

/// Against float64; beside it one rounding of the exact values, which is the plain form's error.
Errors errors(const Inputs& in, const Output& out) {
  const auto x = in.x.download(), dy = in.dy.download(), halo = in.halo.download();
  const auto weight = in.weight.download();
  std::vector<Errors> parts(cpu_threads());
  on_threads(in.channels, parts.size(), [&](size_t thread, int64_t c) {
    Errors& e = parts[thread];
    double w[4], dw[4] = {};
    for (int j = 0; j < 4; ++j)
      w[j] = in.problem.bf16_weight ? to_bf16(weight[c * 4 + j]) : double(weight[c * 4 + j]);
    for (int64_t d = 0; d < in.documents; ++d) {
      const int64_t begin = in.cu_host[d], length = in.cu_host[d + 1] - begin;
      std::vector<double> row(length + 3), gradient(length + 3);  // the halo first
      for (int64_t h = 0; h < 3; ++h)
        row[h] = in.problem.halo ? from_bf16(halo[(d * 3 + h) * in.channels + c]) : 0;
      for (int64_t t = 0; t < length; ++t) row[3 + t] = from_bf16(x[(begin + t) * in.stride + c]);
      for (int64_t t = 0; t < length; ++t) {
        double pre = 0;
        for (int j = 0; j < 4; ++j) pre += w[j] * row[t + j];
        const double s = 1 / (1 + std::exp(-pre)), y = pre * s;
        const double dpre =
            from_bf16(dy[(begin + t) * in.channels + c]) * s * (1 + pre / (1 + std::exp(pre)));
        e.y.add(from_bf16(out.y[(begin + t) * in.channels + c]), y);
        e.plain_y.add(to_bf16(y), y);
        for (int j = 0; j < 4; ++j) gradient[t + j] += w[j] * dpre, dw[j] += dpre * row[t + j];
      }
      for (int64_t t = 0; t < length; ++t) {
        e.dx.add(from_bf16(out.dx[(begin + t) * in.channels + c]), gradient[3 + t]);
        e.plain_dx.add(to_bf16(gradient[3 + t]), gradient[3 + t]);
      }
      if (!in.problem.halo) continue;
      for (int64_t h = 0; h < 3; ++h) {
        e.dhalo.add(from_bf16(out.dhalo[(d * 3 + h) * in.channels + c]), gradient[h]);
        e.plain_dhalo.add(to_bf16(gradient[h]), gradient[h]);
      }
    }
    for (int j = 0; j < 4; ++j) e.dweight.add(out.dweight[c * 4 + j], dw[j]);
  });
  Errors sum;
  for (const auto& e : parts) sum.add(e);
  return sum;
}

/// Each document alone gives the bytes it has in the batch.
void check_documents(const Inputs& in, const Output& out) {
  for (int64_t d = 0; d < in.documents; ++d) {
    const int64_t begin = in.cu_host[d], length = in.cu_host[d + 1] - begin;
    if (length == 0) continue;
    const DeviceArray<int64_t> cu(std::vector<int64_t>{0, length});
    ConvArgs a = in.arguments();
    a.tokens = length, a.documents = 1, a.cu = cu.get();
    a.x += begin * in.stride;
    if (a.halo != nullptr) a.halo += d * 3 * in.channels;
    const Output alone = run(a, in.dy.get() + begin * in.channels, in.problem.name);
    const auto part = [&](const std::vector<uint16_t>& v, int64_t first, size_t count) {
      return std::vector<uint16_t>(v.begin() + first * in.channels,
                                   v.begin() + first * in.channels + count);
    };
    expect(alone.y == part(out.y, begin, alone.y.size()) &&
               alone.dx == part(out.dx, begin, alone.dx.size()) &&
               (a.halo == nullptr || alone.dhalo == part(out.dhalo, d * 3, alone.dhalo.size())),
           in.problem.name + ": a document alone must give the bytes it has in the batch");
  }
}

void check_problem(const Problem& p) {
  const Inputs in(p);
  const Output out = run(in.arguments(), in.dy.get(), p.name);
  const Errors e = errors(in, out);
  const auto within = [](const Error& own, const Error& plain) {
    return own.not_finite == 0 && own.relative() <= 1.25 * plain.relative() + 1e-7;
  };
  const bool good = within(e.y, e.plain_y) && within(e.dx, e.plain_dx) &&
                    within(e.dhalo, e.plain_dhalo) && e.dweight.not_finite == 0 &&
                    e.dweight.relative() <= 2e-6;
  expect(good, p.name + ": error against float64");
  std::printf("%-30s y %.2e (plain %.2e) dx %.2e (%.2e) dhalo %.2e (%.2e) dweight %.1e%s\n",
              p.name.c_str(),
              e.y.relative(),
              e.plain_y.relative(),
              e.dx.relative(),
              e.plain_dx.relative(),
              e.dhalo.relative(),
              e.plain_dhalo.relative(),
              e.dweight.relative(),
              good ? "" : "  FAIL");
  char text[320];
  std::snprintf(
      text,
      sizeof text,
      "\"y\": %.3e, \"y_plain\": %.3e, \"dx\": %.3e, \"dx_plain\": %.3e, \"dhalo\": %.3e, "
      "\"dhalo_plain\": %.3e, \"dweight\": %.2e",
      e.y.relative(),
      e.plain_y.relative(),
      e.dx.relative(),
      e.plain_dx.relative(),
      e.dhalo.relative(),
      e.plain_dhalo.relative(),
      e.dweight.relative());
  record("\"check\": \"" + p.name + "\", " + text);
  for (int i = 0; i < 3; ++i)
    expect(run(in.arguments(), in.dy.get(), p.name) == out,
           p.name + ": runs must give the same bytes");
  check_documents(in, out);
  std::fflush(stdout);
}

void check_refusals() {
  const Inputs in({"refusals", {5}});
  DeviceArray<uint16_t> y(in.dy.count()), dhalo(in.halo.count());
  DeviceArray<float> dweight(in.weight.count());
  const size_t bytes = model::conv_silu_backward_workspace_bytes(5, in.channels);
  DeviceArray<unsigned char> workspace(bytes);
  using model::ConvCudaStatus;
  const auto forward = [&](const char* what, const auto& change, ConvCudaStatus wanted) {
    ConvArgs a = in.arguments();
    change(a);
    const auto result = model::conv_silu_forward(a, y.get(), nullptr);
    expect(result.status == wanted, std::string("refusals: ") + what);
    expect(result || result.detail[0] != '\0', "a refusal must say why");
  };
  forward(
      "good arguments", [](auto&) {}, ConvCudaStatus::kOk);
  forward(
      "no tokens", [](auto& a) { a.tokens = 0, a.documents = 0; }, ConvCudaStatus::kOk);
  forward(
      "channels", [](auto& a) { a.channels = 20; }, ConvCudaStatus::kBadArgument);
  forward(
      "stride", [](auto& a) { a.x_stride = 8; }, ConvCudaStatus::kBadArgument);
  forward(
      "no documents", [](auto& a) { a.documents = 0; }, ConvCudaStatus::kBadArgument);
  forward(
      "misaligned", [](auto& a) { a.x += 1; }, ConvCudaStatus::kBadArgument);
  const auto backward = [&](const char* what, ConvGradients g, size_t size, ConvCudaStatus wanted) {
    expect(model::conv_silu_backward(in.arguments(), g, workspace.get(), size, nullptr).status ==
               wanted,
           std::string("refusals: ") + what);
  };
  const ConvGradients g{in.dy.get(), y.get(), dhalo.get(), dweight.get()};
  backward("good gradients", g, bytes, ConvCudaStatus::kOk);
  backward("small workspace", g, bytes - 1, ConvCudaStatus::kWorkspaceTooSmall);
  backward(
      "halo without dhalo", {g.dy, g.dx, nullptr, g.dweight}, bytes, ConvCudaStatus::kBadArgument);
  backward("no dweight", {g.dy, g.dx, g.dhalo, nullptr}, bytes, ConvCudaStatus::kBadArgument);
  dweight.fill_bytes(0xff);
  ConvArgs none = in.arguments();
  none.tokens = 0, none.documents = 0;
  const auto result = model::conv_silu_backward(none, g, workspace.get(), bytes, nullptr);
  must(cudaDeviceSynchronize(), "refusals");
  bool zero = bool(result);
  for (const float f : dweight.download()) zero = zero && f == 0;
  expect(zero, "no tokens: dweight must be zero");
}

/// More than 2^31 elements: the last document has the bytes it has alone.
void check_offsets() {
  const Inputs in({"offsets", {90000, 1, 41000, 71}, 24576, false});
  DeviceArray<uint16_t> y(in.dy.count()), dx(in.dy.count());
  DeviceArray<float> dweight(in.weight.count());
  const size_t bytes = model::conv_silu_backward_workspace_bytes(in.tokens, in.channels);
  DeviceArray<unsigned char> workspace(bytes);
  must_launch(model::conv_silu_forward(in.arguments(), y.get(), nullptr), "offsets");
  must_launch(model::conv_silu_backward(in.arguments(),
                                        {in.dy.get(), dx.get(), nullptr, dweight.get()},
                                        workspace.get(),
                                        bytes,
                                        nullptr),
              "offsets");
  must(cudaDeviceSynchronize(), "offsets");
  const int64_t begin = in.cu_host[3], length = 71;
  const DeviceArray<int64_t> cu(std::vector<int64_t>{0, length});
  ConvArgs a = in.arguments();
  a.tokens = length, a.documents = 1, a.cu = cu.get(), a.x += begin * in.stride;
  const Output alone = run(a, in.dy.get() + begin * in.channels, "offsets");
  const size_t at = size_t(begin) * in.channels, count = size_t(length) * in.channels;
  expect(alone.y == y.download(at, count) && alone.dx == dx.download(at, count),
         "offsets: rows beyond 2^31 elements must give the bytes they have alone");
}

void check_all() {
  check_refusals();
  for (const int64_t n : {1, 2, 3, 4, 5, 127, 128, 129, 131, 259, 1000})
    check_problem({"one document of " + std::to_string(n), {n}});
  check_problem({"without halo", {300}, 264, false});
  check_problem({"lengths 0 to 5, empty ends", {0, 1, 0, 2, 3, 0, 0, 4, 5, 0}});
  check_problem({"the same, without halo", {0, 1, 0, 2, 3, 0, 0, 4, 5, 0}, 264, false});
  check_problem({"starts around a block edge", {125, 1, 1, 1, 1, 1, 126, 2, 3, 250, 0, 4}});
  check_problem({"300 documents of 0 to 6", [] {
                   std::vector<int64_t> lengths;
                   for (int i = 0; i < 300; ++i) lengths.push_back(i * 31 % 7);
                   return lengths;
                 }()});
  check_problem({"8 channels", {200, 57}, 8});
  check_problem({"1032 channels, rows apart", {200, 57}, 1032, true, 1, 0.5f, true, 24});
  check_problem({"saturated", {300}, 264, true, 40, 4});
  check_problem({"small values", {300}, 264, true, 1e-4f});
  check_problem({"fp32 weight", {300}, 264, true, 1, 0.5f, false});
  check_problem({"8192 channels", {1500, 548}, 8192});
  check_offsets();
}

void check_small() {
  check_problem({"small", {0, 5, 130, 0, 1, 3}, 40});
  check_problem({"small, without halo", {131}, 1032, false});
}

void time_all() {
  for (const auto& [tokens, channels, documents] :
       {std::tuple<int64_t, int64_t, int64_t>{8192, 8192, 1},
        {8192, 24576, 1},
        {8192, 24576, 64},
        {32768, 24576, 1},
        {131072, 24576, 1}}) {
    const std::string name = "T " + std::to_string(tokens) + " C " + std::to_string(channels) +
                             (documents > 1 ? " documents " + std::to_string(documents) : "");
    const Inputs in({name, std::vector<int64_t>(documents, tokens / documents), channels, false});
    const size_t elements = in.dy.count();
    DeviceArray<uint16_t> y(elements), dx(elements);
    DeviceArray<float> dweight(in.weight.count());
    const size_t bytes = model::conv_silu_backward_workspace_bytes(tokens, channels);
    DeviceArray<unsigned char> workspace(bytes);
    const int count = tokens > 20000 ? 15 : 50;
    time_beside_copy("conv forward " + name, 4.0 * double(elements), count, [&](int) {
      must_launch(model::conv_silu_forward(in.arguments(), y.get(), nullptr), name);
    });
    time_beside_copy("conv backward " + name, 6.0 * double(elements), count, [&](int) {
      must_launch(model::conv_silu_backward(in.arguments(),
                                            {in.dy.get(), dx.get(), nullptr, dweight.get()},
                                            workspace.get(),
                                            bytes,
                                            nullptr),
                  name);
    });
  }
}

void profile() {
  const Inputs in({"profile", {8192}, 24576, false});
  run(in.arguments(), in.dy.get(), "profile");
}

}  // namespace
}  // namespace lockstep::device_test

int main(int argc, char** argv) {
  using namespace lockstep::device_test;
  return device_main(argc, argv, "check|time|small|profile", [](const std::string& mode) {
    if (mode == "check") check_all();
    if (mode == "small") check_small();
    if (mode == "profile") profile();
    if (mode == "time") time_all();
  });
}
