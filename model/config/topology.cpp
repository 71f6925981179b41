#include "model/config/topology.hpp"

#include <charconv>
#include <set>

#include "model/base/error.hpp"

namespace lockstep::model {
namespace {

struct AxisField {
  std::string_view name;
  int64_t Topology::*degree;
};
constexpr AxisField kAxes[] = {{"dp", &Topology::dp},
                               {"fsdp", &Topology::fsdp},
                               {"cp", &Topology::cp},
                               {"tp", &Topology::tp},
                               {"ep", &Topology::ep}};

/// More than any machine, and small enough that no count of bytes or rows leaves 64 bits.
constexpr int64_t kMaxRanks = 1 << 20;

}  // namespace

Topology parse_topology(std::string_view text) {
  Topology topology;
  std::set<std::string_view> seen;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    const std::string_view item = text.substr(0, comma);
    text = comma == std::string_view::npos ? std::string_view{} : text.substr(comma + 1);
    const size_t equals = item.find('=');
    const std::string_view name = item.substr(0, equals);
    int64_t Topology::*degree = nullptr;
    for (const AxisField& axis : kAxes) {
      if (axis.name == name) degree = axis.degree;
    }
    LOCKSTEP_CHECK(degree != nullptr && equals != std::string_view::npos,
                   kMesh,
                   "topology: '{}' is not axis=degree; write for example cp=2,ep=2 with axes dp, "
                   "fsdp, cp, tp, ep",
                   item);
    LOCKSTEP_CHECK(
        seen.insert(name).second, kMesh, "topology: {} is given twice; give each axis once", name);
    const std::string_view number = item.substr(equals + 1);
    int64_t value = 0;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), value);
    LOCKSTEP_CHECK(error == std::errc() && end == number.data() + number.size(),
                   kMesh,
                   "topology: {}='{}' is not a whole number",
                   name,
                   number);
    topology.*degree = value;
  }
  validate(topology);
  return topology;
}

std::string to_string(const Topology& topology) {
  std::string text;
  for (const AxisField& axis : kAxes) {
    if (topology.*axis.degree == 1) continue;
    if (!text.empty()) text += ',';
    text += fmt::format("{}={}", axis.name, topology.*axis.degree);
  }
  return text.empty() ? "1 rank" : text;
}

void validate(const Topology& topology) {
  for (const AxisField& axis : kAxes) {
    LOCKSTEP_CHECK(topology.*axis.degree >= 1 && topology.*axis.degree <= kMaxRanks,
                   kMesh,
                   "topology: {} = {} must be 1 to {}",
                   axis.name,
                   topology.*axis.degree,
                   kMaxRanks);
  }
  // One after the other, since the product of four degrees may leave 64 bits.
  int64_t ranks = 1;
  for (const int64_t degree : {topology.dp, topology.fsdp, topology.cp, topology.tp}) {
    ranks *= degree;
    LOCKSTEP_CHECK(ranks <= kMaxRanks,
                   kMesh,
                   "topology: {} are more than {} ranks; use fewer",
                   to_string(topology),
                   kMaxRanks);
  }
  const int64_t folded = topology.fsdp * topology.cp;
  LOCKSTEP_CHECK(
      folded % topology.ep == 0,
      kMesh,
      "topology: ep = {} does not divide fsdp * cp = {} * {} = {}; ep is folded over them",
      topology.ep,
      topology.fsdp,
      topology.cp,
      folded);
}

}  // namespace lockstep::model
