// LibTorch 2.11's static objects crash while they end on some systems (Ubuntu 24.04: "free():
// invalid pointer" out of std::locale, long after main has returned), and a process would end with
// signal 6 whatever it found out. Nothing here needs them to end: once main has returned or exit()
// was called, and the handlers registered later than this one have run, the process ends with its
// code. Not in sanitizer builds, whose own last words come later.
#include <cstdio>
#include <cstdlib>
#include <iostream>

extern "C" {
/// Named on the link line, so that every program has this file.
extern const int lockstep_process_end;
const int lockstep_process_end = 1;
}

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
namespace {

void end_now(int code, void*) {
  std::cout.flush();
  std::clog.flush();
  std::fflush(nullptr);
  std::_Exit(code);
}

[[gnu::constructor]] void end_before_libraries() { on_exit(end_now, nullptr); }

}  // namespace
#endif
