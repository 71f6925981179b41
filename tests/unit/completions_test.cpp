// Log-probabilities as completion servers give them.
#include "harness/runner/completions.hpp"

#include <signal.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "tests/unit/cli_program_support.hpp"

namespace lockstep::harness {
namespace {

Tensor logprobs(const std::string& text) {
  return parse_completions(text, "answer.json")->load("logprobs");
}

void expect(const Tensor& got, const std::vector<double>& want) {
  ASSERT_EQ(got.numel(), std::ssize(want));
  for (int64_t t = 0; t < got.numel(); ++t) {
    const double value = got[t].item<double>();
    if (std::isnan(want[static_cast<size_t>(t)])) {
      EXPECT_TRUE(std::isnan(value)) << t;
    } else {
      EXPECT_EQ(value, want[static_cast<size_t>(t)]) << t;
    }
  }
}

const double kNan = std::nan("");

TEST(Completions, EchoedPromptsAreShiftedByOneAndGeneratedTokensDropped) {
  expect(logprobs(R"({"choices": [{"index": 0, "logprobs": {"tokens": ["a", "b", "c", "d"],
                      "token_logprobs": [null, -1.5, -0.25, -3]}}],
                      "usage": {"prompt_tokens": 3, "completion_tokens": 1}})"),
         {-1.5, -0.25, kNan});
}

TEST(Completions, PromptLogprobsNameThePromptsOwnTokenFirst) {
  // Token 7 is the prompt's; 3 is likelier and has a smaller id.
  expect(logprobs(R"({"choices": [{"prompt_logprobs": [null,
                      {"7": {"logprob": -2.5, "rank": 2}, "3": {"logprob": -0.5, "rank": 1}},
                      {"1": {"logprob": "-Infinity", "rank": 9}}]}]})"),
         {-2.5, -INFINITY, kNan});
}

TEST(Completions, ChoicesComeByIndexAndAnswersInTheirOrder) {
  expect(logprobs(R"([{"choices": [
                       {"index": 1, "logprobs": {"token_logprobs": [null, -2]}},
                       {"index": 0, "logprobs": {"token_logprobs": [null, -1]}}],
                       "usage": {"prompt_tokens": 4}},
                      {"choices": [{"logprobs": {"token_logprobs": [null]}}]}])"),
         {-1, kNan, -2, kNan, kNan});
}

TEST(Completions, WhatIsNoAnswerIsNamed) {
  const auto refused = [](const std::string& text, const std::string& part) {
    try {
      (void)parse_completions(text, "answer.json");
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInput);
      EXPECT_THAT(error.what(), HasSubstr("answer.json"));
      EXPECT_THAT(error.what(), HasSubstr(part));
    }
  };
  refused("{\"choices\": [", "not JSON");
  refused("{}", "choices");
  refused(R"({"error": {"message": "no such model"}})", "no such model");
  refused(R"({"choices": [{"text": "x"}]})", "echo");
  refused(R"({"choices": [{"logprobs": {"token_logprobs": [null, "x"]}}]})", "token 1");
  refused(R"({"choices": [{"logprobs": {"token_logprobs": [null, -1]}},
                          {"logprobs": {"token_logprobs": [null, -1]}}],
              "usage": {"prompt_tokens": 2}})",
          "max_tokens");
}

TEST(Completions, ASafetensorsFileThatBeginsWithABraceIsNotTakenForJson) {
  EXPECT_FALSE(looks_like_json("{\0\0\0\0\0\0\0", 8));
  EXPECT_TRUE(looks_like_json(" {\"a\": 1}", 8));
  EXPECT_TRUE(looks_like_json("[{\"a\"", 5));
  EXPECT_FALSE(looks_like_json("", 0));
}

/// A server that answers with -(token + position) for each token of a prompt.
class Server : public Program {
 protected:
  void SetUp() override {
    Program::SetUp();
    write("server.py", R"(
import http.server, json, os
class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, code, value):
        text = json.dumps(value).encode()
        self.send_response(code)
        self.send_header('Content-Length', str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def do_GET(self):
        self.reply(200, {'data': [{'id': 'first'}, {'id': 'second'}]})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        if asked['model'] != 'first' or self.headers['Authorization'] != 'Bearer secret':
            return self.reply(404, {'error': {'message': 'no model ' + asked['model']}})
        ids = asked['prompt']
        values = [None] + [-(id + at + 1) / 64 for at, id in enumerate(ids[1:])]
        self.reply(200, {'choices': [{'index': 0, 'logprobs': {'token_logprobs': values + [-9]}}],
                         'usage': {'prompt_tokens': len(ids)}})
    def log_message(self, *args): pass
server = http.server.HTTPServer(('127.0.0.1', 0), Handler)
print(os.getpid(), server.server_port, flush=True)
server.serve_forever()
)");
    setenv("OPENAI_API_KEY", "secret", 1);
    pipe_ = popen(("exec python3 " + path("server.py")).c_str(), "r");
    ASSERT_NE(pipe_, nullptr);
    int port = 0;
    ASSERT_EQ(std::fscanf(pipe_, "%d %d", &pid_, &port), 2);
    url_ = "http://127.0.0.1:" + std::to_string(port) + "/v1/completions";
  }
  void TearDown() override {
    if (pid_ > 0) kill(pid_, SIGTERM);
    if (pipe_ != nullptr) pclose(pipe_);
    unsetenv("OPENAI_API_KEY");
    Program::TearDown();
  }
  FILE* pipe_ = nullptr;
  int pid_ = 0;
  std::string url_;
};

TEST_F(Server, IsAskedAboutEachDocument) {
  std::vector<double> want;
  const std::vector<std::vector<int64_t>> documents = {{1, 2, 3, 4, 5, 6, 7}, {8}, {9, 10, 11}};
  for (const auto& ids : documents) {
    for (size_t t = 1; t < ids.size(); ++t)
      want.push_back(-static_cast<double>(ids[t] + static_cast<int64_t>(t)) / 64);
    want.push_back(kNan);
  }
  model::write_safetensors_file(path("mine.safetensors"),
                                {{"logprobs", at::tensor(want, at::kDouble)}});
  const auto compare = [&](const std::vector<std::string>& more) {
    std::vector<std::string> words = {"compare", path("mine.safetensors"), url_};
    words.insert(words.end(), more.begin(), more.end());
    return lockstep(words);
  };
  const Outcome same = compare({"--docs", path("docs.json")});
  EXPECT_EQ(same.exit_code, 0) << same.errors << same.output;
  want[1] += 0.5;
  model::write_safetensors_file(path("mine.safetensors"),
                                {{"logprobs", at::tensor(want, at::kDouble)}});
  const Outcome other = compare({"--docs", path("docs.json")});
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_THAT(other.output, HasSubstr("logprobs[1]"));
  expect_refused(compare({}), 2, {"--docs"});
  expect_refused(compare({"--docs", path("docs.json"), "--served-model", "second"}),
                 2,
                 {"document 0", "no model second"});
  expect_refused(lockstep({"compare",
                           path("mine.safetensors"),
                           "http://127.0.0.1:1/v1/completions",
                           "--docs",
                           path("docs.json")}),
                 2,
                 {"127.0.0.1:1", "gave no answer"});
  expect_refused(lockstep({"compare",
                           path("mine.safetensors"),
                           "http://127.0.0.1:1/",
                           "--docs",
                           path("docs.json")}),
                 2,
                 {"/v1/completions"});
}

}  // namespace
}  // namespace lockstep::harness
