#include "reports/writer/text.hpp"

#include <array>
#include <cmath>
#include <cstddef>

namespace lockstep::reports {
namespace {

using harness::Comparison;
using harness::format_number;

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

/// Bytes of the valid UTF-8 sequence at the start of `text`, 0 if there is none that XML allows.
size_t sequence_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return first >= 0x20 || first == '\n' || first == '\t' ? 1 : 0;
  const size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < length) return 0;
  uint32_t code = first & (0xFFU >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0U) != 0x80U) return 0;
    code = (code << 6U) | (byte(i) & 0x3FU);
  }
  constexpr std::array<uint32_t, 5> kSmallest{0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = code >= 0xD800 && code <= 0xDFFF;
  const bool is_noncharacter = code == 0xFFFE || code == 0xFFFF;
  const bool is_control = code >= 0x80 && code < 0xA0;
  if (code < kSmallest[length] || code > 0x10FFFF || is_surrogate || is_noncharacter ||
      is_control) {
    return 0;
  }
  return length;
}

template <typename Replace>
std::string rewrite(std::string_view text, Replace replace) {
  std::string out;
  out.reserve(text.size() + text.size() / 8);
  for (size_t i = 0; i < text.size();) {
    const size_t length = sequence_length(text.substr(i));
    if (length == 0) {
      out += kReplacement;
      ++i;
      continue;
    }
    const std::string_view replaced = length == 1 ? replace(text[i]) : std::string_view();
    if (replaced.data() != nullptr) {
      out += replaced;
    } else {
      out += text.substr(i, length);
    }
    i += length;
  }
  return out;
}

}  // namespace

std::string escape(std::string_view text) {
  return rewrite(text, [](char c) -> std::string_view {
    switch (c) {
      case '&':
        return "&amp;";
      case '<':
        return "&lt;";
      case '>':
        return "&gt;";
      case '"':
        return "&quot;";
      case '\'':
        return "&#39;";
      default:
        return {};
    }
  });
}

std::string escape_markdown(std::string_view text) {
  return rewrite(text, [](char c) -> std::string_view {
    switch (c) {
      case '&':
        return "&amp;";
      case '<':
        return "&lt;";
      case '>':
        return "&gt;";
      case '|':
        return "\\|";
      case '*':
        return "\\*";
      case '_':
        return "\\_";
      case '`':
        return "\\`";
      case '[':
        return "\\[";
      case ']':
        return "\\]";
      case '\\':
        return "\\\\";
      case '\n':
      case '\t':
        return " ";
      default:
        return {};
    }
  });
}

std::string format_seconds(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return format_number(seconds);
  if (seconds == 0) return "0 s";
  if (seconds < 1e-3) return format_number(seconds * 1e6) + " us";
  if (seconds < 0.9995) return format_number(seconds * 1e3) + " ms";
  if (seconds < 99.95) return format_number(seconds) + " s";
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  if (whole < 3600) return fmt::format("{} min {:02} s", whole / 60, whole % 60);
  return fmt::format("{} h {:02} min", whole / 3600, whole % 3600 / 60);
}

std::string format_bytes(int64_t bytes) {
  if (bytes < 1024) return fmt::format("{} B", bytes);
  constexpr std::array<std::string_view, 5> kUnits{"KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  while (value >= 999.5 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return fmt::format("{} {}", format_number(value), kUnits[unit]);
}

std::string format_count(int64_t count) {
  const std::string digits = fmt::format("{}", count);
  std::string out;
  for (size_t i = 0; i < digits.size(); ++i) {
    const size_t left = digits.size() - i;
    if (i > 0 && left % 3 == 0 && digits[i - 1] != '-') out += ',';
    out += digits[i];
  }
  return out;
}

std::pair<std::string, std::string> format_pair(double value, double limit) {
  std::pair<std::string, std::string> texts{format_number(value), format_number(limit)};
  for (int digits = 4; texts.first == texts.second && value != limit && digits <= 17; ++digits) {
    texts = {format_number(value, digits), format_number(limit, digits)};
    if (std::isnan(value) || std::isnan(limit)) break;
  }
  return texts;
}

std::string format_ratio(const Comparison& comparison) {
  const double ratio = comparison.ratio();
  if (std::isnan(comparison.value)) return "NaN";
  if (std::isnan(ratio)) return "";
  if (std::isinf(ratio)) return std::isinf(comparison.value) ? "inf" : "over 0";
  if (ratio == 0 && comparison.value == 0 && comparison.bound == harness::Bound::kAtMost) {
    return "exact";
  }
  if (ratio < 1 && ratio > 0.99) return ">99%";
  if (ratio <= 1) return ratio < 1e-3 ? "<0.1%" : harness::format_percent(ratio);
  // 1.0004 must not read as 1x: that would be at the limit.
  std::string text = format_number(ratio, ratio < 10 ? 2 : 3);
  if (text == "1") text = format_number(ratio, 5);
  return fmt::format("{}x", text == "1" ? ">1" : text);
}

std::string pair_of(const Comparison& comparison) {
  if (comparison.right.empty()) return comparison.left;
  if (comparison.left.empty()) return comparison.right;
  return comparison.left + " and " + comparison.right;
}

std::string subject_of(const Comparison& comparison) {
  if (comparison.metric.empty()) return comparison.what;
  return comparison.what + ", " + comparison.metric;
}

std::string_view first_label(const Comparison& comparison) {
  return comparison.status == harness::Status::kPass ? "first difference" : "first divergence";
}

std::string_view headline(const harness::Report& report) {
  switch (report.status) {
    case harness::Status::kPass:
      return "Pass";
    case harness::Status::kFail:
      return harness::count_comparisons(report).fail > 0 ? "Numerics differ" : "Fail";
    case harness::Status::kError:
      return "Error";
    case harness::Status::kSkipped:
      return report.scenarios.empty() ? "Nothing run" : "Skipped";
    case harness::Status::kRecorded:
      return "Recorded";
  }
  return "Error";
}

std::string sentence_below(const harness::Report& report) {
  const std::string start = fmt::format("{}: ", headline(report));
  return report.verdict.starts_with(start) ? report.verdict.substr(start.size()) : report.verdict;
}

}  // namespace lockstep::reports
