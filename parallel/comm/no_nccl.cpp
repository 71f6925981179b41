// Stands in for NCCL where it was not found when Lockstep was built.
#include "model/base/error.hpp"
#include "parallel/comm/transport.hpp"

namespace lockstep::parallel {

std::string nccl_missing() {
  return "this Lockstep was built without NCCL, since nccl.h or the CUDA runtime was not found; "
         "install the CUDA toolkit and NCCL's header and configure again with -DLOCKSTEP_NCCL=ON, "
         "or use --comm mpi";
}

std::unique_ptr<Transport> nccl_transport(NcclPlace place, bool host_memory) {
  (void)host_memory;
  fail(ErrorKind::kConfig, "group {}: {}", place.name, nccl_missing());
}

void nccl_abort_all() noexcept {}
void nccl_close_all() noexcept {}

}  // namespace lockstep::parallel
