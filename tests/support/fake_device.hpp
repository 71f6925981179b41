// A CUDA device and NCCL made of host memory and MPI messages: programs linked with it take the
// NCCL transport on machines without a GPU, when LOCKSTEP_COMM is nccl and LOCKSTEP_NCCL_LIBRARY is
// set and empty, which the loader takes for the program itself. What it cannot show is how CUDA and
// NCCL themselves behave.
#pragma once

namespace lockstep::tests {

/// From now on communicators report a peer's failure, until called with false.
void break_fake_nccl(bool broken);
/// Communicators that this rank has made so far.
int fake_nccl_communicators();

}  // namespace lockstep::tests
