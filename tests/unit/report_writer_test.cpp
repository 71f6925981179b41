#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <limits>
#include <regex>
#include <set>
#include <sstream>

#include "reports/writer/chart.hpp"
#include "reports/writer/text.hpp"
#include "reports/writer/writer.hpp"
#include "tests/unit/report_examples.hpp"
#include "tests/unit/report_schema_check.hpp"

namespace lockstep::reports {
namespace {

namespace fs = std::filesystem;
using harness::Report;
using harness::Status;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "lockstep-report-XXXXXX").string();
    path = mkdtemp(name.data());
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  Folder(Folder&&) = delete;
  Folder& operator=(Folder&&) = delete;
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  fs::path path;
};

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

template <typename Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    return error.what();
  }
  return "";
}

/// What is wrong with the nesting and escaping of an XML or HTML text, "" if nothing. `voids` have
/// no end tag. Text of style and script is skipped.
std::string markup_error(const std::string& text, const std::set<std::string>& voids) {
  std::vector<std::string> open;
  for (size_t at = 0; at < text.size();) {
    if (text[at] == '>') return fmt::format("stray > at {}", at);
    if (text[at] == '&') {
      static const std::regex kEntity("&(amp|lt|gt|quot|#39);");
      if (!std::regex_search(text.substr(at, 8), kEntity, std::regex_constants::match_continuous)) {
        return fmt::format("stray & at {}", at);
      }
    }
    if (text[at] != '<') {
      ++at;
      continue;
    }
    size_t end = at + 1;
    for (char quote = 0; end < text.size() && (quote != 0 || text[end] != '>'); ++end) {
      if (quote != 0 && text[end] == '<') return fmt::format("< in an attribute at {}", end);
      if (text[end] == '"') quote = quote == 0 ? '"' : 0;
    }
    if (end >= text.size()) return "a tag does not end";
    const std::string tag = text.substr(at + 1, end - at - 1);
    const std::string name = tag.substr(0, tag.find_first_of(" /", 1));
    at = end + 1;
    if (tag[0] == '?' || tag[0] == '!' || tag.back() == '/' || voids.count(name) > 0) continue;
    if (tag[0] == '/') {
      if (open.empty() || open.back() != tag.substr(1)) {
        return fmt::format("</{}> ends {}", tag.substr(1), open.empty() ? "nothing" : open.back());
      }
      open.pop_back();
      continue;
    }
    open.push_back(name);
    if (name == "style" || name == "script") {
      at = text.find("</" + name, at);
      if (at == std::string::npos) return name + " does not end";
    }
  }
  return open.empty() ? "" : fmt::format("<{}> is left open", open.back());
}

bool is_whole(const Report& report) { return report.scenarios.size() < 100; }

TEST(ReportWriter, EveryExampleWritesAllFourFilesAndNothingElse) {
  const char* keep = std::getenv("LOCKSTEP_REPORT_EXAMPLES");
  const Folder temporary;
  const fs::path folder = keep != nullptr ? fs::path(keep) : temporary.path;
  for (const auto& [name, report] : harness::all_examples()) {
    write(report, folder / name);
    EXPECT_THAT(names_in(folder / name),
                ::testing::ElementsAre("junit.xml", "report.html", "report.json", "summary.md"));
    EXPECT_TRUE(read(folder / name / "report.json") == harness::to_json(report)) << name;
  }
}

TEST(ReportWriter, RebuildFromJsonGivesTheSameFiles) {
  const Folder folder;
  write(harness::example_mixed(), folder.path);
  const std::string html = read(folder.path / "report.html");
  for (const char* name : {"report.html", "junit.xml", "summary.md"})
    fs::remove(folder.path / name);
  const Report report = rebuild(folder.path);
  EXPECT_EQ(report.exit_code, 4);
  EXPECT_TRUE(read(folder.path / "report.html") == html);
  EXPECT_EQ(names_in(folder.path).size(), 4);
}

TEST(ReportWriter, RebuildOfAMissingOrDamagedReportSaysWhich) {
  const Folder folder;
  EXPECT_THAT(error_of([&] { rebuild(folder.path); }), HasSubstr("there is no such file"));
  std::ofstream(folder.path / "report.json") << "{\"version\": 1, ";
  EXPECT_THAT(error_of([&] { rebuild(folder.path); }), HasSubstr("not JSON"));
  EXPECT_EQ(names_in(folder.path).size(), 1);
}

