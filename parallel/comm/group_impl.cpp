#include "parallel/comm/group_impl.hpp"

#include <utility>

#include "parallel/comm/mpi_transport.hpp"

namespace lockstep::parallel {
namespace {

CommBackend g_backend = CommBackend::kMpi;

int rank_of(MPI_Comm comm) {
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  return rank;
}

int size_of(MPI_Comm comm) {
  int size = 1;
  MPI_Comm_size(comm, &size);
  return size;
}

}  // namespace

void set_comm_backend(CommBackend chosen) {
  if (chosen == CommBackend::kNccl) {
    const std::string missing = nccl_missing();
    LOCKSTEP_CHECK(missing.empty(), kConfig, "communication over NCCL: {}", missing);
  }
  g_backend = chosen;
}
CommBackend comm_backend() { return g_backend; }

CommBackend comm_backend_from_string(std::string_view name) {
  if (name == "mpi") return CommBackend::kMpi;
  if (name == "nccl") return CommBackend::kNccl;
  fail(ErrorKind::kInput, "communication backend '{}': mpi and nccl are known", name);
}

GroupImpl::GroupImpl() : name("single"), world_ranks{0}, ledger(name, 1) {}

GroupImpl::GroupImpl(MPI_Comm comm_in, bool owned_in, uint64_t key_in, std::string name_in)
    : comm(comm_in),
      owned(owned_in),
      rank(rank_of(comm_in)),
      size(size_of(comm_in)),
      key(key_in),
      name(std::move(name_in)),
      host(mpi_transport(comm_in)),
      ledger(name, size) {
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  MPI_Group own = MPI_GROUP_NULL, world = MPI_GROUP_NULL;
  MPI_Comm_group(comm, &own);
  MPI_Comm_group(MPI_COMM_WORLD, &world);
  std::vector<int> ranks(static_cast<size_t>(size));
  for (int r = 0; r < size; ++r) ranks[static_cast<size_t>(r)] = r;
  world_ranks.resize(ranks.size());
  MPI_Group_translate_ranks(own, size, ranks.data(), world, world_ranks.data());
  MPI_Group_free(&own);
  MPI_Group_free(&world);
}

GroupImpl::~GroupImpl() {
  int finalized = 0;
  if (owned && comm != MPI_COMM_NULL && MPI_Finalized(&finalized) == MPI_SUCCESS && finalized == 0)
    MPI_Comm_free(&comm);
}

Transport& GroupImpl::nccl(bool host_memory) const {
  std::unique_ptr<Transport>& kept = host_memory ? nccl_host : nccl_device;
  if (!kept) kept = nccl_transport({name, world_ranks, rank, host.get()}, host_memory);
  return *kept;
}

}  // namespace lockstep::parallel
