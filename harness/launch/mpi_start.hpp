// Starting ranks: which launcher this process runs under, and how to start one when there is none.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::harness {

/// True when an MPI launcher (mpirun, or Slurm's with PMI) started this process.
bool under_mpi_launcher();

/// This process's rank as the launcher tells it, 0 without one. Does not touch MPI.
int64_t launcher_rank();

/// The running program itself, for starting ranks of it.
std::filesystem::path program_path();

struct Outcome {
  int exit_code = 0;
  std::string output;  ///< last 64 KiB of standard output, unless passed on line by line
  std::string errors;  ///< last 64 KiB of standard error
  double seconds = 0;
};

/// Runs a command and waits for it. `on_output` gets each complete line of standard output, or,
/// when it is empty, the output is collected. A TERM, INT, HUP or QUIT that comes meanwhile ends
/// the child and all it started (by SIGKILL after ten seconds), and then acts on this process as it
/// would have without. One call at a time. Throws kInternal when the command cannot be started. A
/// child ended by signal S reports exit code 128 + S.
Outcome run_command(const std::vector<std::string>& command,
                    const std::vector<std::string>& extra_environment = {},
                    const std::function<void(std::string_view line)>& on_output = {});

/// Runs `lockstep ARGUMENTS` on `ranks` ranks with mpirun: oversubscribed where needed, unbound, as
/// root where the user is root, with `threads` compute threads each (0: cores / ranks). Throws
/// kConfig when there is no mpirun, kMesh for far more ranks than this machine can hold.
Outcome run_ranks(int64_t ranks,
                  const std::vector<std::string>& arguments,
                  const std::function<void(std::string_view line)>& on_output = {},
                  int64_t threads = 0);

/// "mpirun (Open MPI) 4.1.4"; empty when there is no mpirun.
std::string mpi_version();

/// The mpirun line that run_ranks uses, without the program.
std::vector<std::string> mpirun_command(int64_t ranks);

/// The part of a launcher's error output that our own ranks wrote, and which rank a signal ended:
/// the rest of mpirun's banner is left out, and what several ranks said alike appears once.
std::string own_errors(std::string_view errors);

}  // namespace lockstep::harness
