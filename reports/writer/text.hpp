// Small pieces of text that all report formats share: escaping and numbers as people read them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "harness/result/result.hpp"

namespace lockstep::reports {

/// Safe as text and as a quoted attribute value in HTML and XML. Control characters and invalid
/// UTF-8 become U+FFFD, since XML cannot hold them in any spelling; newline and tab stay.
std::string escape(std::string_view text);

/// Safe inside a cell of a Markdown table: no pipes, markup, HTML or line breaks of its own.
std::string escape_markdown(std::string_view text);

/// "840 us", "12.4 ms", "3.21 s", "4 min 07 s", "2 h 05 min".
std::string format_seconds(double seconds);
/// "512 B", "1.5 GiB".
std::string format_bytes(int64_t bytes);
/// "131,072".
std::string format_count(int64_t count);

/// Value and limit with as many digits as it takes to tell them apart when they differ.
std::pair<std::string, std::string> format_pair(double value, double limit);

/// How a value stands to its limit in a few characters: "43%", "3.1x", "exact", "over 0", "NaN".
std::string format_ratio(const harness::Comparison& comparison);

/// "cp1 and cp2"; the one that is there if the other is empty.
std::string pair_of(const harness::Comparison& comparison);

/// "logits, rel_l2".
std::string subject_of(const harness::Comparison& comparison);

/// What `first_divergence` is: of a comparison that passes, only the first element that differs.
std::string_view first_label(const harness::Comparison& comparison);

/// "Pass", "Numerics differ", "Error", ...: a whole report in a word or two.
std::string_view headline(const harness::Report& report);

/// The verdict as it reads below the headline: without repeating it.
std::string sentence_below(const harness::Report& report);

}  // namespace lockstep::reports
