#include "golden/store/manifest.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "golden/store/sha256.hpp"
#include "model/base/did_you_mean.hpp"
#include "model/base/error.hpp"

namespace lockstep::golden {
namespace {

std::string remake(const std::filesystem::path& dir, std::string_view name) {
  return fmt::format(
      "take it from version control, or remake it with: python "
      "golden/make/make_goldens.py --case {} --out {}",
      name,
      dir.string());
}

void verify_file(const std::filesystem::path& dir,
                 const std::string& name,
                 const ManifestFile& listed) {
  const auto path = dir / listed.file;
  LOCKSTEP_CHECK(std::filesystem::exists(path),
                 kGolden,
                 "golden {}: {} is missing; {}",
                 name,
                 path.string(),
                 remake(dir, name));
  const auto size = static_cast<int64_t>(std::filesystem::file_size(path));
  LOCKSTEP_CHECK(size == listed.size_bytes,
                 kGolden,
                 "golden {}: {} has {} bytes, the manifest says {}; {}",
                 name,
                 path.string(),
                 size,
                 listed.size_bytes,
                 remake(dir, name));
  const std::string digest = sha256_file(path);
  LOCKSTEP_CHECK(digest == listed.sha256,
                 kGolden,
                 "golden {}: {} has sha256 {}, the manifest says {}; {}",
                 name,
                 path.string(),
                 digest,
                 listed.sha256,
                 remake(dir, name));
}

ManifestFile read_file(const nlohmann::json& file) {
  return {file.at("file").get<std::string>(),
          file.at("sha256").get<std::string>(),
          file.at("size").get<int64_t>()};
}

std::vector<ManifestFile> read_checkpoint_files(const nlohmann::json& entry) {
  std::vector<ManifestFile> files;
  if (!entry.contains("checkpoint_files")) return files;
  for (const auto& file : entry.at("checkpoint_files")) files.push_back(read_file(file));
  return files;
}

/// Of two equal keys the library would keep one without a word.
nlohmann::json parse(std::istream& in, const std::filesystem::path& path) {
  using Event = nlohmann::json::parse_event_t;
  std::vector<std::set<std::string>> keys;
  return nlohmann::json::parse(in, [&](int, Event event, nlohmann::json& value) {
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    LOCKSTEP_CHECK(event != Event::key || keys.back().insert(value.get<std::string>()).second,
                   kGolden,
                   "golden store {}: damaged: '{}' is there twice; remove one",
                   path.string(),
                   value.get<std::string>());
    return true;
  });
}

}  // namespace

std::vector<ManifestEntry> read_manifest(const std::filesystem::path& dir) {
  const auto path = dir / "MANIFEST.json";
  std::ifstream in(path);
  LOCKSTEP_CHECK(in.good(),
                 kGolden,
                 "golden store {}: MANIFEST.json is missing; {}",
                 dir.string(),
                 remake(dir, "all"));
  std::vector<ManifestEntry> entries;
  int64_t version = 0;
  try {
    const auto json = parse(in, path);
    version = json.at("format_version").get<int64_t>();
    for (const auto& [name, e] : json.at("cases").items()) {
      entries.push_back({name,
                         e.at("file").get<std::string>(),
                         e.at("sha256").get<std::string>(),
                         e.at("description").get<std::string>(),
                         e.at("generator_commit").get<std::string>(),
                         e.at("torch").get<std::string>(),
                         e.at("transformers").get<std::string>(),
                         e.at("size").get<int64_t>(),
                         e.at("seed").get<int64_t>(),
                         read_checkpoint_files(e)});
    }
  } catch (const nlohmann::json::exception& error) {
    fail(ErrorKind::kGolden,
         "golden store {}: damaged: {}; {}",
         path.string(),
         error.what(),
         remake(dir, "all"));
  }
  LOCKSTEP_CHECK(version == kGoldenFormatVersion,
                 kGolden,
                 "golden store {}: stale: format version {}, this program reads {}; {}",
                 path.string(),
                 version,
                 kGoldenFormatVersion,
                 remake(dir, "all"));
  std::sort(
      entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return entries;
}

ManifestEntry find_entry(const std::filesystem::path& dir, std::string_view name) {
  std::vector<std::string> names;
  for (auto& entry : read_manifest(dir)) {
    if (entry.name == name) return std::move(entry);
    names.push_back(entry.name);
  }
  fail(ErrorKind::kGolden,
       "golden store {}: no case '{}'{}; the manifest has {}. A new case goes into "
       "golden/make/cases.py; then: python golden/make/make_goldens.py --case {} --out {}",
       dir.string(),
       name,
       did_you_mean(name, names),
       names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", ")),
       name,
       dir.string());
}

void verify_entry(const std::filesystem::path& dir, const ManifestEntry& entry) {
  verify_file(dir, entry.name, {entry.file, entry.sha256, entry.size_bytes});
  for (const ManifestFile& file : entry.checkpoint_files) verify_file(dir, entry.name, file);
}

}  // namespace lockstep::golden
