// Checks a JSON text against a JSON schema of the kind reports/schema uses: $ref to $defs, type,
// enum, const, required, properties, additionalProperties, items, minItems, maxItems, minimum,
// maximum, anyOf.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::reports {

/// Violations as "scenarios[2].status: ...", at most 20. A schema keyword that is not known here is
/// a violation too, so that nothing goes unchecked.
std::vector<std::string> schema_violations(std::string_view document, std::string_view schema);

}  // namespace lockstep::reports