TEST(ReportWriter, FolderThatCannotBeMadeIsAnInputErrorNamingIt) {
  const Folder folder;
  std::ofstream(folder.path / "file") << "x";
  const std::string message =
      error_of([&] { write(harness::example_pass(), folder.path / "file" / "out"); });
  EXPECT_THAT(message, HasSubstr((folder.path / "file" / "out").string()));
  EXPECT_THAT(message, HasSubstr("--out"));
}

TEST(ReportWriter, FolderThatIsNotWritableIsAnInputErrorAndGetsNoFile) {
  const Folder folder;
  fs::path target = folder.path;
  if (geteuid() == 0) {
    target = "/proc";  // not writable even for root, whom permissions do not stop
    if (!fs::exists(target)) GTEST_SKIP() << "running as root without /proc";
  } else {
    fs::permissions(target, fs::perms::owner_read | fs::perms::owner_exec);
  }
  const std::string message = error_of([&] { write(harness::example_pass(), target); });
  EXPECT_THAT(message, HasSubstr("cannot write"));
  EXPECT_FALSE(fs::exists(target / "report.json"));
  if (geteuid() != 0) fs::permissions(target, fs::perms::owner_all);
}

TEST(ReportWriter, FailureLeavesTheReportThatWasThereAndNoTemporaryFile) {
  const Folder folder;
  write(harness::example_pass(), folder.path);
  fs::remove(folder.path / "junit.xml");
  fs::create_directory(folder.path / "junit.xml");  // the third of the four cannot be written
  const std::string before = read(folder.path / "report.json");
  const std::string message = error_of([&] { write(harness::example_fail(), folder.path); });
  EXPECT_THAT(message, HasSubstr("junit.xml"));
  EXPECT_EQ(read(folder.path / "report.json"), before);
  EXPECT_EQ(names_in(folder.path).size(), 4);
}

TEST(ReportJson, EveryExampleConformsToTheSchema) {
  const std::string schema =
      read(fs::path(LOCKSTEP_SOURCE_DIR) / "reports/schema/report.schema.json");
  ASSERT_FALSE(schema.empty());
  for (const auto& [name, report] : harness::all_examples()) {
    if (!is_whole(report)) continue;
    EXPECT_THAT(schema_violations(to_json(report), schema), IsEmpty()) << name;
  }
}

TEST(ReportJson, SchemaRefusesWhatTheReportNeverHolds) {
  const std::string schema =
      read(fs::path(LOCKSTEP_SOURCE_DIR) / "reports/schema/report.schema.json");
  const auto violations_after = [&](const std::string& from, const std::string& to) {
    std::string text = to_json(harness::example_fail());
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return schema_violations(text.replace(at, from.size(), to), schema);
  };
  EXPECT_THAT(violations_after("\"version\": 1", "\"version\": 2"), Not(IsEmpty()));
  EXPECT_THAT(violations_after("\"status\": \"pass\"", "\"status\": \"ok\""), Not(IsEmpty()));
  EXPECT_THAT(violations_after("\"exit_code\": 1", "\"exit_code\": 9"), Not(IsEmpty()));
  EXPECT_THAT(violations_after("\"seed\": 3", "\"seed\": 3, \"host\": \"x\""), Not(IsEmpty()));
  EXPECT_THAT(violations_after("\"march\": \"x86-64-v3\",", ""), Not(IsEmpty()));
  EXPECT_THAT(violations_after("\"points\": [[0.0,", "\"points\": [[0.0,1.0,"), Not(IsEmpty()));
  EXPECT_THAT(violations_after("\"value\": 0.0034", "\"value\": null"), Not(IsEmpty()));
}

