// Facts about this build, written by CMake when it changes
// (harness/cmake/LockstepBuildFacts.cmake).
#pragma once

namespace lockstep::harness {

extern const char* const kBuildVersion;  ///< "0.1.0"
extern const char* const kBuildCommit;   ///< "3f2a9c1d07be", "-dirty" appended when changed; or ""
extern const char* const kBuildMarch;    ///< -march of all own code
extern const char* const kBuildType;     ///< "Release"

}  // namespace lockstep::harness
