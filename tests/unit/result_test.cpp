#include "harness/result/result.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "tests/unit/report_examples.hpp"

namespace lockstep::harness {
namespace {

using ::testing::HasSubstr;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

Comparison judged(double value, std::optional<double> limit, Bound bound = Bound::kAtMost) {
  Comparison c;
  c.left = "a";
  c.right = "b";
  c.what = "logits";
  c.metric = "rel_l2";
  c.value = value;
  c.limit = limit;
  c.bound = bound;
  judge(c);
  return c;
}

ScenarioResult ended(Status status, std::optional<ErrorKind> kind = {}) {
  ScenarioResult s;
  s.name = "one";
  s.status = status;
  s.reason = "because";
  s.error_kind = kind;
  return s;
}

Report of(std::vector<ScenarioResult> scenarios) {
  Report r;
  r.scenarios = std::move(scenarios);
  conclude(r);
  return r;
}

std::string error_of(std::string_view text) {
  try {
    report_from_json(text, "report.json");
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    return error.what();
  }
  return "";
}

TEST(Result, ValueAtItsLimitPassesAndTheNextDoubleFails) {
  EXPECT_EQ(judged(2e-5, 2e-5).status, Status::kPass);
  EXPECT_EQ(judged(std::nextafter(2e-5, 1.0), 2e-5).status, Status::kFail);
  EXPECT_EQ(judged(0.9995, 0.9995, Bound::kAtLeast).status, Status::kPass);
  EXPECT_EQ(judged(std::nextafter(0.9995, 0.0), 0.9995, Bound::kAtLeast).status, Status::kFail);
}

TEST(Result, NanNeverPassesAndNothingWithoutLimitIsAPass) {
  EXPECT_EQ(judged(kNan, 1.0).status, Status::kFail);
  EXPECT_EQ(judged(kNan, {}).status, Status::kFail);
  EXPECT_EQ(judged(1.0, kNan).status, Status::kFail);
  EXPECT_EQ(judged(kNan, 0.5, Bound::kAtLeast).status, Status::kFail);
  EXPECT_EQ(judged(1.0, {}).status, Status::kRecorded);
}

TEST(Result, FailingRowBelowMakesTheComparisonFail) {
  Comparison c = judged(1e-6, 1e-5);
  c.details = {{"w", "", 1.0, 0.5, {}, "", Status::kFail, ""}, {}};
  judge(c);
  EXPECT_EQ(c.status, Status::kFail);
  EXPECT_THAT(c.reason, HasSubstr("1 of its 2 rows"));
}

TEST(Result, RatioTellsTheWayToTheLimitForBothBounds) {
  EXPECT_DOUBLE_EQ(judged(1e-5, 2e-5).ratio(), 0.5);
  EXPECT_EQ(judged(0, 0).ratio(), 0);
  EXPECT_EQ(judged(1e-300, 0).ratio(), kInfinity);
  EXPECT_TRUE(std::isnan(judged(1.0, {}).ratio()));
  EXPECT_NEAR(judged(0.9999, 0.9995, Bound::kAtLeast).ratio(), 0.2, 1e-9);
  EXPECT_EQ(judged(1, 1, Bound::kAtLeast).ratio(), 0);
  EXPECT_EQ(judged(0.5, 1, Bound::kAtLeast).ratio(), kInfinity);
  EXPECT_DOUBLE_EQ(judged(60, 30, Bound::kAtLeast).ratio(), 0.5);
}

TEST(Result, EveryErrorKindHasItsExitCodeAndTheHighestWins) {
  EXPECT_EQ(of({ended(Status::kError, ErrorKind::kInput)}).exit_code, 2);
  EXPECT_EQ(of({ended(Status::kError, ErrorKind::kConfig)}).exit_code, 2);
  EXPECT_EQ(of({ended(Status::kError, ErrorKind::kShape)}).exit_code, 2);
  EXPECT_EQ(of({ended(Status::kError, ErrorKind::kMesh)}).exit_code, 2);
  EXPECT_EQ(of({ended(Status::kError, ErrorKind::kComm)}).exit_code, 3);
  EXPECT_EQ(of({ended(Status::kError, ErrorKind::kGolden)}).exit_code, 4);
  EXPECT_EQ(of({ended(Status::kError, ErrorKind::kInternal)}).exit_code, 5);
  EXPECT_EQ(of({ended(Status::kError)}).exit_code, 5);
  EXPECT_EQ(of({ended(Status::kFail)}).exit_code, 1);
  EXPECT_EQ(of({ended(Status::kSkipped)}).exit_code, 0);
  EXPECT_EQ(of({ended(Status::kPass),
                ended(Status::kError, ErrorKind::kComm),
                ended(Status::kFail),
                ended(Status::kError, ErrorKind::kInput)})
                .exit_code,
            3);
}

TEST(Result, ErrorsOfComparisonsReachTheExitCodeOfTheReport) {
  ScenarioResult s;
  s.comparisons = {judged(1, 2), judged(3, 2)};
  EXPECT_EQ(of({s}).exit_code, 1);
  s.comparisons.push_back(judged(1, 2));
  s.comparisons.back().status = Status::kError;
  s.comparisons.back().error_kind = ErrorKind::kGolden;
  const Report r = of({s});
  EXPECT_EQ(r.exit_code, 4);
  EXPECT_EQ(r.scenarios[0].phase, Phase::kCompare);
}

TEST(Result, SkippedIsNeverAPass) {
  ScenarioResult s;
  s.comparisons = {judged(1, 2)};
  s.comparisons[0].status = Status::kSkipped;
  s.comparisons[0].reason = "no gradients";
  const Report r = of({s, ended(Status::kSkipped)});
  EXPECT_EQ(r.status, Status::kSkipped);
  EXPECT_EQ(r.scenarios[0].status, Status::kSkipped);
  EXPECT_EQ(r.scenarios[0].reason, "no gradients");
  EXPECT_EQ(count_scenarios(r).pass, 0);
  EXPECT_EQ(count_comparisons(r).pass, 0);
  EXPECT_THAT(r.verdict, HasSubstr("Nothing was judged"));
  EXPECT_THAT(of({ended(Status::kSkipped), example_pass().scenarios[0]}).verdict,
              HasSubstr("1 scenario was skipped"));
}

TEST(Result, FailedRunMakesItsScenarioFailInPhaseRun) {
  ScenarioResult s;
  s.comparisons = {judged(1, 2)};
  s.runs.emplace_back();
  s.runs[0].name = "cp2";
  s.runs[0].status = Status::kError;
  s.runs[0].reason = "out of memory";
  const Report r = of({s});
  EXPECT_EQ(r.scenarios[0].phase, Phase::kRun);
  EXPECT_EQ(r.scenarios[0].reason, "run cp2: out of memory");
  EXPECT_EQ(r.exit_code, 5);
}

TEST(Result, FailureThatWasAskedForPassesAndItsAbsenceFails) {
  ScenarioResult asked = ended(Status::kPass);
  asked.expected = "exit 3";
  asked.comparisons = {judged(3, 2)};
  const Report good = of({asked});
  EXPECT_EQ(good.exit_code, 0);
  EXPECT_EQ(count_comparisons(good).fail, 0);
  EXPECT_EQ(count_comparisons(good).expected, 1);
  EXPECT_EQ(worst_comparison(good).comparison, nullptr);
  asked.status = Status::kFail;
  EXPECT_EQ(of({asked}).exit_code, 1);
}

TEST(Result, ConcludingTwiceChangesNothing) {
  for (auto& [name, report] : all_examples()) {
    if (name == "huge") continue;
    const std::string once = to_json(report);
    conclude(report);
    EXPECT_EQ(to_json(report), once) << name;
  }
}

TEST(Result, WorstComparisonIsTheNanThenTheLargestRatio) {
  ScenarioResult s;
  s.comparisons = {judged(1, 2), judged(6, 2), judged(5, 2)};
  EXPECT_EQ(worst_comparison(s), &s.comparisons[1]);
  s.comparisons.push_back(judged(kInfinity, 2));
  EXPECT_EQ(worst_comparison(s), &s.comparisons[3]);
  s.comparisons.push_back(judged(kNan, 2));
  EXPECT_EQ(worst_comparison(s), &s.comparisons[4]);
}

TEST(Result, VerdictNamesTheWorstWithNumbersThatDiffer) {
  ScenarioResult s;
  s.name = "close";
  s.comparisons = {judged(1.00004e-6, 1e-6)};
  const std::string verdict = of({s}).verdict;
  EXPECT_THAT(verdict, HasSubstr("1 of 1 comparison misses its limit"));
  EXPECT_THAT(verdict, HasSubstr("1.00004e-6"));
  EXPECT_THAT(verdict, HasSubstr("at most 1e-6"));
}

TEST(Result, VerdictCountsEveryRowOfTheTable) {
  ScenarioResult s;
  s.comparisons = {judged(1, 2), judged(1, 2), judged(1, 2)};
  s.comparisons[2].limit.reset();
  s.comparisons[2].status = Status::kRecorded;
  EXPECT_THAT(of({s}).verdict, HasSubstr("All 2 comparisons in 1 scenario"));
  EXPECT_THAT(of({s}).verdict, HasSubstr("; 1 comparison without a limit is recorded."));
  s.comparisons[1] = judged(3, 2);
  EXPECT_THAT(of({s}).verdict, HasSubstr("1 comparison without a limit is recorded"));
}

TEST(Result, NumbersReadAsPeopleWriteThem) {
  EXPECT_EQ(format_number(1.2e-9), "1.2e-9");
  EXPECT_EQ(format_number(0), "0");
  EXPECT_EQ(format_number(-0.0), "0");
  EXPECT_EQ(format_number(16), "16");
  EXPECT_EQ(format_number(131072), "131072");
  EXPECT_EQ(format_number(0.034), "0.034");
  EXPECT_EQ(format_number(12.3456), "12.3");
  EXPECT_EQ(format_number(0.99987), "0.99987");
  EXPECT_EQ(format_number(0.999999999), "0.999999999");
  EXPECT_EQ(format_number(1e15), "1e15");
  EXPECT_EQ(format_number(5e-324), "4.94e-324");
  EXPECT_EQ(format_number(kNan), "NaN");
  EXPECT_EQ(format_number(-kInfinity), "-inf");
}

TEST(ResultJson, EveryExampleReadsBackToTheSameText) {
  for (const auto& [name, report] : all_examples()) {
    const std::string text = to_json(report);
    EXPECT_TRUE(to_json(report_from_json(text, "report.json")) == text) << name;
  }
}

TEST(ResultJson, NumbersReadBackToTheSameBits) {
  Comparison c = judged(0.1, 1.0 / 3);
  c.noise_floor = std::numeric_limits<double>::denorm_min();
  c.ranks = {{0, "", -0.0, ""}, {1, "", kInfinity, ""}, {2, "", -kInfinity, ""}, {3, "", kNan, ""}};
  ScenarioResult s;
  s.comparisons = {c};
  s.series.emplace_back();
  s.series[0].points = {{1.7976931348623157e308, kNan}};
  const ScenarioResult back = scenario_from_json(to_json(s), "text");
  const auto same = [](double left, double right) {
    return std::bit_cast<uint64_t>(left) == std::bit_cast<uint64_t>(right);
  };
  EXPECT_TRUE(same(back.comparisons[0].value, 0.1));
  EXPECT_TRUE(same(*back.comparisons[0].limit, 1.0 / 3));
  EXPECT_TRUE(same(*back.comparisons[0].noise_floor, *c.noise_floor));
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(same(back.comparisons[0].ranks[i].value, c.ranks[i].value)) << i;
  }
  EXPECT_TRUE(std::isnan(back.comparisons[0].ranks[3].value));
  EXPECT_EQ(back.series[0].points[0].x, 1.7976931348623157e308);
  EXPECT_TRUE(std::isnan(back.series[0].points[0].y));
}

TEST(ResultJson, WholeRangeOfTheSeedSurvives) {
  Report r;
  r.seed = std::numeric_limits<uint64_t>::max();
  EXPECT_EQ(report_from_json(to_json(r), "text").seed, r.seed);
}

TEST(ResultJson, WrongFieldIsNamedWithWhatWasExpectedAndFound) {
  std::string text = to_json(example_fail());
  const size_t at = text.find("\"value\": 0.0034");
  ASSERT_NE(at, std::string::npos);
  text.replace(at, std::strlen("\"value\": 0.0034"), "\"value\": \"much\"");
  const std::string message = error_of(text);
  EXPECT_THAT(message, HasSubstr("report.json.scenarios[0].comparisons[0].value"));
  EXPECT_THAT(message, HasSubstr("expected a number"));
  EXPECT_THAT(message, HasSubstr("\"much\""));
}

TEST(ResultJson, CutOffTextAndOtherVersionsAreRefused) {
  const std::string text = to_json(example_pass());
  EXPECT_THAT(error_of(text.substr(0, text.size() / 2)), HasSubstr("not JSON"));
  EXPECT_THAT(error_of(""), HasSubstr("not JSON"));
  EXPECT_THAT(error_of("[]"), HasSubstr("version 0"));
  EXPECT_THAT(error_of(R"({"version": 2})"), HasSubstr("version 2 cannot be read"));
  EXPECT_THAT(error_of(R"({"version": 1, "status": "fine"})"), HasSubstr("one of pass, fail"));
}

TEST(ResultJson, UnknownFieldsAreIgnoredAndAbsentOnesKeepTheirDefaults) {
  const Report r = report_from_json(R"({"version": 1, "title": "t", "added_later": [1]})", "text");
  EXPECT_EQ(r.title, "t");
  EXPECT_TRUE(r.scenarios.empty());
}

TEST(Result, EnvironmentOfThisProcessIsKnown) {
  const Environment e = local_environment();
  EXPECT_THAT(e.torch, HasSubstr("."));
  EXPECT_FALSE(e.lockstep_version.empty());
  EXPECT_FALSE(e.march.empty());
  EXPECT_FALSE(e.compiler.empty());
  EXPECT_GT(e.cores, 0);
  EXPECT_GT(e.threads, 0);
}

}  // namespace
}  // namespace lockstep::harness
