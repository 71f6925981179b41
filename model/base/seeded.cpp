#include "model/base/seeded.hpp"

namespace lockstep {
namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ULL;

uint64_t splitmix64(uint64_t z) {
  z += kGolden;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

}  // namespace

uint64_t seeded_key(uint64_t seed, std::string_view name) {
  uint64_t hash = 0xCBF29CE484222325ULL;  // FNV-1a, 64 bits
  for (char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3ULL;
  return hash ^ (seed * kGolden);
}

float seeded_value(uint64_t key, int64_t index) {
  const uint64_t h = splitmix64(key + static_cast<uint64_t>(index) * kGolden);
  return static_cast<float>(h >> 40) * 0x1p-23F - 1.0F;
}

std::vector<float> seeded_uniform(uint64_t seed, std::string_view name, int64_t count) {
  const uint64_t key = seeded_key(seed, name);
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) values[static_cast<size_t>(i)] = seeded_value(key, i);
  return values;
}

}  // namespace lockstep
