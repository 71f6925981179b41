#include "harness/launch/paths.hpp"

#include <cstdlib>

#include "harness/launch/mpi_start.hpp"
#include "model/base/error.hpp"

namespace lockstep::harness {

namespace fs = std::filesystem;

fs::path cache_folder() {
  if (const char* chosen = std::getenv("LOCKSTEP_CACHE"); chosen != nullptr && *chosen != '\0') {
    return chosen;
  }
  const char* home = std::getenv("HOME");
  return fs::path(home != nullptr ? home : ".") / ".cache" / "lockstep";
}

fs::path golden_python_path() {
  const fs::path python = cache_folder() / "golden-venv" / "bin" / "python";
  std::error_code error;
  return fs::exists(python, error) ? python : fs::path();
}

fs::path require_golden_python(std::string_view what) {
  fs::path python = golden_python_path();
  LOCKSTEP_CHECK(!python.empty(),
                 kConfig,
                 "{}: needs Python with transformers, which is not at {}; run `scripts/setup "
                 "--golden`",
                 what,
                 (cache_folder() / "golden-venv").string());
  return python;
}

fs::path source_path(const fs::path& relative) {
  std::error_code error;
  if (fs::exists(relative, error)) return relative;
  // build/<preset>/lockstep lies two folders below the tree it was built from.
  for (fs::path folder = program_path().parent_path(); folder.has_relative_path();
       folder = folder.parent_path()) {
    if (fs::exists(folder / relative, error)) return folder / relative;
  }
  fail(ErrorKind::kInput,
       "{} was found neither in the current folder nor above {}; run from the source tree or name "
       "the path",
       relative.string(),
       program_path().string());
}

fs::path scenario_folder() {
  try {
    return source_path("scenarios");
  } catch (const Error&) {
    return {};
  }
}

fs::path golden_folder() {
  if (const char* chosen = std::getenv("LOCKSTEP_GOLDEN"); chosen != nullptr && *chosen != '\0') {
    return chosen;
  }
  try {
    return source_path(fs::path("golden") / "data");
  } catch (const Error& error) {
    fail(ErrorKind::kGolden,
         "stored goldens: {}; or set LOCKSTEP_GOLDEN to their folder",
         error.what());
  }
}

}  // namespace lockstep::harness
