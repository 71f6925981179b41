// What the reports of all commands begin with.
#pragma once

#include <filesystem>
#include <string_view>

#include "harness/cli/commands.hpp"
#include "harness/result/result.hpp"

namespace lockstep::harness {

/// A report with the time, the command and the environment filled in.
Report begin_report(const Context& context);

/// Makes the folder. Found out before anything is computed: a result that cannot be written is a
/// waste. Throws kInput naming path, reason and --out.
void check_writable(const std::filesystem::path& out, std::string_view command);

}  // namespace lockstep::harness
