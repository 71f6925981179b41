// Ranks that save a checkpoint, of which one is killed in the middle of the next save: pwrite,
// fsync and rename of this program stand in front of the C library's and send SIGKILL to their own
// process. Usage: [mpirun -n N] killed_save head|write|sync|rename FOLDER. Leaves step-1,
// step-1.expected.safetensors with its weights, and what the killed save left of step-2; ranks that
// live to tell write told.RANK: exit code, message.
#include "tests/fault/killed_save.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <string>
#include <string_view>

#include "harness/trainer/trainer.hpp"
#include "model/checkpoint/safetensors.hpp"
#include "parallel/comm/group.hpp"
#include "tests/fault/leave.hpp"

namespace {

/// Calls still to come before the one that kills; negative: none will.
int g_writes_left = -1, g_syncs_left = -1;
bool g_no_rename = false;

bool is_due(int& left) { return left >= 0 && left-- == 0; }
void die() { ::kill(::getpid(), SIGKILL); }

}  // namespace

extern "C" {

ssize_t pwrite(int fd, const void* data, size_t bytes, off_t at) {
  const bool due = is_due(g_writes_left);
  const ssize_t done = ::syscall(SYS_pwrite64, fd, data, due ? bytes / 2 : bytes, at);
  if (due) die();
  return done;
}

int fsync(int fd) {
  if (is_due(g_syncs_left)) die();
  return static_cast<int>(::syscall(SYS_fsync, fd));
}

int rename(const char* from, const char* to) noexcept {
  if (g_no_rename && std::string_view(to).ends_with("/step-2")) die();
  return static_cast<int>(::syscall(SYS_rename, from, to));
}
}

namespace lockstep::tests {
namespace {

/// The call of this rank that kills it. Rank 0 makes the files and renames the folder; the last
/// rank writes rows only.
void choose(std::string_view point, const parallel::Group& world) {
  const bool first = world.rank() == 0, last = world.rank() == world.size() - 1;
  if (first && point == "head") g_writes_left = 1;
  // After the three heads, where one rank does both.
  if (last && point == "write") g_writes_left = first ? 5 : 2;
  if (last && point == "sync") g_syncs_left = first ? 6 : 1;
  if (first && point == "rename") g_no_rename = true;
}

int run(std::string_view point, const std::string& folder) {
  parallel::Session session = parallel::Session::start(nullptr, nullptr);
  const parallel::Group& world = session.world();
  const parallel::Mesh mesh = world.size() == 1
                                  ? parallel::Mesh::single()
                                  : parallel::Mesh::create(world, {.fsdp = world.size()});
  harness::Trainer trainer(tiny(), killed_save_options(), mesh);
  trainer.train_step({tiny_documents({33, 1, 12, 25}, 1)});
  trainer.save(folder + "/step-1");
  const std::map<std::string, Tensor> weights = trainer.weights();
  if (world.rank() == 0)
    model::write_safetensors_file(folder + "/step-1.expected.safetensors", weights);
  trainer.train_step({tiny_documents({33, 1, 12, 25}, 2)});
  world.barrier("next save");
  parallel::set_comm_timeout_ms(kDeadlineMs);
  choose(point, world);
  int code = 0;
  std::string message = "no error";
  try {
    trainer.save(folder + "/step-2");
  } catch (const Error& error) {
    code = exit_code(error.kind());
    message = error.what();
  }
  tell_and_leave(folder, world.rank(), code, {message});
}

}  // namespace
}  // namespace lockstep::tests

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  return lockstep::tests::run(argv[1], argv[2]);
}
