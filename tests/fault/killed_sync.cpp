// Ranks that bring weights into an engine, of which the last is killed in the middle. Usage: mpirun
// -n N killed_sync FOLDER. Ranks that live to tell write told.RANK: exit code of the sync, its
// message, and what the engine then says.
#include <csignal>
#include <string>

#include "harness/inference/inference.hpp"
#include "harness/sync/weight_sync.hpp"
#include "harness/trainer/trainer.hpp"
#include "tests/fault/kinds.hpp"
#include "tests/fault/leave.hpp"
#include "tests/support/tiny_model.hpp"

namespace lockstep::tests {
namespace {

int run(const std::string& folder) {
  parallel::Session session = parallel::Session::start(nullptr, nullptr);
  const parallel::Group& world = session.world();
  const int64_t n = world.size();
  const parallel::Mesh from = parallel::Mesh::create(world, {.fsdp = n}),
                       to = parallel::Mesh::create(world, {.tp = n});
  const model::Numerics num = model::Numerics::policy("float32");
  harness::TrainerOptions training;
  training.numerics = num;
  const harness::Trainer trainer(tiny(), training, from);
  harness::InferenceOptions serving;
  serving.numerics = num;
  harness::Inference engine(tiny(), serving, to);
  const std::vector<int64_t> ranks = harness::consecutive_ranks(0, n);
  harness::WeightSync sync(
      world,
      {tiny()->config(), num, num, from.topology(), to.topology(), ranks, ranks},
      {.bucket_bytes = 1 << 15, .progress = [&](int64_t bucket, int64_t buckets) {
         if (bucket == buckets / 2 && world.rank() == n - 1) std::raise(SIGKILL);
       }});
  const std::vector<harness::OfferedTensor> offered = sync.offer(trainer.shards());
  parallel::set_comm_timeout_ms(kFarDeadlineMs);
  int code = 0;
  std::string message = "no error", served = "no error";
  try {
    sync.run(2, offered, &engine.weights());
  } catch (const Error& error) {
    code = exit_code(error.kind());
    message = error.what();
  }
  try {
    engine.weights().check();
  } catch (const Error& error) {
    served = error.what();
  }
  tell_and_leave(folder, world.rank(), code, {message, served});
}

}  // namespace
}  // namespace lockstep::tests

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  return lockstep::tests::run(argv[1]);
}
