#include "harness/runner/completions.hpp"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "harness/launch/mpi_start.hpp"

namespace lockstep::harness {
namespace {

using Json = nlohmann::ordered_json;  // keeps the order of keys, which names the prompt's own token

class Logprobs final : public TensorFile {
 public:
  explicit Logprobs(Tensor values) : values_(std::move(values)) {}
  std::vector<std::string> names() const override { return {"logprobs"}; }
  Tensor load(const std::string&) const override { return values_; }

 private:
  Tensor values_;
};

/// Log-probability of each token of a prompt given those before it; NaN for the first.
using Row = std::vector<double>;

double number_of(const Json& value, const std::string& where, size_t token) {
  if (value.is_number()) return value.get<double>();
  // JSON has no infinity; servers write words or null.
  if (value.is_string() && value.get<std::string>() == "-Infinity")
    return -std::numeric_limits<double>::infinity();
  fail(ErrorKind::kInput,
       "{}: token {}: expected a log-probability, got {}",
       where,
       token,
       value.dump().substr(0, 60));
}

Row row_of_objects(const Json& list, const std::string& where) {
  Row row;
  for (size_t t = 0; t < list.size(); ++t) {
    const Json& entry = list[t];
    if (t == 0 && entry.is_null()) {
      row.push_back(std::nan(""));
      continue;
    }
    LOCKSTEP_CHECK(entry.is_object() && !entry.empty(),
                   kInput,
                   "{}: token {}: expected an object with the log-probability of the token, got {}",
                   where,
                   t,
                   entry.dump().substr(0, 60));
    const Json& own = entry.front();
    row.push_back(
        number_of(own.is_object() && own.contains("logprob") ? own["logprob"] : own, where, t));
  }
  return row;
}

Row row_of_numbers(const Json& list, const std::string& where) {
  Row row;
  for (size_t t = 0; t < list.size(); ++t) {
    const bool first = t == 0 && list[t].is_null();
    row.push_back(first ? std::nan("") : number_of(list[t], where, t));
  }
  return row;
}

/// Prompts of one answer.
std::vector<Row> rows_of_answer(const Json& answer, const std::string& source) {
  if (answer.is_object() && answer.contains("error")) {
    fail(ErrorKind::kInput, "{}: the server answered {}", source, answer["error"].dump());
  }
  LOCKSTEP_CHECK(answer.is_object() && answer.contains("choices") && answer["choices"].is_array() &&
                     !answer["choices"].empty(),
                 kInput,
                 "{}: no answer of a completion server: it has no list `choices`; give what "
                 "/v1/completions returned",
                 source);
  std::vector<std::pair<int64_t, Row>> choices;
  bool echoed = false;
  for (const Json& choice : answer["choices"]) {
    const int64_t index = choice.is_object() ? choice.value("index", std::ssize(choices)) : 0;
    const std::string where = fmt::format("{}: choice {}", source, index);
    const Json logprobs = choice.is_object() ? choice.value("logprobs", Json()) : Json();
    if (choice.is_object() && choice.value("prompt_logprobs", Json()).is_array()) {
      choices.emplace_back(index, row_of_objects(choice["prompt_logprobs"], where));
    } else {
      LOCKSTEP_CHECK(
          logprobs.is_object() && logprobs.value("token_logprobs", Json()).is_array(),
          kInput,
          "{}: has neither prompt_logprobs nor logprobs.token_logprobs; ask for \"echo\": "
          "true, \"logprobs\": 0, or for \"prompt_logprobs\": 0",
          where);
      choices.emplace_back(index, row_of_numbers(logprobs["token_logprobs"], where));
      echoed = true;
    }
  }
  std::stable_sort(choices.begin(), choices.end(), [](const auto& a, const auto& b) {
    return a.first < b.first;
  });
  const Json usage = answer.value("usage", Json::object());
  if (echoed && usage.is_object() && usage.contains("prompt_tokens")) {
    int64_t tokens = 0;
    for (const auto& [index, row] : choices) tokens += std::ssize(row);
    const auto generated = tokens - usage["prompt_tokens"].get<int64_t>();
    const auto count = std::ssize(choices);
    LOCKSTEP_CHECK(generated >= 0 && (generated == 0 || count == 1),
                   kInput,
                   "{}: {} log-probabilities for {} prompt tokens in {} choices: which of them are "
                   "generated is not told; ask for \"max_tokens\": 0, or one prompt per request",
                   source,
                   tokens,
                   usage["prompt_tokens"].get<int64_t>(),
                   count);
    if (generated > 0) choices.front().second.resize(static_cast<size_t>(tokens - generated));
  }
  std::vector<Row> rows;
  for (auto& [index, row] : choices) rows.push_back(std::move(row));
  return rows;
}

std::unique_ptr<TensorFile> file_of(const std::vector<Row>& rows) {
  Row shifted;
  for (const Row& row : rows) {
    for (size_t t = 1; t < row.size(); ++t) shifted.push_back(row[t]);
    if (!row.empty()) shifted.push_back(std::nan(""));
  }
  return std::make_unique<Logprobs>(at::tensor(shifted, at::kDouble));
}

Json parsed(const std::string& text, const std::string& source) {
  try {
    return Json::parse(text);
  } catch (const Json::exception& error) {
    fail(ErrorKind::kInput,
         "{}: not JSON: {}; it begins with {}",
         source,
         error.what(),
         text.substr(0, 60));
  }
}

/// A file of this process alone that goes away with it.
class Scratch {
 public:
  explicit Scratch(const std::string& text) {
    path_ = (std::filesystem::temp_directory_path() / "lockstep-XXXXXX").string();
    const int fd = mkstemp(path_.data());  // mode 600: a key may be in it
    LOCKSTEP_CHECK(fd >= 0,
                   kInput,
                   "cannot make {}: {}; set TMPDIR to a folder that can be written",
                   path_,
                   std::strerror(errno));
    const bool good = write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
    close(fd);
    LOCKSTEP_CHECK(good, kInput, "cannot write {}; is the disk full?", path_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { unlink(path_.c_str()); }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// `body` empty: GET. Returns the whole answer.
Json ask(const std::string& url, const std::string& body, const std::string& what) {
  std::string headers = "Content-Type: application/json\n";
  if (const char* key = std::getenv("OPENAI_API_KEY"))
    headers += fmt::format("Authorization: Bearer {}\n", key);
  const Scratch header_file(headers), body_file(body);
  std::vector<std::string> command = {
      "curl", "-sS", "--max-time", "600", "-H", "@" + header_file.path()};
  if (!body.empty()) command.insert(command.end(), {"--data-binary", "@" + body_file.path()});
  command.push_back(url);
  std::string text;
  Outcome outcome;
  try {
    outcome = run_command(command, {}, [&](std::string_view line) {
      text += line;
      text += '\n';
    });
  } catch (const Error& error) {
    fail(ErrorKind::kInput, "{}: {}; install curl", what, error.what());
  }
  LOCKSTEP_CHECK(outcome.exit_code == 0,
                 kInput,
                 "{}: {} gave no answer: {}",
                 what,
                 url,
                 outcome.errors.substr(0, outcome.errors.find('\n')));
  return parsed(text, fmt::format("{}: the answer of {}", what, url));
}

}  // namespace

bool looks_like_json(const char* bytes, size_t size) {
  size_t at = 0;
  while (at < size && std::strchr(" \t\r\n", bytes[at]) != nullptr && bytes[at] != '\0') ++at;
  // A safetensors file may begin with '{' as the low byte of a length, whose high bytes are 0.
  return at < size && (bytes[at] == '{' || bytes[at] == '[') &&
         std::find(bytes, bytes + size, '\0') == bytes + size;
}

std::unique_ptr<TensorFile> parse_completions(const std::string& text, const std::string& source) {
  const Json json = parsed(text, source);
  if (!json.is_array()) return file_of(rows_of_answer(json, source));
  std::vector<Row> rows;
  for (size_t i = 0; i < json.size(); ++i) {
    for (Row& row : rows_of_answer(json[i], fmt::format("{}: answer {}", source, i)))
      rows.push_back(std::move(row));
  }
  return file_of(rows);
}

bool is_url(const std::string& path) {
  return path.starts_with("http://") || path.starts_with("https://");
}

std::unique_ptr<TensorFile> ask_completions(const std::string& url,
                                            const Documents& documents,
                                            std::string model) {
  constexpr std::string_view kEnd = "/completions";
  LOCKSTEP_CHECK(url.ends_with(kEnd),
                 kInput,
                 "{}: give the address of the completions themselves, such as "
                 "http://localhost:8000/v1/completions",
                 url);
  if (model.empty()) {
    const Json list = ask(url.substr(0, url.size() - kEnd.size()) + "/models", "", "models");
    const bool good = list.is_object() && list.value("data", Json()).is_array() &&
                      !list["data"].empty() && list["data"][0].contains("id");
    LOCKSTEP_CHECK(
        good, kInput, "{}: the server lists no models; name one with --served-model", url);
    model = list["data"][0]["id"].get<std::string>();
  }
  const Tensor ids = documents.ids.contiguous();
  const int64_t* id = ids.const_data_ptr<int64_t>();
  const std::vector<int64_t>& cu = documents.packing.cu_seqlens();
  std::vector<Row> rows;
  for (size_t d = 0; d + 1 < cu.size(); ++d) {
    if (cu[d] == cu[d + 1]) continue;
    const std::vector<int64_t> prompt(id + cu[d], id + cu[d + 1]);
    const std::string what = fmt::format("document {}", d);
    // Both ways to ask: servers take the one they know. One token is generated where none is
    // refused.
    const Json request = {{"model", model},
                          {"prompt", prompt},
                          {"max_tokens", 1},
                          {"temperature", 0},
                          {"echo", true},
                          {"logprobs", 0},
                          {"prompt_logprobs", 0}};
    std::vector<Row> answered = rows_of_answer(ask(url, request.dump(), what), what + " at " + url);
    LOCKSTEP_CHECK(answered.size() == 1 && answered[0].size() >= prompt.size(),
                   kInput,
                   "{}: {} log-probabilities for a prompt of {} tokens; the server does not return "
                   "those of the prompt",
                   what,
                   answered[0].size(),
                   prompt.size());
    answered[0].resize(prompt.size());
    rows.push_back(std::move(answered[0]));
  }
  return file_of(rows);
}

}  // namespace lockstep::harness
