// The list of golden files with their digests: what must be there, byte for byte.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::golden {

/// The layout version this program reads. A file of another version is stale.
inline constexpr int64_t kGoldenFormatVersion = 1;

struct ManifestFile {
  std::string file, sha256;  ///< path below the golden folder
  int64_t size_bytes = 0;
};

struct ManifestEntry {
  std::string name, file;  ///< case name; path below the golden folder
  std::string sha256, description, generator_commit, torch, transformers;
  int64_t size_bytes = 0, seed = 0;
  std::vector<ManifestFile> checkpoint_files;  ///< of a case whose weights are a checkpoint
};

/// Reads <dir>/MANIFEST.json. Throws kGolden, saying how to make goldens, when the file is missing,
/// unreadable or of another format version. Entries are sorted by name.
std::vector<ManifestEntry> read_manifest(const std::filesystem::path& dir);

/// The entry of a case. Throws kGolden listing the cases there are.
ManifestEntry find_entry(const std::filesystem::path& dir, std::string_view name);

/// Throws kGolden when the file, or one of its checkpoint's, is missing or its size or digest
/// differs from its entry.
void verify_entry(const std::filesystem::path& dir, const ManifestEntry& entry);

}  // namespace lockstep::golden
