#include "model/config/numerics_markdown.hpp"

#include <fmt/format.h>

#include "model/config/numerics_table.hpp"

namespace lockstep::model {

std::string switches_markdown() {
  std::string out =
      "| id | name | site | values | float64, float32 | hf-bf16 | fsdp-bf16 | engine | note |\n"
      "|---|---|---|---|---|---|---|---|---|\n";
  for (const SwitchInfo& s : kSwitches) {
    std::string values;
    for (size_t v = 0; v < s.num_values(); ++v)
      values += fmt::format("{}`{}`", v == 0 ? "" : " ", s.values[v]);
    out += fmt::format("| {} | `{}` | {} | {} | {} | {} | {} | {} | {} |\n",
                       s.id,
                       s.name,
                       s.site,
                       values,
                       s.values[s.plain],
                       s.values[s.hf],
                       s.values[s.trainer],
                       s.values[s.engine],
                       s.doc);
  }
  return out;
}

}  // namespace lockstep::model
