#include "harness/runner/progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

namespace lockstep::harness {

Progress::Progress(Mode mode)
    : quiet_(mode == Mode::kQuiet), terminal_(mode == Mode::kAuto && isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() { clear(); }

void Progress::clear() {
  if (drawn_) std::fputs("\r\033[K", stderr);
  drawn_ = false;
}

void Progress::line(std::string_view text) {
  if (quiet_) return;
  clear();
  std::fputs(fmt::format("{}\n", text).c_str(), stderr);
  std::fflush(stderr);
}

void Progress::start(std::string what) {
  what_ = std::move(what);
  last_ = {};
}

void Progress::step(int64_t done, int64_t total, std::string_view detail) {
  if (!terminal_ || total <= 0) return;
  const auto now = std::chrono::steady_clock::now();
  if (done < total && now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  constexpr int kWidth = 24;
  const auto filled = static_cast<size_t>(kWidth * done / total);
  std::fputs(fmt::format("\r\033[K{} [{}{}] {}/{} {}",
                         what_,
                         std::string(filled, '#'),
                         std::string(kWidth - filled, '.'),
                         done,
                         total,
                         detail)
                 .c_str(),
             stderr);
  std::fflush(stderr);
  drawn_ = true;
}

}  // namespace lockstep::harness
