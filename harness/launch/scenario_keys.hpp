// The rows behind the schema: what each key is, and how it is taken into a scenario.
#pragma once

#include <span>

#include "harness/launch/scenario.hpp"
#include "harness/launch/schema.hpp"
#include "harness/launch/toml_value.hpp"

namespace lockstep::harness {

/// Where the keys of the table being read go; run and compare are set while one is read.
struct KeyTarget {
  Scenario* scenario = nullptr;
  RunSpec* run = nullptr;
  CompareSpec* compare = nullptr;
};

struct KeyRow {
  KeyInfo info;
  /// Null for keys that the loader itself reads (tables, sweeps).
  void (*take)(KeyTarget&, const TomlValue&);
};

std::span<const KeyRow> key_rows();

/// Names of the keys of one table.
std::vector<std::string> key_names(std::string_view table);

}  // namespace lockstep::harness
