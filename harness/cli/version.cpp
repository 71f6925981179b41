#include "harness/cli/version.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "harness/cli/commands.hpp"
#include "harness/result/result.hpp"

namespace lockstep::harness {

std::string version_text() {
  const Environment e = local_environment();
  return fmt::format("lockstep {} ({}{}, {}, torch {})",
                     e.lockstep_version,
                     e.git_commit.empty() ? "" : e.git_commit + ", ",
                     e.compiler,
                     e.march,
                     e.torch);
}

void print(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0) {
    return;
  }
  if (errno == EPIPE) return;  // the reader has seen enough
  fail(ErrorKind::kInput,
       "writing standard output: {}; free space on that disk or write elsewhere",
       std::strerror(errno));
}

model::ConfigDefaults parse_defaults(std::string_view word) {
  if (word == "refuse") return model::ConfigDefaults::kRefuse;
  if (word == "hf") return model::ConfigDefaults::kHf;
  if (word == "trainer") return model::ConfigDefaults::kTrainer;
  fail(ErrorKind::kInput, "--defaults {}: use refuse, hf or trainer", word);
}

}  // namespace lockstep::harness
