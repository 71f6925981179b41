#pragma once

// Selections, inputs and awkward shapes shared by the sparse MLA device tests.

#include <cinttypes>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "model/ops/sparse_mla_cuda.hpp"
#include "tests/device/cublas.hpp"
#include "tests/device/device_support.hpp"

namespace lockstep::device_test {
namespace {

using model::MlaCudaStatus;
using model::SparseMlaForwardArgs;

constexpr int kRank = 512;
constexpr double kAllowance = 1.25;  // of the plain form's error
constexpr float kScale = 0.0625f;

float from_bf16(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}
double to_bf16(double value) {  // by way of fp32, as the kernel does
  const __nv_bfloat16_raw bits = __float2bfloat16_rn(static_cast<float>(value));
  return from_bf16(bits.x);
}

using Rng = std::mt19937_64;
using Rows = std::vector<int32_t>;

/// `count` of the numbers below `among`, distinct, in random order.
std::vector<int32_t> pick(int64_t count, int64_t among, Rng& rng, std::vector<int32_t>& deck) {
  if (int64_t(deck.size()) != among) {
    deck.resize(among);
    std::iota(deck.begin(), deck.end(), 0);
  }
  for (int64_t i = 0; i < count; ++i)
    std::swap(deck[i], deck[i + int64_t(rng() % uint64_t(among - i))]);
  return {deck.begin(), deck.begin() + count};
}

/// Pools of 4 tokens, as a model selects them: for a token at `position` of a document the best
/// top_k / 4 of its complete pools (here any), the tail of the incomplete one, then -1.
Rows causal(const std::vector<int64_t>& documents, int64_t top_k, int64_t width, uint64_t seed) {
  Rows rows;
  Rng rng(seed);
  std::vector<int32_t> deck;
  int64_t first = 0;
  for (const int64_t length : documents) {
    for (int64_t position = 0; position < length; ++position) {
      const int64_t pools = (position + 1) / 4;
      const size_t end = rows.size() + width;
      for (const int32_t pool : pick(std::min(top_k / 4, pools), pools, rng, deck))
        for (int i = 0; i < 4; ++i) rows.push_back(int32_t(first + pool * 4 + i));
      for (int64_t i = 4 * pools; i <= position; ++i) rows.push_back(int32_t(first + i));
      rows.resize(end, -1);
    }
    first += length;
  }
  return rows;
}
/// Pools anywhere in the latent.
Rows anywhere(int64_t tokens, int64_t keys, int64_t width, uint64_t seed) {
  Rows rows;
  Rng rng(seed);
  std::vector<int32_t> deck;
  for (int64_t t = 0; t < tokens; ++t) {
    const size_t end = rows.size() + width;
    for (const int32_t pool : pick((width + 3) / 4, keys / 4, rng, deck))
      for (int i = 0; i < 4; ++i) rows.push_back(pool * 4 + i);
    rows.resize(end);
  }
  return rows;
}

struct Problem {
  std::string name;
  int64_t tokens, keys, width;
  Rows selection;
  int heads = 64;
  float q_scale = 1;
  int samples = 16;
  std::function<void(std::vector<uint16_t>& q, std::vector<uint16_t>& latent)> change = {};
};

/// Inputs on the device; rows of the latent that nobody selects are NaN.
struct Inputs {
  int64_t tokens, keys, width;
  int heads;
  DeviceArray<uint16_t> q, latent;
  DeviceArray<int32_t> selection;
  std::vector<uint16_t> q_host, latent_host;
  explicit Inputs(const Problem& p, uint32_t seed = 1)
      : tokens(p.tokens),
        keys(p.keys),
        width(p.width),
        heads(p.heads),
        q(size_t(tokens) * heads * kRank),
        latent(size_t(keys) * kRank),
        selection(p.selection) {
    fill(q, seed * 4, p.q_scale);
    fill(latent, seed * 4 + 1, 1);
    must(cudaDeviceSynchronize(), "inputs");
    q_host = q.download();
    latent_host = latent.download();
    if (p.change) p.change(q_host, latent_host);
    std::vector<bool> used(size_t(keys), false);
    for (const int32_t row : p.selection)
      if (row >= 0 && row < keys) used[row] = true;
    for (int64_t row = 0; row < keys; ++row)
      if (!used[row]) std::fill_n(latent_host.begin() + row * kRank, kRank, uint16_t{0xffff});
    upload(q, q_host);
    upload(latent, latent_host);
  }
  static void upload(const DeviceArray<uint16_t>& to, const std::vector<uint16_t>& from) {
    must(cudaMemcpy(to.get(), from.data(), from.size() * 2, cudaMemcpyHostToDevice), "upload");
  }
  SparseMlaForwardArgs arguments(int64_t first, int64_t count) const {
    SparseMlaForwardArgs a;
    a.tokens = count;
    a.keys = keys;
    a.width = width;
    a.heads = heads;
    a.q_THR = q.get() + first * heads * kRank;
    a.latent_SR = latent.get();
    a.selection_TW = selection.get() + first * width;
    a.scale = kScale;
    return a;
  }
};

Problem full(const std::string& name, int64_t tokens, int64_t keys, int64_t width, uint64_t seed) {
  return {name, tokens, keys, width, anywhere(tokens, keys, width, seed)};
}
Problem documents(const std::string& name,
                  const std::vector<int64_t>& lengths,
                  int64_t top_k,
                  int64_t width) {
  const int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  return {name, tokens, tokens, width, causal(lengths, top_k, width, 7)};
}
/// -1 anywhere, indices behind the latent, whole groups and whole rows unused, a key named twice.
Problem scattered(int64_t tokens, int64_t keys, int64_t width) {
  Problem p = full("unused entries anywhere", tokens, keys, width, 5);
  Rng rng(11);
  for (int64_t t = 0; t < tokens; ++t) {
    int32_t* const row = &p.selection[t * width];
    for (int64_t j = 0; j < width; ++j) {
      const uint64_t draw = rng() % 8;
      if (draw < 3) row[j] = -1;
      if (draw == 3) row[j] = int32_t(keys + int64_t(rng() % 1000));
    }
    if (t % 5 == 1) std::fill_n(row, std::min<int64_t>(width, 128), -1);
    if (t % 5 == 2) std::fill_n(row + width / 3, width - width / 3, -1);
    if (t % 5 == 3) std::fill_n(row, width, -1);
    if (t % 5 == 4) row[width - 1] = row[0] = 3;
  }
  p.samples = int(tokens);
  return p;
}

/// What a sanitizer, too, gets through in minutes.
std::vector<Problem> small_problems() {
  std::vector<Problem> all = {documents("small documents", {0, 1, 3, 4, 0, 5, 66, 0}, 64, 67),
                              scattered(6, 300, 200),
                              full("small, 5 heads", 2, 256, 192, 3)};
  all[1].name = "small, unused entries anywhere";
  all[2].heads = 5;
  return all;
}

/// Median milliseconds of an 8192^3 bf16 product.
double cublas_rate() {
  const int n = 8192;
  DeviceArray<uint16_t> x(size_t(n) * n), y(size_t(n) * n), z(size_t(n) * n);
  fill(x, 1, 1);
  fill(y, 2, 1);
  const Cublas cublas;
  if (cublas.gemm == nullptr) std::exit(2);
  const double ms =
      median_ms(15, 1, [&](int) { cublas(true, false, n, n, n, x.get(), y.get(), z.get()); });
  return 2.0 * n * n * n / ms * 1e-9;
}

}  // namespace
}  // namespace lockstep::device_test
