#include "harness/launch/documents_file.hpp"

#include <fstream>
#include <nlohmann/json.hpp>

namespace lockstep::harness {

Documents read_documents(const std::filesystem::path& file) {
  constexpr auto kForm = "write {\"documents\": [[1, 2, 3], [4, 5]]}";
  std::ifstream stream(file);
  LOCKSTEP_CHECK(stream.good(), kInput, "documents: cannot read {}", file.string());
  nlohmann::json json;
  try {
    // Taking down a value recurses, so nesting is bounded while it is read.
    json = nlohmann::json::parse(stream,
                                 [&](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
                                   LOCKSTEP_CHECK(depth <= 64,
                                                  kInput,
                                                  "documents: {} nests lists more than 64 deep; {}",
                                                  file.string(),
                                                  kForm);
                                   return true;
                                 });
  } catch (const nlohmann::json::exception& error) {
    fail(
        ErrorKind::kInput, "documents: {} is not JSON: {}; {}", file.string(), error.what(), kForm);
  }
  LOCKSTEP_CHECK(json.is_object() && json.contains("documents") && json["documents"].is_array(),
                 kInput,
                 "documents: {} has no list \"documents\"; {}",
                 file.string(),
                 kForm);
  std::vector<std::vector<int64_t>> documents;
  for (const nlohmann::json& document : json["documents"]) {
    LOCKSTEP_CHECK(document.is_array(),
                   kInput,
                   "documents: {}: document {} is not a list of ids; {}",
                   file.string(),
                   documents.size(),
                   kForm);
    std::vector<int64_t>& ids = documents.emplace_back();
    for (const nlohmann::json& id : document) {
      LOCKSTEP_CHECK(id.is_number_integer() && id.get<int64_t>() >= 0,
                     kInput,
                     "documents: {}: document {}, position {}: {} is not a token id",
                     file.string(),
                     documents.size() - 1,
                     ids.size(),
                     id.dump());
      ids.push_back(id.get<int64_t>());
    }
  }
  return make_documents(documents);
}

}  // namespace lockstep::harness
