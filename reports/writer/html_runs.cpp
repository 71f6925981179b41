#include <cmath>

#include "reports/writer/html_parts.hpp"
#include "reports/writer/text.hpp"

namespace lockstep::reports {
namespace {

using harness::Environment;
using harness::Report;
using harness::RunRecord;
using harness::ScenarioResult;
using harness::Status;

std::string switches_of(const RunRecord& r) {
  std::string out;
  for (const harness::NumericsDifference& d : r.numerics) {
    out += fmt::format(R"(<br><span class="mono">{} {} = {}</span>)",
                       escape(d.id),
                       escape(d.name),
                       escape(d.value));
    if (!d.baseline.empty()) {
      out += fmt::format(R"( <span class="soft">instead of {}</span>)", escape(d.baseline));
    }
  }
  return out;
}

std::string weights_of(const RunRecord& r) {
  if (r.provenance.empty()) return escape(r.checkpoint);
  std::string out = fmt::format(R"(<details><summary>{}</summary><span class="soft">)",
                                escape(r.checkpoint.empty() ? "origin" : r.checkpoint));
  for (const harness::Attribute& a : r.provenance) {
    out += fmt::format(R"({} <span class="mono">{}</span><br>)", escape(a.name), escape(a.value));
  }
  return out + "</span></details>";
}

std::string measures_of(const RunRecord& r) {
  std::string out;
  for (const harness::Measure& m : r.measures) {
    // One measure a line, however narrow the column: U+00A0 does not break.
    out += fmt::format("{}{}\u00a0{}{}",
                       out.empty() ? "" : "<br>",
                       escape(m.name),
                       harness::format_number(m.value, 3),
                       m.unit.empty() ? "" : fmt::format("\u00a0{}", escape(m.unit)));
  }
  return out;
}

}  // namespace

std::string runs_table(const Report& report) {
  std::string rows;
  int64_t num_rows = 0, num_wrong = 0;
  for (const ScenarioResult& s : report.scenarios) {
    // A wrong run gets no speed: it did not do the work that the number would be about.
    const bool is_right = s.status == Status::kPass || s.status == Status::kRecorded;
    for (const RunRecord& r : s.runs) {
      ++num_rows;
      num_wrong += r.status == Status::kFail || r.status == Status::kError ? 1 : 0;
      const bool has_speed = is_right && r.status == Status::kPass && r.seconds > 0 && r.tokens > 0;
      std::string status = mark(r.status);
      if (!r.reason.empty())
        status += fmt::format(R"(<span class="reason">{}</span>)", escape(r.reason));
      rows += fmt::format(
          R"(<tr class="{}"><th scope="row"><b>{}</b><br><span class="soft">{}</span></th><td>{}</td>)"
          R"(<td>{}{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td class="n">{}</td><td class="n">{}</td>)"
          R"(<td class="n">{}</td><td class="n">{}</td><td>{}</td></tr>)"
          "\n",
          name(r.status),
          escape(r.name),
          escape(s.name),
          escape(r.engine),
          escape(r.policy),
          switches_of(r),
          escape(r.topology),
          escape(r.device),
          weights_of(r),
          measures_of(r),
          r.tokens > 0 ? format_count(r.tokens) : "",
          r.seconds > 0 ? format_seconds(r.seconds) : "",
          has_speed ? format_count(std::llround(static_cast<double>(r.tokens) / r.seconds)) : "",
          r.peak_bytes > 0 ? format_bytes(r.peak_bytes) : "",
          status);
    }
  }
  if (rows.empty()) return "";
  std::string table =
      R"(<div class="card scroll"><table><caption class="visually-hidden">Runs</caption><thead><tr>)"
      R"(<th scope="col">Run</th><th scope="col">Engine</th><th scope="col">Policy and switches</th>)"
      R"(<th scope="col">Topology</th><th scope="col">Device</th><th scope="col">Weights</th>)"
      R"(<th scope="col">Measured</th><th scope="col" class="n">Tokens</th><th scope="col" class="n">Time</th>)"
      R"(<th scope="col" class="n">Tokens / s</th><th scope="col" class="n">Peak memory</th>)"
      R"(<th scope="col">Status</th></tr></thead><tbody>)" +
      rows + "</tbody></table></div>\n";
  // A sweep has dozens; they are looked up, not read.
  constexpr int64_t kOpenRows = 12;
  if (num_rows <= kOpenRows) return table;
  return fmt::format(
      R"(<details class="fold"{}><summary>{} runs{}</summary>{}</details>)"
      "\n",
      num_wrong > 0 ? " open" : "",
      format_count(num_rows),
      num_wrong > 0 ? fmt::format(", {} of them wrong", format_count(num_wrong)) : "",
      table);
}

std::string environment_list(const Report& report) {
  const Environment& e = report.environment;
  std::string out = R"(<dl class="card env">)", absent;
  const auto add = [&](std::string_view label, const std::string& value) {
    if (!value.empty()) {
      out += fmt::format("<div><dt>{}</dt><dd>{}</dd></div>", escape(label), escape(value));
    }
  };
  const auto part = [&](std::string_view label, const std::string& value) {
    add(label, value);
    if (value.empty()) absent += fmt::format("{}{}", absent.empty() ? "" : ", ", label);
  };
  add("Lockstep", e.lockstep_version);
  part("Commit", e.git_commit);
  add("Compiler", e.compiler);
  add("Instructions", e.march);
  add("Build", e.build_type);
  add("System", e.os);
  add("CPU", e.cpu_model);
  add("Cores", e.cores > 0 ? fmt::format("{}, {} threads per rank", e.cores, e.threads) : "");
  for (size_t i = 0; i < e.devices.size(); ++i) {
    if (i > 0 && e.devices[i] == e.devices[i - 1]) continue;
    size_t same = 1;
    while (i + same < e.devices.size() && e.devices[i + same] == e.devices[i]) ++same;
    add("Device", same == 1 ? e.devices[i] : fmt::format("{} x {}", same, e.devices[i]));
  }
  part("torch", e.torch);
  part("BLAS", e.blas);
  part("MPI", e.mpi);
  part("HDF5", e.hdf5);
  part("CUDA", e.cuda);
  part("NCCL", e.nccl);
  for (const harness::Attribute& a : e.extra) add(a.name, a.value);
  add("Seed", fmt::format("{}", report.seed));
  add("Started", report.started);
  add("Took", format_seconds(report.seconds));
  add("Not there", absent);
  return out + "</dl>\n";
}

}  // namespace lockstep::reports
