#include "golden/store/sha256.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <vector>

#include "model/base/error.hpp"

namespace lockstep::golden {
namespace {

// The round constants are the first 32 fractional bits of the cube roots of the first 64 primes.
std::array<uint32_t, 64> make_round_constants() {
  std::array<uint32_t, 64> constants{};
  size_t count = 0;
  for (uint32_t candidate = 2; count < constants.size(); ++candidate) {
    bool prime = true;
    for (uint32_t d = 2; d * d <= candidate; ++d) prime = prime && candidate % d != 0;
    if (!prime) continue;
    // Integer cube root of candidate * 2^96, bit by bit; its low 32 bits are the fraction.
    uint64_t root = 0;
    for (int bit = 35; bit >= 0; --bit) {
      const unsigned __int128 r = root | (1ULL << bit);
      if (r * r * r <= static_cast<unsigned __int128>(candidate) << 96) root |= 1ULL << bit;
    }
    constants[count++] = static_cast<uint32_t>(root);
  }
  return constants;
}

}  // namespace

void Sha256::block(const uint8_t* bytes) {
  static const std::array<uint32_t, 64> k = make_round_constants();
  std::array<uint32_t, 64> w;
  for (size_t i = 0; i < 16; ++i) {
    w[i] = uint32_t{bytes[4 * i]} << 24 | uint32_t{bytes[4 * i + 1]} << 16 |
           uint32_t{bytes[4 * i + 2]} << 8 | uint32_t{bytes[4 * i + 3]};
  }
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + k[i] + w[i];
    const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const std::array<uint32_t, 8> sums{a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state_[i] += sums[i];
}

void Sha256::update(const void* data, size_t num_bytes) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  num_bytes_ += num_bytes;
  while (num_bytes > 0) {
    if (num_pending_ == 0 && num_bytes >= 64) {
      block(bytes);
      bytes += 64;
      num_bytes -= 64;
      continue;
    }
    const size_t take = std::min(num_bytes, 64 - num_pending_);
    std::memcpy(pending_.data() + num_pending_, bytes, take);
    num_pending_ += take;
    bytes += take;
    num_bytes -= take;
    if (num_pending_ == 64) {
      block(pending_.data());
      num_pending_ = 0;
    }
  }
}

std::string Sha256::hex() {
  const uint64_t num_bits = num_bytes_ * 8;
  const uint8_t one = 0x80, zero = 0;
  update(&one, 1);
  while (num_pending_ != 56) update(&zero, 1);
  std::array<uint8_t, 8> length;
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<uint8_t>(num_bits >> (56 - 8 * i));
  update(length.data(), length.size());
  std::string text;
  for (uint32_t word : state_) text += fmt::format("{:08x}", word);
  return text;
}

std::string sha256_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  LOCKSTEP_CHECK(in.good(), kInput, "reading {}: cannot open the file", path.string());
  Sha256 digest;
  std::vector<char> buffer(1 << 20);
  while (in.read(buffer.data(), static_cast<std::streamsize>(buffer.size())) || in.gcount() > 0) {
    digest.update(buffer.data(), static_cast<size_t>(in.gcount()));
  }
  return digest.hex();
}

}  // namespace lockstep::golden
