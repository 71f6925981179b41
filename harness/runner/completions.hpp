// Prompt log-probabilities of a server that speaks the OpenAI completions protocol.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "harness/engine/documents.hpp"
#include "harness/runner/tensor_file.hpp"

namespace lockstep::harness {

/// The JSON answer to a completion request, or an array of answers, as one tensor `logprobs`
/// [tokens] float64 in Lockstep's order: entry t is that of token t + 1, NaN at the last token of
/// each prompt, prompts one after another in the order of answers and of their `index`. Read are
/// `choices[].prompt_logprobs` (vLLM: one object per token, the prompt's own token first) and
/// `choices[].logprobs.token_logprobs` (a request with "echo": true), whose generated tokens at the
/// end are dropped by `usage`. Throws kInput naming `source`, choice and token.
std::unique_ptr<TensorFile> parse_completions(const std::string& text, const std::string& source);

/// Starts as JSON does, which no other kind of tensor file can.
bool looks_like_json(const char* bytes, size_t size);

bool is_url(const std::string& path);

/// Asks the server at `url` (".../v1/completions") for the log-probabilities of these documents,
/// one request each (none for empty ones), and reads the answers. `model`: as the server names it;
/// empty: the first it lists. OPENAI_API_KEY is sent where it is set. Uses the `curl` program.
/// Throws kInput naming url, document and what the server said.
std::unique_ptr<TensorFile> ask_completions(const std::string& url,
                                            const Documents& documents,
                                            std::string model);

}  // namespace lockstep::harness
