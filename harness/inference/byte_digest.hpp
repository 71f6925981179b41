// A number that tells whether bytes are those of before. No defence against intent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace lockstep::harness {

/// Of a stream of bytes, however it is cut into pieces.
class ByteDigest {
 public:
  void add(const void* data, size_t size) {
    const auto* from = static_cast<const unsigned char*>(data);
    size_ += size;
    for (; size > 0 && carried_ > 0; --size) carry(*from++);
    for (; size >= sizeof(uint64_t); size -= sizeof(uint64_t), from += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, from, sizeof word);
      mix(word);
    }
    for (; size > 0; --size) carry(*from++);
  }
  [[nodiscard]] uint64_t value() const {
    ByteDigest end = *this;
    end.mix(end.word_);
    end.mix(size_);
    return end.state_;
  }

 private:
  void carry(unsigned char byte) {
    word_ |= uint64_t{byte} << (8 * carried_);
    if (++carried_ < sizeof word_) return;
    mix(word_);
    word_ = carried_ = 0;
  }
  void mix(uint64_t word) {
    state_ = (state_ ^ word) * 0x9E3779B97F4A7C15ULL;
    state_ ^= state_ >> 29;
  }

  uint64_t state_ = 0xCBF29CE484222325ULL, word_ = 0, carried_ = 0, size_ = 0;
};

}  // namespace lockstep::harness
