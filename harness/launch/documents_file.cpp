#include "harness/launch/documents_file.hpp"

#include <nlohmann/json.hpp>

#include "model/config/json_text.hpp"

namespace lockstep::harness {

Documents read_documents(const std::filesystem::path& file, int64_t vocab_size) {
  constexpr auto kForm = "write {\"documents\": [[1, 2, 3], [4, 5]]}";
  std::error_code error;
  LOCKSTEP_CHECK(!std::filesystem::is_directory(file, error),
                 kInput,
                 "documents: {} is a folder; name a file, {}",
                 file.string(),
                 kForm);
  nlohmann::json json;
  try {
    const std::string text = model::read_text_file(file.string());
    model::check_json(text, file.string());
    json = nlohmann::json::parse(text);
  } catch (const Error& wrong) {
    fail(ErrorKind::kInput, "documents: {}; {}", wrong.what(), kForm);
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
                     id.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
      LOCKSTEP_CHECK(vocab_size == 0 || id.get<int64_t>() < vocab_size,
                     kInput,
                     "documents: {}: document {}, position {}: id {} is outside the vocabulary of "
                     "{}; check the tokenizer or vocab_size",
                     file.string(),
                     documents.size() - 1,
                     ids.size(),
                     id.get<int64_t>(),
                     vocab_size);
      ids.push_back(id.get<int64_t>());
    }
  }
  return make_documents(documents);
}

}  // namespace lockstep::harness
