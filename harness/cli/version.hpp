// What this program is, in a line.
#pragma once

#include <string>

namespace lockstep::harness {

/// "lockstep 0.1.0 (commit, compiler, torch, MPI)".
std::string version_text();

}  // namespace lockstep::harness
