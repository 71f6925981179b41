// The command line of the program.
#pragma once

namespace lockstep::harness {

/// Parses, runs and reports errors: everything main() does but start. Returns the exit code.
int run_program(int argc, char** argv);

}  // namespace lockstep::harness
