// Where things lie: the source tree with its goldens, the cache, and the optional Python that makes
// goldens and runs the transformers implementation as a peer (nothing of the product needs it).
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace lockstep::harness {

/// ${LOCKSTEP_CACHE:-$HOME/.cache/lockstep}, where scripts/setup puts what it installs.
std::filesystem::path cache_folder();

/// Interpreter with transformers, as `scripts/setup --golden` installs it; empty when absent.
std::filesystem::path golden_python_path();

/// Same, or throws kConfig saying that `what` needs it and how to get it.
std::filesystem::path require_golden_python(std::string_view what);

/// The source tree this program was built from, or the current folder when it has the wanted path.
/// Throws kInput when `relative` is in neither.
std::filesystem::path source_path(const std::filesystem::path& relative);

/// ./scenarios, else that of the source tree this program was built from; empty when there is none.
std::filesystem::path scenario_folder();

/// Folder with MANIFEST.json and the stored cases: $LOCKSTEP_GOLDEN, else golden/data of the source
/// tree. Throws kGolden when there is none.
std::filesystem::path golden_folder();

}  // namespace lockstep::harness