TEST(ReportHtml, PageRefersToNothingOutsideItself) {
  for (const auto& [name, report] : harness::all_examples()) {
    const std::string html = render_html(report);
    for (const char* forbidden : {"http:",
                                  "https:",
                                  "//",
                                  "@import",
                                  "url(",
                                  "<link rel=\"style",
                                  " src=",
                                  "<iframe",
                                  "<img"}) {
      // The only // are comments of the script.
      const std::string page = std::string_view(forbidden) == "//"
                                   ? std::regex_replace(html, std::regex("\n// [^\n]*"), "")
                                   : html;
      EXPECT_EQ(page.find(forbidden), std::string::npos) << name << ": " << forbidden;
    }
  }
}

TEST(ReportHtml, EveryExampleIsWellFormed) {
  const std::set<std::string> voids{"meta", "link", "br", "input"};
  for (const auto& [name, report] : harness::all_examples()) {
    if (!is_whole(report)) continue;
    EXPECT_EQ(markup_error(render_html(report), voids), "") << name;
  }
}

TEST(ReportHtml, IdsAreUnique) {
  const std::string html = render_html(harness::example_mixed());
  static const std::regex kId(" id=\"([^\"]+)\"");
  std::set<std::string> seen;
  for (auto it = std::sregex_iterator(html.begin(), html.end(), kId); it != std::sregex_iterator();
       ++it) {
    EXPECT_TRUE(seen.insert((*it)[1]).second) << (*it)[1];
  }
  EXPECT_GT(seen.size(), 10U);
}

TEST(ReportHtml, VerdictComesBeforeEverythingAndFailuresBeforePasses) {
  const std::string html = render_html(harness::example_fail());
  const size_t verdict = html.find("<h1>Numerics differ</h1>");
  const size_t differs = html.find("What differs and where");
  const size_t failing = html.find("<b>cp_equivalence</b>");
  const size_t passing = html.find("<b>trainer_vs_inference</b>");
  ASSERT_NE(verdict, std::string::npos);
  EXPECT_LT(verdict, differs);
  EXPECT_LT(differs, failing);
  EXPECT_LT(failing, passing);
  EXPECT_THAT(html, HasSubstr("layers.2.kda.state[0,3,17,5]"));
  EXPECT_THAT(html, HasSubstr("lockstep run scenarios --tag nightly"));
}

TEST(ReportHtml, NamesAreEscapedWhereverTheyAppear) {
  const std::string html = render_html(harness::example_mixed());
  EXPECT_EQ(html.find("<script>alert"), std::string::npos);
  EXPECT_EQ(html.find("vs <b>"), std::string::npos);
  EXPECT_EQ(html.find('\x01'), std::string::npos);
  EXPECT_EQ(html.find('\xff'), std::string::npos);
}

TEST(ReportHtml, TheFirstAndTheWorstPlaceAreLabelled) {
  const std::string html = render_html(harness::example_fail());
  EXPECT_THAT(html, HasSubstr(">first divergence: layers.2.kda.A_log (3 of 5 in backward order)"));
  EXPECT_THAT(html, HasSubstr(">worst: layers.2.kda.dt_bias: rel_l2 3.1e-6, limit 0<"));
  Report within = harness::example_pass();
  within.scenarios.front().comparisons.front().first_divergence = "logits[0,1]: got 1 want 2";
  EXPECT_THAT(render_html(within), HasSubstr(">first difference: logits[0,1]"));
}

TEST(ReportHtml, NamesInTheVerdictAreNotBrokenAtHyphens) {
  Report report = harness::example_pass();
  report.verdict = "The closest is (hf-bf16) of a-name-that-is-too-long-for-a-narrow-screen.";
  const std::string html = render_html(report);
  EXPECT_THAT(html, HasSubstr("<span class=\"whole\">(hf-bf16)</span> of a-name-that"));
}

TEST(ReportHtml, RunsOfAWrongScenarioGetNoSpeed) {
  const Report right = harness::example_pass();
  Report wrong = right;
  for (harness::ScenarioResult& s : wrong.scenarios) s.status = Status::kFail;
  const std::string speed = R"(<td class="n">202</td>)";
  EXPECT_THAT(render_html(right), HasSubstr(speed));
  EXPECT_THAT(render_html(wrong), Not(HasSubstr(speed)));
}

