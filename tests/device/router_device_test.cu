// Checks and times the choice of experts on the device, without a test framework.
//   router_device_test check OUT.json   against float64, awkward shapes, ties
//   router_device_test time OUT.json    timings beside a device copy of as many bytes
//   router_device_test small OUT.json   a few shapes, for compute-sanitizer
// Exit code 0 only if every check passed.

#include <numeric>

#include "model/ops/moe_cuda.hpp"
#include "tests/device/device_support.hpp"

namespace lockstep::device_test {
namespace {

using model::MoeCudaStatus;
using model::MoeRouterArgs;

struct Problem {
  std::string name;
  int64_t tokens, experts, slots, groups = 1, kept = 1;
  bool softmax = false, round = false, normalise = true, ties = false;
};

double rounded(double x) { return double(__bfloat162float(__float2bfloat16_rn(float(x)))); }

/// Scores before rounding.
std::vector<double> true_scores(const Problem& p, const float* logits) {
  std::vector<double> s(p.experts);
  double sum = 0;
  for (int64_t e = 0; e < p.experts; ++e) sum += s[e] = std::exp(double(logits[e]));
  for (int64_t e = 0; e < p.experts; ++e)
    s[e] = p.softmax ? s[e] / sum : 1 / (1 + std::exp(-double(logits[e])));
  return s;
}

/// Which experts may be chosen.
std::vector<bool> eligible(const Problem& p, const std::vector<double>& choice) {
  if (p.groups == 1) return std::vector<bool>(size_t(p.experts), true);
  const int64_t each = p.experts / p.groups;
  std::vector<double> score;
  for (int64_t g = 0; g < p.groups; ++g) {
    std::vector<double> c(choice.begin() + g * each, choice.begin() + (g + 1) * each);
    std::sort(c.rbegin(), c.rend());
    score.push_back(c[0] + (each > 1 ? c[1] : 0));
  }
  std::vector<int64_t> order(size_t(p.groups));
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(
      order.begin(), order.end(), [&](int64_t a, int64_t b) { return score[a] > score[b]; });
  std::vector<bool> good(size_t(p.experts), false);
  for (int64_t i = 0; i < p.kept; ++i) std::fill_n(good.begin() + order[i] * each, each, true);
  return good;
}

void check_problem(const Problem& p) {
  constexpr double kClose = 1e-6;
  DeviceArray<float> logits(size_t(p.tokens * p.experts)), bias(size_t(p.experts)),
      dweights(size_t(p.tokens * p.slots));
  fill(logits, 1, 1.5f, 0);
  fill(bias, 2, p.ties ? 0.0f : 0.1f, 0.2f);
  fill(dweights, 3, 1, 0);
  std::vector<float> host = logits.download();
  if (p.ties) {
    for (float& x : host) x = std::round(2 * x) / 2;
    must(cudaMemcpy(logits.get(), host.data(), host.size() * 4, cudaMemcpyHostToDevice), "upload");
  }
  const std::vector<float> bias_host = bias.download(), dw = dweights.download();
  Poisoned<int64_t> chosen(size_t(p.tokens * p.slots));
  Poisoned<float> weights(chosen.count() - kGuard), dlogits(logits.count());
  MoeRouterArgs a;
  a.tokens = p.tokens, a.experts = p.experts, a.slots = p.slots;
  a.groups = p.groups, a.groups_kept = p.kept;
  a.softmax = p.softmax, a.round_scores = p.round, a.normalise = p.normalise;
  a.scaling = 2.5f;
  a.logits = logits.get(), a.bias = bias.get(), a.chosen = chosen.get();
  must_launch(model::moe_route(a, weights.get(), nullptr), p.name);
  must_launch(model::moe_route_backward(a, dweights.get(), dlogits.get(), nullptr), p.name);
  must(cudaDeviceSynchronize(), p.name.c_str());
  const std::vector<int64_t> ids = chosen.checked(p.name);
  const std::vector<float> w = weights.checked(p.name), d = dlogits.checked(p.name);
  Error error, gradient;
  int64_t wrong = 0;
  for (int64_t t = 0; t < p.tokens; ++t) {
    const std::vector<double> raw = true_scores(p, &host[t * p.experts]);
    std::vector<double> score = raw, choice(p.experts), want(p.experts);
    for (int64_t e = 0; e < p.experts; ++e) {
      if (p.round) score[e] = rounded(score[e]);
      choice[e] = score[e] + double(bias_host[e]);
    }
    std::vector<bool> open = eligible(p, choice);
    const int64_t* id = &ids[t * p.slots];
    double sum = 0, along = 0;
    for (int64_t j = 0; j < p.slots; ++j) {
      if (id[j] < 0 || id[j] >= p.experts || !open[id[j]]) {
        ++wrong;
        continue;
      }
      for (int64_t e = 0; e < p.experts; ++e) {
        if (!open[e] || e == id[j]) continue;
        wrong += choice[e] > choice[id[j]] + (p.round ? 0.01 : kClose);
        wrong += p.ties && choice[e] == choice[id[j]] && e < id[j];
      }
      open[id[j]] = false;
      sum += score[id[j]];
      along += double(dw[t * p.slots + j]) * score[id[j]];
    }
    if (wrong > 0) continue;
    for (int64_t j = 0; j < p.slots; ++j) {
      const double g = double(dw[t * p.slots + j]);
      error.add(w[t * p.slots + j], 2.5 * (p.normalise ? score[id[j]] / sum : score[id[j]]));
      want[id[j]] += 2.5 * (p.normalise ? (g - along / sum) / sum : g);
    }
    double dot = 0;
    for (int64_t e = 0; e < p.experts; ++e) dot += want[e] * raw[e];
    for (int64_t e = 0; e < p.experts; ++e)
      gradient.add(d[t * p.experts + e],
                   p.softmax ? raw[e] * (want[e] - dot) : want[e] * raw[e] * (1 - raw[e]));
  }
  std::printf("%-36s wrong %lld weights %.2e gradient %.2e\n",
              p.name.c_str(),
              static_cast<long long>(wrong),
              error.relative(),
              gradient.relative());
  expect(wrong == 0, p.name + ": chosen experts");
  // A score between two bf16 values may be rounded to the other one.
  expect(error.relative() <= (p.round ? 1e-3 : 1e-6), p.name + ": weights");
  expect(gradient.relative() <= (p.round ? 1e-3 : 2e-6), p.name + ": gradient");
  expect(error.not_finite + gradient.not_finite == 0, p.name + ": finite");
  char text[256];
  std::snprintf(text,
                sizeof text,
                "\"check\": \"%s\", \"weights_rel_fro\": %.3e, \"gradient_rel_fro\": %.3e",
                p.name.c_str(),
                error.relative(),
                gradient.relative());
  record(text);

  a.replay = true;
  Poisoned<float> again(weights.count() - kGuard);
  must_launch(model::moe_route(a, again.get(), nullptr), p.name);
  must(cudaDeviceSynchronize(), p.name.c_str());
  expect(again.checked(p.name) == w, p.name + ": replay gives the same weights");
}

void check_all() {
  check_problem({"1 token, 1 expert", 1, 1, 1});
  check_problem({"1000 tokens, 288 experts", 1000, 288, 8});
  check_problem({"rounded scores", 1000, 288, 8, 1, 1, false, true});
  check_problem({"softmax, not normalised", 300, 60, 6, 1, 1, true, false, false});
  check_problem({"3 of 8 groups", 1000, 256, 8, 8, 3});
  check_problem({"512 experts, 32 slots", 77, 512, 32});
  check_problem({"ties", 500, 288, 8, 1, 1, false, false, true, true});
  MoeRouterArgs a;
  a.tokens = 1, a.experts = 4, a.slots = 5;
  expect(model::moe_route(a, nullptr, nullptr).status == MoeCudaStatus::kBadArgument, "5 of 4");
}

void time_all() {
  for (const int64_t tokens : {int64_t{8192}, int64_t{131072}}) {
    const int64_t experts = 288, slots = 8;
    DeviceArray<float> logits(size_t(tokens * experts)), bias(static_cast<size_t>(experts)),
        weights(size_t(tokens * slots)), dlogits(logits.count());
    DeviceArray<int64_t> chosen(size_t(tokens * slots));
    fill(logits, 1, 1.5f, 0);
    fill(bias, 2, 0.1f, 0);
    MoeRouterArgs a;
    a.tokens = tokens, a.experts = experts, a.slots = slots;
    a.logits = logits.get(), a.bias = bias.get(), a.chosen = chosen.get();
    const std::string name = std::to_string(tokens) + " tokens, 8 of 288";
    time_beside_copy(name, double(tokens * (experts * 4 + slots * 12)), 30, [&](int) {
      must_launch(model::moe_route(a, weights.get(), nullptr), name);
    });
    time_beside_copy(
        name + ", gradient", double(tokens * (experts * 8 + slots * 12)), 30, [&](int) {
          must_launch(model::moe_route_backward(a, weights.get(), dlogits.get(), nullptr), name);
        });
  }
}

}  // namespace
}  // namespace lockstep::device_test

int main(int argc, char** argv) {
  using namespace lockstep::device_test;
  return device_main(argc, argv, "check|time|small", [](const std::string& mode) {
    if (mode == "check" || mode == "small") check_all();
    if (mode == "time") time_all();
  });
}
