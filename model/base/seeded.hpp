// Reproducible pseudo-random tensors by name, identical in C++ and in the golden generator, so that
// weights need not be stored.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace lockstep {

/// Value i of the stream (seed, name): uniform in [-1, 1), a multiple of 2^-23, hence exact in
/// float32. key = fnv1a64(name) xor (seed * 0x9E3779B97F4A7C15); h = splitmix64(key + i *
/// 0x9E3779B97F4A7C15); value = (h >> 40) * 2^-23 - 1. splitmix64(z): z += 0x9E3779B97F4A7C15; z =
/// (z ^ z>>30) * 0xBF58476D1CE4E5B9; z = (z ^ z>>27) * 0x94D049BB133111EB; z ^ z>>31.
std::vector<float> seeded_uniform(uint64_t seed, std::string_view name, int64_t count);

/// Key of the stream; seeded_value(key, i) is one element of it.
uint64_t seeded_key(uint64_t seed, std::string_view name);
float seeded_value(uint64_t key, int64_t index);

}  // namespace lockstep
