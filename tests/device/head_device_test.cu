// Checks and times the output head on the device, without a test framework.
//   head_device_test check OUT.json   against float64, awkward shapes
//   head_device_test time OUT.json    timings beside a bf16 matrix product of cuBLAS
//   head_device_test small OUT.json   small shapes once, for compute-sanitizer
// Exit code 0 only if every check passed.

#include <numeric>

#include "model/ops/head_cuda.hpp"
#include "tests/device/cublas.hpp"
#include "tests/device/device_support.hpp"

namespace lockstep::device_test {
namespace {

using model::HeadBackwardCudaArgs;
using model::HeadCudaArgs;
using model::HeadCudaStatus;
using model::HeadForwardCudaArgs;

constexpr double kAllowance = 1.25;  // error beside that of the plain form

float value(uint16_t bits) {
  uint32_t wide = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}
double rounded(double x) { return double(__bfloat162float(__float2bfloat16_rn(float(x)))); }

struct Problem {
  std::string name;
  int64_t tokens, width, vocab;
  bool round_logits = true;
  float factor = 1;
  int64_t samples = 1 << 20;  // tokens and vocabulary entries compared with float64
  float scale = 2.5f;         // of the logits
};

struct Inputs {
  Problem p;
  DeviceArray<uint16_t> h, weight;
  std::vector<int64_t> labels_host;
  DeviceArray<int64_t> labels;
  DeviceArray<float> dlogprobs;

