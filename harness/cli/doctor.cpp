#include <sys/statvfs.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "golden/store/golden_case.hpp"
#include "harness/cli/commands.hpp"
#include "harness/cli/ranks.hpp"
#include "harness/launch/mpi_start.hpp"
#include "harness/launch/paths.hpp"
#include "harness/result/result.hpp"
#include "model/base/device.hpp"
#include "model/base/parallel.hpp"
#include "model/base/torch.hpp"

namespace lockstep::harness {
namespace {

enum class State { kGood, kMissing, kBroken };

struct Finding {
  std::string what;
  State state;
  std::string detail, fix;
};

std::string cpu_flags() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("flags")) return line + " ";
  }
  return {};
}

int64_t memory_kib(std::string_view key) {
  std::ifstream in("/proc/meminfo");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(key)) return std::atoll(line.c_str() + key.size() + 1);
  }
  return 0;
}

Finding cores() {
  const int64_t n = std::thread::hardware_concurrency();
  return {
      "cores", State::kGood, fmt::format("{} logical, {} used by one rank", n, num_threads()), {}};
}

Finding instruction_set(const Environment& environment) {
  const std::string flags = cpu_flags();
  std::string extra;
  for (const char* flag : {"avx2", "fma", "avx512f", "avx512_bf16", "amx_tile"}) {
    if (flags.find(std::string(" ") + flag + " ") != std::string::npos) {
      extra += std::string(extra.empty() ? "" : " ") + flag;
    }
  }
  const bool enough =
      extra.find("avx2") != std::string::npos && extra.find("fma") != std::string::npos;
  return {
      "instruction set",
      enough ? State::kGood : State::kBroken,
      fmt::format("{}; built for {}", extra.empty() ? "none known" : extra, environment.march),
      enough ? "" : "configure with -DLOCKSTEP_MARCH=x86-64-v2; results may differ in last bits"};
}

Finding memory() {
  const double total = static_cast<double>(memory_kib("MemTotal")) / (1 << 20);
  const double free = static_cast<double>(memory_kib("MemAvailable")) / (1 << 20);
  return {"memory",
          free > 2 ? State::kGood : State::kMissing,
          fmt::format("{:.1f} GiB, {:.1f} GiB available", total, free),
          free > 2 ? "" : "close programs; small models need 2 GiB"};
}

/// Free space where results, and where goldens and Python, are kept.
Finding disk() {
  const auto free_gib = [](const std::filesystem::path& folder) {
    struct statvfs fs {};
    if (statvfs(folder.c_str(), &fs) != 0) return -1.0;
    return static_cast<double>(fs.f_bavail) * static_cast<double>(fs.f_frsize) / (1 << 30);
  };
  std::filesystem::path cache = cache_folder();
  std::error_code error;
  while (!std::filesystem::exists(cache, error) && cache.has_relative_path()) {
    cache = cache.parent_path();
  }
  if (cache.empty()) cache = ".";
  const double here = free_gib("."), there = free_gib(cache);
  if (here < 0) return {"disk", State::kMissing, "unknown", "check the current folder"};
  return {"disk",
          here > 1 ? State::kGood : State::kMissing,
          fmt::format("{:.1f} GiB free in the current folder, {:.1f} GiB in {}",
                      here,
                      there,
                      cache_folder().string()),
          here > 1 ? "" : "free some space; reports and results are written here"};
}

Finding mpi(const Environment& environment) {
  try {
    const Outcome outcome = run_ranks(2, {"doctor", "--ping", "--quiet"});
    if (outcome.exit_code == 0 && outcome.output.find("2 ranks") != std::string::npos) {
      return {"mpi",
              State::kGood,
              fmt::format("{}; 2 ranks answered in {:.1f} s", environment.mpi, outcome.seconds),
              {}};
    }
    return {"mpi",
            State::kBroken,
            fmt::format("mpirun ended with {}: {}", outcome.exit_code, own_errors(outcome.errors)),
            "run `mpirun -n 2 hostname` and mend what it says"};
  } catch (const Error& error) {
    return {"mpi", State::kMissing, error.what(), "scripts/setup installs openmpi-bin"};
  }
}

/// The first program of this name on PATH or in the toolkit's usual place.
std::string find_program(const std::string& name) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(std::string(path != nullptr ? path : "") + ":/usr/local/cuda/bin");
  std::error_code error;
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::filesystem::path file = std::filesystem::path(folder) / name;
    if (!folder.empty() && std::filesystem::is_regular_file(file, error)) return file.string();
  }
  return {};
}

