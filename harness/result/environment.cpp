#include <sys/utsname.h>

#include <fstream>
#include <thread>

#include "harness/result/build_facts.hpp"
#include "harness/result/result.hpp"
#include "model/base/parallel.hpp"
#include "model/base/torch.hpp"

namespace lockstep::harness {
namespace {

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("model name")) continue;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "";
}

/// The text between `key` and the next character of `end` in torch's description of its build.
std::string between(const std::string& text, std::string_view key, std::string_view end) {
  const size_t at = text.find(key);
  if (at == std::string::npos) return "";
  const size_t begin = at + key.size();
  const size_t stop = text.find_first_of(end, begin);
  return text.substr(begin, stop == std::string::npos ? stop : stop - begin);
}

}  // namespace

Environment local_environment() {
  Environment environment;
  environment.lockstep_version = kBuildVersion;
  environment.git_commit = kBuildCommit;
#if defined(__clang__)
  environment.compiler = fmt::format("clang {}", __clang_version__);
#else
  environment.compiler = fmt::format("g++ {}", __VERSION__);
#endif
  environment.march = kBuildMarch;
  environment.build_type = kBuildType;
  utsname system{};
  if (uname(&system) == 0) {
    environment.os = fmt::format("{} {} {}", system.sysname, system.release, system.machine);
  }
  environment.cpu_model = cpu_model();
  environment.cores = std::thread::hardware_concurrency();
  environment.threads = num_threads();
  const std::string torch = at::show_config();
  environment.torch = between(torch, "TORCH_VERSION=", ", \n");
  const std::string mkl = between(torch, "Math Kernel Library Version ", " \n");
  environment.blas = mkl.empty() ? between(torch, "BLAS_INFO=", ", \n") : "MKL " + mkl;
  const std::string capability = between(torch, "CPU capability usage: ", "\n");
  if (!capability.empty()) environment.extra.push_back({"torch CPU capability", capability});
  return environment;
}

}  // namespace lockstep::harness
