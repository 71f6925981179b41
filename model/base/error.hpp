// The one error type. Every message says what was being done, what was expected and what came,
// where, and what to change.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace lockstep {

/// What went wrong, in the classes that exit codes distinguish.
enum class ErrorKind {
  kInput,     ///< a file, argument or scenario the user gave is wrong: exit code 2
  kConfig,    ///< a model, numerics or run configuration is wrong: exit code 2
  kShape,     ///< an operator was given tensors of the wrong shape or dtype: exit code 2
  kMesh,      ///< a topology that cannot be laid out: exit code 2
  kComm,      ///< a peer died, a deadline passed, a collective failed: exit code 3
  kGolden,    ///< stored reference missing, stale or damaged: exit code 4
  kInternal,  ///< our own fault: exit code 5
};

/// Documented process exit code of an error kind. 0 is success and 1 means that numerics differ.
int exit_code(ErrorKind kind) noexcept;

/// Name used in reports, such as "input" or "comm".
std::string_view kind_name(ErrorKind kind) noexcept;

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  [[nodiscard]] ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

/// Throws Error{kind} with a formatted message.
template <typename... Args>
[[noreturn]] void fail(ErrorKind kind, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(kind, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace lockstep

/// Throws Error{kind} unless cond holds. The message must print the values that were wrong.
#define LOCKSTEP_CHECK(cond, kind, ...)                                      \
  do {                                                                       \
    if (!(cond)) ::lockstep::fail(::lockstep::ErrorKind::kind, __VA_ARGS__); \
  } while (false)
