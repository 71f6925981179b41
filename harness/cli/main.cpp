#include "harness/cli/command_line.hpp"

int main(int argc, char** argv) { return lockstep::harness::run_program(argc, argv); }
