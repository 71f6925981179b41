#include <algorithm>

#include "harness/runner/bench.hpp"

namespace lockstep::harness {
namespace {

double seconds_of(const BenchPass& pass, std::string_view name) {
  for (const OpTime& op : pass.operators) {
    if (op.name == name) return op.forward_s + op.backward_s;
  }
  return 0;
}

double ratio(double from, double to) { return from > 0 ? to / from : 0; }

}  // namespace

std::vector<std::vector<int64_t>> growth_rows(int64_t tokens) {
  return {{tokens}, {8 * tokens}, std::vector<int64_t>(8, tokens)};
}

double BenchPass::operator_seconds() const {
  double sum = 0;
  for (const OpTime& op : operators) sum += op.forward_s + op.backward_s;
  return sum;
}

int64_t BenchRow::tokens() const {
  int64_t sum = 0;
  for (const int64_t length : documents) sum += length;
  return sum;
}

std::string BenchRow::name() const {
  const bool equal =
      std::adjacent_find(documents.begin(), documents.end(), std::not_equal_to<>()) ==
      documents.end();
  if (documents.empty()) return "0";
  if (documents.size() == 1) return std::to_string(documents.front());
  if (equal) return fmt::format("{} x {}", documents.size(), documents.front());
  std::string text;
  for (const int64_t length : documents) {
    text += (text.empty() ? "" : " + ") + std::to_string(length);
  }
  return text;
}

Growth growth(const BenchPass& from, const BenchPass& to) {
  constexpr std::string_view kScoring = "indexer scoring";
  const double from_scoring = seconds_of(from, kScoring), to_scoring = seconds_of(to, kScoring);
  Growth result{.all = ratio(from.seconds, to.seconds),
                .without_scoring = ratio(from.seconds - from_scoring, to.seconds - to_scoring),
                .scoring = ratio(from_scoring, to_scoring),
                .operators = {}};
  for (const OpTime& op : to.operators) {
    result.operators.emplace_back(op.name,
                                  ratio(seconds_of(from, op.name), op.forward_s + op.backward_s));
  }
  result.operators.emplace_back(
      "outside operators",
      ratio(from.seconds - from.operator_seconds(), to.seconds - to.operator_seconds()));
  return result;
}

}  // namespace lockstep::harness
