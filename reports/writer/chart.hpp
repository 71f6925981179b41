// Charts as inline SVG: several series over one x axis, with noise floors and limits.
#pragma once

#include <string>
#include <vector>

#include "harness/result/result.hpp"

namespace lockstep::reports {

/// One <figure> with title, legend, drawing, notes and the drawn numbers as a table. `series` share
/// kind and chart title. Points may be empty, few, many, zero, negative, NaN or infinite: above 400
/// distinct x they are drawn as the maximum of equal intervals of x with a band down to the
/// minimum; zero on a logarithmic axis lies on the axis floor; NaN and infinity are marked at the
/// top edge; and each of these is said below the drawing. `id` is unique in the page;
/// `is_wide` is for columns of half the page, else of a third, so that text has one size.
std::string render_chart(const std::vector<const harness::Series*>& series,
                         const std::string& id,
                         bool is_wide);

}  // namespace lockstep::reports
