#include "harness/cli/errors.hpp"

#include <filesystem>
#include <new>
#include <nlohmann/json.hpp>

#include "harness/result/json_text.hpp"
#include "model/base/torch.hpp"

namespace lockstep::harness {
namespace {

constexpr std::string_view kMemory =
    "out of memory; use fewer tokens, a smaller model, more ranks (--topology cp=N), "
    "--stream-layers, or a machine with more memory";

std::string first_line(std::string_view text) {
  return std::string(text.substr(0, text.find('\n')));
}

}  // namespace

Failure explain(const std::exception& error) {
  if (const auto* own = dynamic_cast<const Error*>(&error)) return {own->kind(), own->what()};
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) {
    return {ErrorKind::kInternal, std::string(kMemory)};
  }
  if (const auto* files = dynamic_cast<const std::filesystem::filesystem_error*>(&error)) {
    std::string message = fmt::format("{}: {}", files->path1().string(), files->code().message());
    if (!files->path2().empty()) message += fmt::format(" (with {})", files->path2().string());
    if (files->code() == std::errc::no_space_on_device) {
      message += "; free space on that disk or write elsewhere";
    } else if (files->code() == std::errc::permission_denied) {
      message += "; choose a folder you may write to, or change its permissions";
    }
    return {ErrorKind::kInput, message};
  }
  if (const auto* torch = dynamic_cast<const c10::Error*>(&error)) {
    const std::string text = torch->what_without_backtrace();
    if (text.find("can't allocate memory") != std::string::npos ||
        text.find("not enough memory") != std::string::npos) {
      return {ErrorKind::kInternal, fmt::format("{} ({})", kMemory, first_line(text))};
    }
    return {ErrorKind::kInternal, fmt::format("tensor library: {}", first_line(text))};
  }
  return {ErrorKind::kInternal, first_line(error.what())};
}

std::string error_block(const Failure& failure, std::string_view command) {
  std::string text = fmt::format("lockstep{}{}: {} error\n  {}\n",
                                 command.empty() ? "" : " ",
                                 command,
                                 kind_name(failure.kind),
                                 failure.message);
  if (failure.kind == ErrorKind::kInternal) {
    text += "  This is a fault of Lockstep or of this machine, not of the input.\n";
  }
  return text;
}

std::string error_json(const Failure& failure) {
  return json_text(nlohmann::ordered_json{{"error",
                                           {{"kind", kind_name(failure.kind)},
                                            {"exit_code", exit_code(failure.kind)},
                                            {"message", failure.message}}}}) +
         "\n";
}

}  // namespace lockstep::harness
