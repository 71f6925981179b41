// NCCL's functions, found when first needed: the library is large, and a program that runs without
// a GPU should neither load nor require it. Included by this room's NCCL sources only.
#pragma once

#include <nccl.h>

#include <string>

#include "parallel/comm/transport.hpp"

namespace lockstep::parallel {

struct NcclApi {
  decltype(&::ncclGetVersion) get_version = nullptr;
  decltype(&::ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&::ncclCommInitRankConfig) init_rank = nullptr;
  decltype(&::ncclCommGetAsyncError) async_error = nullptr;
  decltype(&::ncclCommFinalize) finalize = nullptr;
  decltype(&::ncclCommDestroy) destroy = nullptr;
  decltype(&::ncclCommAbort) abort = nullptr;
  decltype(&::ncclGroupStart) group_start = nullptr;
  decltype(&::ncclGroupEnd) group_end = nullptr;
  decltype(&::ncclSend) send = nullptr;
  decltype(&::ncclRecv) receive = nullptr;
  decltype(&::ncclAllGather) all_gather = nullptr;
  decltype(&::ncclBroadcast) broadcast = nullptr;
  decltype(&::ncclGetErrorString) error_string = nullptr;
  decltype(&::ncclGetLastError) last_error = nullptr;
};

/// Null, with `why` set, where the library cannot be loaded. It is looked for at
/// LOCKSTEP_NCCL_LIBRARY of the environment, where it was when Lockstep was configured, and where
/// the loader looks.
const NcclApi* nccl_api(std::string* why = nullptr);

/// Throws TransportError unless the result is success, or "in progress" of a call that does not
/// block.
void check_nccl(ncclResult_t result, const char* call);

}  // namespace lockstep::parallel
