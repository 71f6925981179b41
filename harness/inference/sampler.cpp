#include "harness/inference/sampler.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace lockstep::harness {
namespace {

uint64_t mixed(uint64_t x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

}  // namespace

void check_sampling(const Sampling& sampling) {
  LOCKSTEP_CHECK(sampling.temperature >= 0 && std::isfinite(sampling.temperature),
                 kConfig,
                 "sampling: temperature {} must not be negative (0 takes the most likely token)",
                 sampling.temperature);
  LOCKSTEP_CHECK(sampling.top_p > 0 && sampling.top_p <= 1,
                 kConfig,
                 "sampling: top_p {} must be above 0 and at most 1",
                 sampling.top_p);
}

double sampling_uniform(uint64_t seed, int64_t index) {
  const uint64_t bits = mixed(mixed(seed) ^ static_cast<uint64_t>(index));
  return static_cast<double>(bits >> 11) * 0x1.0p-53;
}

int64_t sample(const Tensor& logits, const Sampling& sampling, int64_t index) {
  check_sampling(sampling);
  check_shape(logits, {-1}, "sample: logits [V]");
  const Tensor wide = logits.to(at::kDouble).contiguous();
  const double* z = wide.const_data_ptr<double>();
  const auto count = static_cast<size_t>(wide.size(0));
  LOCKSTEP_CHECK(count > 0, kShape, "sample: no logits");
  const auto best = static_cast<size_t>(std::max_element(z, z + count) - z);
  LOCKSTEP_CHECK(!std::isnan(z[best]), kInput, "sample: a logit is NaN");
  if (sampling.temperature == 0) return static_cast<int64_t>(best);

  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [z](size_t a, size_t b) { return z[a] > z[b]; });
  std::vector<double> sums;
  double sum = 0;
  for (const size_t id : order) {
    sum += std::exp((z[id] - z[best]) / sampling.temperature);
    sums.push_back(sum);
  }
  const double kept = *std::lower_bound(sums.begin(), sums.end() - 1, sampling.top_p * sums.back());
  const double target = sampling_uniform(sampling.seed, index) * kept;
  const auto at = std::upper_bound(sums.begin(), sums.end() - 1, target) - sums.begin();
  return static_cast<int64_t>(order[static_cast<size_t>(at)]);
}

}  // namespace lockstep::harness
