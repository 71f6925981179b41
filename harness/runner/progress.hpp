// Telling a person that work goes on: a bar on a terminal, plain lines elsewhere, nothing when
// quiet.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::harness {

/// Writes to standard error only. Destruction clears the bar.
class Progress {
 public:
  enum class Mode : uint8_t { kAuto, kQuiet };
  explicit Progress(Mode mode);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();

  /// A line that stays: what begins or what was found.
  void line(std::string_view text);
  /// Names the work that step() reports on.
  void start(std::string what);
  /// Drawn at most ten times a second on a terminal; elsewhere only lines are written.
  void step(int64_t done, int64_t total, std::string_view detail);
  /// Removes the bar.
  void clear();

 private:
  bool quiet_ = false, terminal_ = false, drawn_ = false;
  std::string what_;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace lockstep::harness