TEST(ReportHtml, ManyRunsAreFoldedAndWrongOnesAreNot) {
  Report report = harness::example_pass();
  std::vector<harness::RunRecord>& runs = report.scenarios.front().runs;
  const harness::RunRecord one = runs.front();
  for (harness::ScenarioResult& s : report.scenarios) s.runs.clear();
  runs.assign(12, one);
  EXPECT_THAT(render_html(report), Not(HasSubstr("class=\"fold\"")));
  runs.push_back(one);
  EXPECT_THAT(render_html(report), HasSubstr("<details class=\"fold\"><summary>13 runs<"));
  runs.back().status = Status::kFail;
  EXPECT_THAT(render_html(report),
              HasSubstr("<details class=\"fold\" open><summary>13 runs, 1 of them wrong<"));
}

TEST(ReportHtml, ColumnsThatNoRowFillsAreLeftOut) {
  Report report = harness::example_pass();
  for (harness::ScenarioResult& s : report.scenarios) {
    for (harness::Comparison& c : s.comparisons) {
      c.limit.reset();
      c.noise_floor.reset();
      c.rank.reset();
      c.status = Status::kRecorded;
    }
  }
  const std::string html = render_html(report);
  EXPECT_THAT(html, HasSubstr("compare sortable no-limit no-floor no-rank"));
  EXPECT_THAT(html, Not(HasSubstr("colspan=\"7\"")));
  EXPECT_THAT(html, Not(HasSubstr("Bars show")));
}

TEST(ReportHtml, SkippedReportSaysWhyAndIsNoPass) {
  const std::string html = render_html(harness::example_skipped());
  EXPECT_THAT(html, HasSubstr("<h1>Skipped</h1>"));
  EXPECT_THAT(html, HasSubstr("this build has no CUDA"));
  EXPECT_THAT(html, Not(HasSubstr("<h1>Pass")));
}

harness::Series series_of(std::vector<double> values) {
  harness::Series s;
  s.chart = "chart";
  for (const double value : values)
    s.points.push_back({static_cast<double>(s.points.size()), value});
  return s;
}

std::string chart_of(const harness::Series& s) { return render_chart({&s}, "c", false); }

TEST(ReportChart, ZeroNanAndInfinityAreDrawnAndSaid) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const std::string chart = chart_of(series_of({1e-7, 0, nan, 1e-5, infinity, 1e-6}));
  EXPECT_THAT(chart, HasSubstr("1 value is exactly 0"));
  EXPECT_THAT(chart, HasSubstr("hollow"));
  EXPECT_THAT(chart, HasSubstr("1 value is not a number"));
  EXPECT_THAT(chart, HasSubstr("1 value is infinite"));
  EXPECT_THAT(chart, Not(HasSubstr("d=\"Mnan")));
  static const std::regex kBadNumber("=\"(M[^\"]*)?-?(nan|inf)");
  EXPECT_FALSE(std::regex_search(chart, kBadNumber)) << chart;
}

TEST(ReportChart, NanBreaksTheLine) {
  const std::string chart =
      chart_of(series_of({1e-6, 1e-6, std::numeric_limits<double>::quiet_NaN(), 1e-6, 1e-6}));
  static const std::regex kTwoParts("class=\"l c0\" d=\"M[^M\"]*L[^M\"]*M[^M\"]*L[^M\"]*\"");
  EXPECT_TRUE(std::regex_search(chart, kTwoParts)) << chart;
}

TEST(ReportChart, EmptySinglePointAllZeroAndNegativeSeriesAreCharts) {
  EXPECT_THAT(chart_of(series_of({})), HasSubstr("no points"));
  EXPECT_THAT(chart_of(series_of({3e-9})), HasSubstr("<circle"));
  EXPECT_THAT(chart_of(series_of({0, 0})), HasSubstr("Every value is exactly 0."));
  EXPECT_THAT(chart_of(series_of({-1, 2})), Not(HasSubstr("log scale")));
}

TEST(ReportChart, ManyPointsKeepTheirLargestValue) {
  std::vector<double> values(131072, 1e-6);
  values[70001] = 3.25e-3;
  const std::string chart = chart_of(series_of(values));
  EXPECT_LT(chart.size(), 60000U);
  EXPECT_THAT(chart, HasSubstr("0.00325"));
  EXPECT_THAT(chart, HasSubstr("131,072 points"));
  EXPECT_THAT(chart, HasSubstr("class=\"band"));
}

