// How an exception becomes an exit code and one block of text.
#pragma once

#include <exception>
#include <string>
#include <string_view>

#include "model/base/error.hpp"

namespace lockstep::harness {

struct Failure {
  ErrorKind kind = ErrorKind::kInternal;
  std::string message;
};

/// Errors of ours as they are; of the tensor library, the allocator, the file system and the
/// standard library with kind and advice.
Failure explain(const std::exception& error);

/// The block for standard error: what was asked, what went wrong, the kind.
std::string error_block(const Failure& failure, std::string_view command);

/// {"error": {"kind", "exit_code", "message"}} for --json.
std::string error_json(const Failure& failure);

}  // namespace lockstep::harness
