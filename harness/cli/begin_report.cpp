#include "harness/cli/begin_report.hpp"

#include <ctime>

#include "golden/store/hdf5.hpp"
#include "harness/launch/mpi_start.hpp"
#include "model/base/parallel.hpp"
#include "model/checkpoint/mapped_file.hpp"

namespace lockstep::harness {
namespace {

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

/// The words in a form that a shell reads back.
std::string shell_line(const std::vector<std::string>& words) {
  std::string line = "lockstep";
  for (const std::string& word : words) {
    const bool plain = !word.empty() && word.find_first_not_of(
                                            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                            "0123456789-_=./,:+@%") == std::string::npos;
    line += ' ';
    if (plain) {
      line += word;
      continue;
    }
    line += '\'';
    for (const char c : word) line += c == '\'' ? std::string("'\\''") : std::string(1, c);
    line += '\'';
  }
  return line;
}

}  // namespace

Report begin_report(const Context& context) {
  Report report;
  report.started = utc_now();
  report.command = shell_line(context.arguments);
  report.environment = local_environment();
  report.environment.threads = num_threads();
  report.environment.mpi = mpi_version();
  report.environment.hdf5 = golden::hdf5_version();
  return report;
}

void check_writable(const std::filesystem::path& out, std::string_view command) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::create_directories(out, error);
  LOCKSTEP_CHECK(!error && fs::is_directory(out),
                 kInput,
                 "{}: cannot make the folder {}: {}; choose another with --out",
                 command,
                 out.string(),
                 error ? error.message() : "something else has that name");
  model::AtomicFile probe((out / ".writable").string());
  probe.write("", 0);
}

}  // namespace lockstep::harness