TEST(ReportJunit, EveryExampleIsWellFormedWithMatchingCounts) {
  for (const auto& [name, report] : harness::all_examples()) {
    if (!is_whole(report)) continue;
    const std::string xml = render_junit(report);
    EXPECT_EQ(markup_error(xml, {}), "") << name;
    const auto count = [&](const std::string& what) {
      int64_t found = 0;
      for (size_t at = xml.find(what); at != std::string::npos; at = xml.find(what, at + 1))
        ++found;
      return found;
    };
    EXPECT_THAT(xml,
                HasSubstr(fmt::format(R"(tests="{}" failures="{}" errors="{}" skipped="{}" time=)",
                                      count("<testcase "),
                                      count("<failure "),
                                      count("<error "),
                                      count("<skipped "))))
        << name;
  }
}

TEST(ReportJunit, FailuresErrorsAndSkipsCarryTheirReasons) {
  const std::string xml = render_junit(harness::example_mixed());
  EXPECT_THAT(xml, HasSubstr("<skipped message=\"no CUDA device on this machine\"/>"));
  EXPECT_THAT(xml,
              HasSubstr("<error type=\"golden\" message=\"golden/data/wide/3.h5 is not there"));
  EXPECT_THAT(xml, HasSubstr("<error type=\"shape\""));
  EXPECT_THAT(xml, HasSubstr("first divergence: layers.2.kda.state"));
  EXPECT_THAT(xml, HasSubstr("logits]]&gt;"));
  EXPECT_THAT(xml, HasSubstr("no detector fired"));
}

TEST(ReportJunit, FailureThatWasAskedForIsNoFailure) {
  Report r = harness::example_mixed();
  std::erase_if(r.scenarios, [](const auto& s) { return s.name != "stalled_rank"; });
  EXPECT_THAT(render_junit(r), HasSubstr(R"(tests="1" failures="0" errors="0" skipped="0")"));
}

TEST(ReportMarkdown, VerdictThenDifferencesAndNoMarkupFromNames) {
  const std::string text = render_markdown(harness::example_mixed());
  EXPECT_LT(text.find("Error"), text.find("### What differs"));
  EXPECT_LT(text.find("### What differs"), text.find("### Scenarios"));
  EXPECT_THAT(text, Not(HasSubstr("<script>")));
  EXPECT_THAT(text, HasSubstr("cp\\_equivalence"));
  EXPECT_LT(render_markdown(harness::example_huge()).size(), 60000U);
}

TEST(ReportText, EscapingLeavesNothingThatXmlCannotHold) {
  EXPECT_EQ(escape("<a href='x'>&\"</a>"), "&lt;a href=&#39;x&#39;&gt;&amp;&quot;&lt;/a&gt;");
  EXPECT_EQ(escape("\x01\x7f"), "\xEF\xBF\xBD\x7f");
  EXPECT_EQ(escape("ok \xC3\xA9 \xE2\x86\x94 \xF0\x9F\x99\x82\n"),
            "ok \xC3\xA9 \xE2\x86\x94 \xF0\x9F\x99\x82\n");
  // Overlong, surrogate, cut off, beyond Unicode.
  for (const char* bad : {"\xC0\xAF", "\xED\xA0\x80", "\xE2\x86", "\xF5\x80\x80\x80"}) {
    EXPECT_THAT(escape(bad), HasSubstr("\xEF\xBF\xBD")) << bad;
  }
  EXPECT_EQ(escape_markdown("a|b`c`\nd"), "a\\|b\\`c\\` d");
}

TEST(ReportText, QuantitiesReadAsPeopleWriteThem) {
  EXPECT_EQ(format_seconds(0.0123), "12.3 ms");
  EXPECT_EQ(format_seconds(94.2), "94.2 s");
  EXPECT_EQ(format_seconds(247), "4 min 07 s");
  EXPECT_EQ(format_seconds(7500), "2 h 05 min");
  EXPECT_EQ(format_bytes(811597824), "774 MiB");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_count(131072), "131,072");
  EXPECT_EQ(format_count(-1000), "-1,000");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_pair(1.00004e-6, 1e-6).first, "1.00004e-6");
}

}  // namespace
}  // namespace lockstep::reports
