// SHA-256, for checking stored files against their manifest.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

namespace lockstep::golden {

/// Incremental SHA-256 (FIPS 180-4).
class Sha256 {
 public:
  void update(const void* data, size_t num_bytes);
  /// Lower-case hexadecimal digest. The object is used up.
  std::string hex();

 private:
  void block(const uint8_t* bytes);

  std::array<uint32_t, 8> state_{0x6a09e667,
                                 0xbb67ae85,
                                 0x3c6ef372,
                                 0xa54ff53a,
                                 0x510e527f,
                                 0x9b05688c,
                                 0x1f83d9ab,
                                 0x5be0cd19};
  std::array<uint8_t, 64> pending_{};
  size_t num_pending_ = 0;
  uint64_t num_bytes_ = 0;
};

/// Digest of a file's bytes. Throws kInput when it cannot be read.
std::string sha256_file(const std::filesystem::path& path);

}  // namespace lockstep::golden
