// How a rank of a fault program ends, so that its test can read what it met.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "parallel/comm/group.hpp"

namespace lockstep::tests {

/// Writes folder/told.RANK, the code and a line for each text, and ends the process with the code
/// without a word to the other ranks.
[[noreturn]] inline void tell_and_leave(const std::string& folder,
                                        int64_t rank,
                                        int code,
                                        const std::vector<std::string>& lines) {
  {
    std::ofstream file(fmt::format("{}/told.{}", folder, rank));
    file << code << '\n';
    for (const std::string& line : lines) file << line << '\n';
  }
  parallel::Session::mark_left();
  std::fflush(nullptr);
  std::_Exit(code);
}

}  // namespace lockstep::tests