  static std::vector<int64_t> make_labels(const Problem& p) {
    std::vector<int64_t> labels;
    for (int64_t t = 0; t < p.tokens; ++t)
      labels.push_back(t % 5 == 3 ? -1 : t % 7 == 0 ? p.vocab - 1 : t * 7919 % p.vocab);
    return labels;
  }
  explicit Inputs(const Problem& problem)
      : p(problem),
        h(size_t(p.tokens * p.width)),
        weight(size_t(p.vocab * p.width)),
        labels_host(make_labels(p)),
        labels(labels_host),
        dlogprobs(size_t(p.tokens)) {
    fill(h, 1, 1);
    fill(weight, 2, p.scale / std::sqrt(float(p.width)));
    fill(dlogprobs, 3, 1, 0);
  }
  HeadCudaArgs arguments(int64_t first, int64_t count) const {
    return {count,
            p.width,
            p.vocab,
            h.get() + first * p.width,
            weight.get(),
            labels.get() + first,
            p.round_logits,
            p.factor};
  }
};

struct Forward {
  std::vector<float> logprobs, log_sum, entropy;
};
Forward forward(const Inputs& in, int64_t first, int64_t count, int64_t rows, bool entropy) {
  const std::string& name = in.p.name;
  Poisoned<float> logprobs(count), log_sum(count), entropies(entropy ? count : 0);
  const size_t bytes = model::head_forward_workspace_bytes(in.p.vocab, rows, entropy);
  Poisoned<unsigned char> workspace(bytes);
  HeadForwardCudaArgs a;
  a.head = in.arguments(first, count);
  // 16-byte alignment of labels is wanted: one token is moved to the front of an array.
  DeviceArray<int64_t> label(
      std::vector<int64_t>(in.labels_host.begin() + first, in.labels_host.begin() + first + count));
  a.head.labels = label.get();
  a.logprobs = logprobs.get(), a.log_sum = log_sum.get();
  a.entropy = entropy ? entropies.get() : nullptr;
  must_launch(model::head_forward(a, workspace.get(), bytes, nullptr), name);
  must(cudaDeviceSynchronize(), name.c_str());
  workspace.checked(name);
  return {logprobs.checked(name), log_sum.checked(name), entropies.checked(name)};
}

struct Backward {
  std::vector<uint16_t> dh, dweight;
};
Backward backward(const Inputs& in, const std::vector<float>& log_sum, int64_t slice) {
  const std::string& name = in.p.name;
  DeviceArray<float> sums(log_sum);
  Poisoned<uint16_t> dh(in.h.count()), dweight(in.weight.count());
  HeadBackwardCudaArgs a;
  a.head = in.arguments(0, in.p.tokens);
  a.log_sum = sums.get(), a.dlogprobs = in.dlogprobs.get();
  a.dh = dh.get(), a.dweight = dweight.get();
  const size_t bytes = model::head_backward_workspace_bytes(a.head, slice);
  Poisoned<unsigned char> workspace(bytes);
  must_launch(model::head_backward(a, workspace.get(), bytes, nullptr), name);
  must(cudaDeviceSynchronize(), name.c_str());
  workspace.checked(name);
  return {dh.checked(name), dweight.checked(name)};
}

std::vector<int64_t> sample(int64_t count, int64_t samples) {
  std::vector<int64_t> at;
  const int64_t n = std::min(count, samples);
  for (int64_t i = 0; i < n; ++i) at.push_back(i + 1 == n ? count - 1 : i * (count / n));
  return at;
}

double logit(const Problem& p, const uint16_t* h, const uint16_t* weight) {
  double sum[4] = {};
  for (int64_t c = 0; c < p.width; c += 4)
    for (int l = 0; l < 4; ++l) sum[l] += double(value(h[c + l])) * double(value(weight[c + l]));
  const double z = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  return double(p.factor) * (p.round_logits ? rounded(z) : z);
}

void print(const Problem& p, const char* what, const Error& error, const Error& plain) {
  std::printf("%-36s %-9s %.3e plain %.3e largest %.2e\n",
              p.name.c_str(),
              what,
              error.relative(),
              plain.relative(),
              error.largest);
  char text[256];
  std::snprintf(text,
                sizeof text,
                "\"check\": \"%s, %s\", \"rel_fro\": %.3e, \"plain_rel_fro\": %.3e",
                p.name.c_str(),
                what,
                error.relative(),
                plain.relative());
  record(text);
}

void check_problem(const Problem& p, int64_t slice) {
  const Inputs in(p);
  const Forward out = forward(in, 0, p.tokens, p.tokens, true);
  const Backward back = backward(in, out.log_sum, slice);
  const std::vector<uint16_t> h = in.h.download(), weight = in.weight.download();
  const std::vector<float> dlogprobs = in.dlogprobs.download();
  struct Part {
    Error logprobs, log_sum, entropy, dh, dh_plain, dw, dw_plain;
    int64_t wrong_without_label = 0;
  };
  std::vector<Part> parts(cpu_threads());
  const std::vector<int64_t> tokens = sample(p.tokens, p.samples),
                             entries = sample(p.vocab, p.samples);
  // Gradient of a logit.
  const auto gradient = [&](int64_t t, int64_t v, double z, double log_sum) {
    const int64_t label = in.labels_host[t];
    if (label < 0) return 0.0;
    return double(dlogprobs[t]) * double(p.factor) * ((v == label) - std::exp(z - log_sum));
  };
  on_threads(int64_t(tokens.size()), parts.size(), [&](size_t thread, int64_t i) {
    Part& part = parts[thread];
    const int64_t t = tokens[i], label = in.labels_host[t];
    std::vector<double> z(p.vocab), dh(p.width), dh_plain(p.width);
    for (int64_t v = 0; v < p.vocab; ++v) z[v] = logit(p, &h[t * p.width], &weight[v * p.width]);
    const double top = *std::max_element(z.begin(), z.end());
    double sum = 0, mean = 0;
    for (const double x : z) sum += std::exp(x - top), mean += x * std::exp(x - top);
    const double log_sum = top + std::log(sum);
    part.log_sum.add(out.log_sum[t], log_sum);
    part.entropy.add(out.entropy[t], log_sum - mean / sum);
    if (label >= 0) part.logprobs.add(out.logprobs[t], z[label] - log_sum);
    if (label < 0) part.wrong_without_label += out.logprobs[t] != 0;
    for (int64_t v = 0; v < p.vocab; ++v) {
      const double d = gradient(t, v, z[v], log_sum), plain = rounded(d);
      for (int64_t c = 0; c < p.width; ++c) {
        const double w = double(value(weight[v * p.width + c]));
        dh[c] += d * w, dh_plain[c] += plain * w;
      }
    }
    for (int64_t c = 0; c < p.width; ++c) {
      part.dh.add(value(back.dh[t * p.width + c]), dh[c]);
      part.dh_plain.add(rounded(dh_plain[c]), dh[c]);
    }
  });
  on_threads(int64_t(entries.size()), parts.size(), [&](size_t thread, int64_t i) {
    Part& part = parts[thread];
    const int64_t v = entries[i];
    std::vector<double> dw(p.width), dw_plain(p.width);
    for (int64_t t = 0; t < p.tokens; ++t) {
      const double z = logit(p, &h[t * p.width], &weight[v * p.width]);
      const double d = gradient(t, v, z, double(out.log_sum[t])), plain = rounded(d);
      for (int64_t c = 0; c < p.width; ++c) {
        const double x = double(value(h[t * p.width + c]));
        dw[c] += d * x, dw_plain[c] += plain * x;
      }
    }
    for (int64_t c = 0; c < p.width; ++c) {
      part.dw.add(value(back.dweight[v * p.width + c]), dw[c]);
      part.dw_plain.add(rounded(dw_plain[c]), dw[c]);
    }
  });
  Part all;
  for (const Part& part : parts) {
    all.logprobs.add(part.logprobs), all.log_sum.add(part.log_sum), all.entropy.add(part.entropy);
    all.dh.add(part.dh), all.dh_plain.add(part.dh_plain);
    all.dw.add(part.dw), all.dw_plain.add(part.dw_plain);
    all.wrong_without_label += part.wrong_without_label;
  }
  print(p, "logprobs", all.logprobs, {});
  print(p, "log_sum", all.log_sum, {});
  print(p, "entropy", all.entropy, {});
  print(p, "dh", all.dh, all.dh_plain);
  print(p, "dweight", all.dw, all.dw_plain);
  // A logit that lies between two bf16 values may be rounded to the other one.
  const double limit = p.round_logits ? 1e-3 : 1e-5;
  expect(all.logprobs.not_finite + all.dh.not_finite + all.dw.not_finite == 0, p.name + ": finite");
  expect(all.logprobs.relative() <= limit, p.name + ": log-probabilities");
  expect(all.log_sum.relative() <= limit, p.name + ": logarithm of the sum");
  expect(all.entropy.relative() <= 10 * limit, p.name + ": entropy");
  expect(all.wrong_without_label == 0, p.name + ": 0 without label");
  expect(all.dh.relative() <= kAllowance * all.dh_plain.relative() + 1e-6, p.name + ": dh");
  expect(all.dw.relative() <= kAllowance * all.dw_plain.relative() + 1e-6, p.name + ": dweight");

  const auto same = [&](const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
  };
  const Forward small = forward(in, 0, p.tokens, 1, true),
                bare = forward(in, 0, p.tokens, 1, false);
  expect(same(small.logprobs, out.logprobs) && same(small.entropy, out.entropy) &&
             same(bare.log_sum, out.log_sum),
         p.name + ": any workspace, with or without entropy");
  for (const int64_t t : {int64_t{0}, p.tokens / 2, p.tokens - 1}) {
    const Forward alone = forward(in, t, 1, 1, true);
    expect(same_rows(alone.logprobs, 0, out.logprobs, size_t(t), 1) &&
               same_rows(alone.log_sum, 0, out.log_sum, size_t(t), 1) &&
               same_rows(alone.entropy, 0, out.entropy, size_t(t), 1),
           p.name + ": a token alone");
  }
  const Backward again = backward(in, out.log_sum, slice);
  expect(again.dh == back.dh && again.dweight == back.dweight, p.name + ": two runs, same bytes");
  std::fflush(stdout);
}

void check_small() {
  check_problem({"3 tokens, 5 entries", 3, 64, 5}, 256);
  check_problem({"130 tokens, 700 entries", 130, 128, 700, false, 0.7f}, 256);
}

void check_refusals() {
  const Inputs in({"refusals", 4, 64, 10});
  DeviceArray<float> out(16);
  DeviceArray<unsigned char> workspace(1 << 16);
  const auto status = [&](auto change, size_t bytes = 1 << 16) {
    HeadForwardCudaArgs a;
    a.head = in.arguments(0, 4);
    a.logprobs = out.get(), a.log_sum = out.get() + 4;
    change(a);
    return model::head_forward(a, workspace.get(), bytes, nullptr).status;
  };
  expect(status([](auto&) {}) == HeadCudaStatus::kOk, "a good call");
  expect(status([](auto&) {}, 100) == HeadCudaStatus::kWorkspaceTooSmall, "workspace");
  const auto refused = [&](auto change, const char* what) {
    expect(status(change) == HeadCudaStatus::kBadArgument, what);
  };
  refused([](auto& a) { a.head.width = 100; }, "width 100");
  refused([](auto& a) { a.head.vocab = 0; }, "no vocabulary");
  refused([](auto& a) { a.head.factor = 0; }, "factor 0");
  refused([](auto& a) { a.head.labels = nullptr; }, "null labels");
  refused([](auto& a) { a.logprobs = nullptr; }, "null logprobs");
  expect(status([](auto& a) { a.head.tokens = 0; }) == HeadCudaStatus::kOk, "no tokens");
  const std::vector<int64_t> beyond{10, 3, -1, 9};
  DeviceArray<int64_t> labels(beyond);
  expect(status([&](auto& a) { a.head.labels = labels.get(); }) == HeadCudaStatus::kOk, "labels");
  must(cudaDeviceSynchronize(), "refusals");
  const std::vector<float> logprobs = out.download(0, 4);
  expect(std::isnan(logprobs[0]) && !std::isnan(logprobs[1]) && logprobs[2] == 0,
         "a label outside the vocabulary gives NaN");
}

/// More than 2^31 elements of h and dh: the last tokens give what they give alone.
void check_offsets() {
  const int64_t tokens = 540001, vocab = 300, width = 4096, last = 2;
  const Inputs in({"beyond 2^31 elements", tokens, width, vocab});
  DeviceArray<float> logprobs(tokens), log_sum(tokens);
  DeviceArray<uint16_t> dh(in.h.count()), dweight(in.weight.count());
  const auto run = [&](int64_t first, int64_t count) {
    HeadForwardCudaArgs f;
    f.head = in.arguments(first, count);
    DeviceArray<int64_t> labels(std::vector<int64_t>(in.labels_host.begin() + first,
                                                     in.labels_host.begin() + first + count));
    f.head.labels = labels.get();
    f.logprobs = logprobs.get(), f.log_sum = log_sum.get();
    DeviceArray<unsigned char> space(model::head_forward_workspace_bytes(vocab, count, false));
    must_launch(model::head_forward(f, space.get(), space.count(), nullptr), in.p.name);
    DeviceArray<float> gradient(in.dlogprobs.download(size_t(first), size_t(count)));
    HeadBackwardCudaArgs b;
    b.head = f.head;
    b.log_sum = log_sum.get(), b.dlogprobs = gradient.get();
    b.dh = dh.get(), b.dweight = dweight.get();
    DeviceArray<unsigned char> more(model::head_backward_workspace_bytes(b.head, vocab));
    must_launch(model::head_backward(b, more.get(), more.count(), nullptr), in.p.name);
    must(cudaDeviceSynchronize(), in.p.name.c_str());
    const size_t at = size_t(count - last);
    return std::make_pair(logprobs.download(at, last), dh.download(at * width, last * width));
  };
  const auto all = run(0, tokens), alone = run(tokens - last, last);
  expect(all == alone, in.p.name + ": the last tokens");
  std::printf("%s: done\n", in.p.name.c_str());
}

void check_all() {
  check_refusals();
  check_small();
  check_problem({"1 token, 1 entry", 1, 64, 1}, 1);
  check_problem({"300 tokens, 5000 entries", 300, 256, 5000}, 1024);
  check_problem({"300 tokens, 5000 entries, fp32", 300, 256, 5000, false, 1.3f}, 5000);
  check_problem({"1000 tokens, 1031 entries", 1000, 192, 1031, true, 0.5f}, 512);
  check_problem({"large logits", 200, 256, 3000, false, 1, 1 << 20, 60}, 4096);
  check_problem({"real width", 520, 4096, 154880, true, 1, 4}, 16384);
  check_offsets();
}

double cublas_rate(const Cublas& cublas) {
  if (cublas.gemm == nullptr) return 0;
  const int64_t n = 8192;
  DeviceArray<uint16_t> a(n * n), b(n * n), c(n * n);
  fill(a, 1, 1);
  fill(b, 2, 1);
  const double ms =
      median_ms(10, 1, [&](int) { cublas(true, false, n, n, n, a.get(), b.get(), c.get()); });
  return 2.0 * double(n) * double(n) * double(n) / ms * 1e-9;
}

void record_time(const std::string& name, double ms, double again, double flops, double gemm) {
  const double rate = flops / ms * 1e-9;
  std::printf("%-44s %9.3f ms (again %.3f) %6.1f TFLOP/s, cuBLAS %.1f, share %.3f\n",
              name.c_str(),
              ms,
              again,
              rate,
              gemm,
              gemm > 0 ? rate / gemm : 0);
  char text[256];
  std::snprintf(text,
                sizeof text,
                "\"time\": \"%s\", \"ms\": %.4f, \"ms_again\": %.4f, \"tflops\": %.1f, "
                "\"cublas_tflops\": %.1f",
                name.c_str(),
                ms,
                again,
                rate,
                gemm);
  record(text);
  std::fflush(stdout);
}

void time_one(
    int64_t tokens, bool round, const Cublas& cublas, double gemm, int count, int64_t slice) {
  const Inputs in({"time", tokens, 4096, 154880, round});
  const std::string name = std::to_string(tokens) + " tokens" + (round ? "" : ", fp32 logits");
  const double unit = 2.0 * double(tokens) * 4096 * 154880;
  DeviceArray<float> logprobs(tokens), log_sum(tokens), entropy(tokens);
  const auto timed = [&](const std::string& what, double flops, auto call) {
    const double ms = median_ms(count, 1, call);
    record_time(name + ": " + what, ms, median_ms(count, 1, call), flops, gemm);
  };
  HeadForwardCudaArgs f;
  f.head = in.arguments(0, tokens);
  f.logprobs = logprobs.get(), f.log_sum = log_sum.get();
  {
    DeviceArray<unsigned char> space(model::head_forward_workspace_bytes(154880, tokens, true));
    const auto call = [&](int) {
      must_launch(model::head_forward(f, space.get(), space.count(), nullptr), name);
    };
    timed("forward", unit, call);
    f.entropy = entropy.get();
    if (tokens == 8192) timed("forward with entropy", unit, call);
  }
  if (slice > 0) {
    DeviceArray<uint16_t> dh(in.h.count()), dweight(in.weight.count());
    HeadBackwardCudaArgs b;
    b.head = f.head;
    b.log_sum = log_sum.get(), b.dlogprobs = in.dlogprobs.get();
    b.dh = dh.get(), b.dweight = dweight.get();
    DeviceArray<unsigned char> space(model::head_backward_workspace_bytes(b.head, slice));
    timed("backward, slices of " + std::to_string(slice), 3 * unit, [&](int) {
      must_launch(model::head_backward(b, space.get(), space.count(), nullptr), name);
    });
  }
  if (tokens == 8192 && round && cublas.gemm != nullptr) {
    DeviceArray<uint16_t> logits(size_t(tokens) * 154880);
    timed("cuBLAS, logits alone, stored in bf16", unit, [&](int) {
      cublas(true, false, 154880, tokens, 4096, in.weight.get(), in.h.get(), logits.get());
    });
  }
}

void time_all() {
  const Cublas cublas;
  const double gemm = cublas_rate(cublas);
  time_one(1024, true, cublas, gemm, 20, 16384);
  time_one(8192, true, cublas, gemm, 10, 16384);
  time_one(8192, false, cublas, gemm, 10, 154880);
  time_one(32768, true, cublas, gemm, 3, 8192);
  time_one(131072, true, cublas, cublas_rate(cublas), 2, 0);
}

}  // namespace
}  // namespace lockstep::device_test

int main(int argc, char** argv) {
  using namespace lockstep::device_test;
  return device_main(argc, argv, "check|time|small", [](const std::string& mode) {
    if (mode == "check") check_all();
    if (mode == "small") check_small();
    if (mode == "time") time_all();
  });
}
