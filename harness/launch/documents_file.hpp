// docs.json: {"documents": [[ids], [ids]]}.
#pragma once

#include <filesystem>

#include "harness/engine/documents.hpp"

namespace lockstep::harness {

/// Throws kInput naming file, document and position of what is wrong.
Documents read_documents(const std::filesystem::path& file, int64_t vocab_size = 0);

}  // namespace lockstep::harness