Finding cuda() {
  int devices = 0;
  std::error_code error;
  while (std::filesystem::exists(fmt::format("/dev/nvidia{}", devices), error)) ++devices;
  const std::string compiler = find_program("nvcc");
  const std::string& problem = cuda_problem();
  return {"cuda",
          problem.empty() ? State::kGood : State::kMissing,
          fmt::format("{}, {}{}",
                      devices == 0 ? "no NVIDIA device" : fmt::format("{} device(s)", devices),
                      compiler.empty() ? "no toolkit (nvcc)" : "toolkit " + compiler,
                      problem.empty() ? "" : "; " + problem),
          devices > 0 && compiler.empty() ? "install the CUDA toolkit to build the device kernels"
                                          : ""};
}

Finding golden_store() {
  try {
    const std::filesystem::path folder = golden_folder();
    const auto entries = golden::read_manifest(folder);
    for (const golden::ManifestEntry& entry : entries) golden::verify_entry(folder, entry);
    return {"golden store",
            State::kGood,
            fmt::format("{} cases in {}, as their manifest says", entries.size(), folder.string()),
            {}};
  } catch (const Error& error) {
    return {"golden store",
            State::kBroken,
            error.what(),
            "git checkout golden/data, or set LOCKSTEP_GOLDEN to a whole copy"};
  }
}

Finding golden_python() {
  const std::filesystem::path python = golden_python_path();
  if (python.empty()) {
    return {"golden python",
            State::kMissing,
            "not installed; needed only to make goldens and to measure the peer",
            "scripts/setup --golden"};
  }
  const Outcome outcome = run_command(
      {python.string(),
       "-c",
       "import importlib.util as u, torch, transformers, h5py; print(torch.__version__, "
       "transformers.__version__, 'fla' if u.find_spec('fla') else '')"});
  std::string torch_version, transformers_version, fla;
  std::istringstream(outcome.output) >> torch_version >> transformers_version >> fla;
  if (outcome.exit_code != 0) {
    return {"golden python", State::kBroken, "does not import", "scripts/setup --golden"};
  }
  if (!fla.empty()) {
    return {"golden python",
            State::kBroken,
            "flash-linear-attention is installed there, which breaks the CPU path",
            "uninstall flash-linear-attention"};
  }
  return {"golden python",
          State::kGood,
          fmt::format("torch {}, transformers {}", torch_version, transformers_version),
          {}};
}

std::string_view word(State state) {
  return state == State::kGood ? "ok" : state == State::kMissing ? "absent" : "BROKEN";
}

}  // namespace

int run_command_doctor(const DoctorOptions& options, const Context& context) {
  if (options.ping) {
    return on_ranks(context, "doctor", [](const parallel::Session& session) {
      check_hang_rank(session.world().size());
      const auto ranks = session.world().all_gather(session.world().rank(), "ping");
      if (session.world().rank() == 0) print(fmt::format("{} ranks\n", ranks.size()));
      return 0;
    });
  }
  if (launcher_rank() != 0) return 0;
  Finding device = cuda();  // before anything asks LibTorch about devices
  Environment environment = local_environment();
  environment.mpi = mpi_version();
  std::vector<Finding> findings = {
      cores(),
      instruction_set(environment),
      memory(),
      disk(),
      {"torch", State::kGood, fmt::format("{}; {}", environment.torch, environment.blas), {}}};
  if (!under_mpi_launcher()) findings.push_back(mpi(environment));
  findings.push_back({"hdf5", State::kGood, golden::hdf5_version(), {}});
  findings.push_back(std::move(device));
  findings.push_back(golden_store());
  findings.push_back(golden_python());
  bool broken = false;
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Finding& f : findings) {
    broken = broken || f.state == State::kBroken;
    list.push_back(
        {{"what", f.what}, {"state", word(f.state)}, {"detail", f.detail}, {"fix", f.fix}});
    if (context.json || (context.quiet && f.state == State::kGood)) continue;
    print(fmt::format("{:<16} {:<7} {}\n", f.what, word(f.state), f.detail));
    if (!f.fix.empty()) print(fmt::format("{:<16} {:<7} fix: {}\n", "", "", f.fix));
  }
  if (context.json) print(list.dump(2) + "\n");
  return broken ? 2 : 0;
}

}  // namespace lockstep::harness
