#include <cstdio>
#include <filesystem>

#include "harness/cli/commands.hpp"
#include "harness/cli/errors.hpp"
#include "model/checkpoint/convert.hpp"

namespace lockstep::harness {
namespace {

namespace fs = std::filesystem;

void check_folder(const fs::path& folder, std::string_view option) {
  std::error_code error;
  LOCKSTEP_CHECK(fs::is_directory(folder, error),
                 kInput,
                 "{} {}: no such folder; give a folder with config.json and .safetensors files",
                 option,
                 folder.string());
}

std::string json_text(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + '"';
}

void tell(const model::ConvertReport& report, const fs::path& to, const Context& context) {
  if (context.json) {
    std::string files;
    for (const std::string& file : report.files)
      files += (files.empty() ? "" : ", ") + json_text(file);
    print(
        fmt::format("{{\n  \"to\": {},\n  \"files\": [{}],\n  \"tensors\": {},\n  \"parameters\": "
                    "{},\n  \"bytes\": {},\n  \"dropped\": {},\n  \"dequantized\": {}\n}}\n",
                    json_text(to.string()),
                    files,
                    report.num_tensors,
                    report.num_parameters,
                    report.bytes,
                    report.dropped.size(),
                    report.num_quantized));
  } else if (!context.quiet) {
    print(report.text());
  }
}

}  // namespace

int run_command_inspect(const InspectOptions& options, const Context& context) {
  check_folder(options.folder, "inspect");
  const model::Inspection found =
      model::inspect(options.folder.string(), parse_defaults(options.defaults));
  print(context.json ? found.json + "\n" : found.text);
  if (found.fits) return 0;
  // What was found is a result; that it does not fit is an error all the same.
  std::fflush(stdout);
  const Failure failure{ErrorKind::kInput,
                        fmt::format("inspect {}: config and tensors do not belong together: {}",
                                    options.folder.string(),
                                    found.problems.substr(found.problems.find_first_not_of('\n')))};
  std::fputs(error_block(failure, "inspect").c_str(), stderr);
  return exit_code(failure.kind);
}

int run_command_convert(const ConvertOptions& options, const Context& context) {
  check_folder(options.from, "--from");
  tell(model::convert(options.from.string(),
                      options.to.string(),
                      options.format,
                      parse_defaults(options.defaults)),
       options.to,
       context);
  return 0;
}

int run_command_export(const ConvertOptions& options, const Context& context) {
  check_folder(options.from, "--from");
  const auto source =
      model::open_checkpoint(options.from.string(), parse_defaults(options.defaults));
  model::ExportOptions how;
  how.copy_from = options.from.string();
  tell(model::export_checkpoint(*source, options.to.string(), model::Naming::kReleased, how),
       options.to,
       context);
  return 0;
}

}  // namespace lockstep::harness
