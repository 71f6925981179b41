// The page's style sheet and script, kept apart from the code that fills it.
#pragma once

#include <string_view>

namespace lockstep::reports {

/// Light and dark, screen, phone and print. Colours keep a contrast of 4.5 and more on their
/// ground.
extern const std::string_view kStyle;

/// Adds filtering, sorting, chart tooltips and copying to a page that is complete without them.
extern const std::string_view kScript;

}  // namespace lockstep::reports
