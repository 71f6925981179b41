#include "harness/cli/command_line.hpp"
#include "model/base/heap.hpp"

int main(int argc, char** argv) {
  lockstep::keep_freed_memory();
  return lockstep::harness::run_program(argc, argv);
}
