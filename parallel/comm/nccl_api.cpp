#include "parallel/comm/nccl_api.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <vector>

#ifndef LOCKSTEP_NCCL_LIBRARY
#define LOCKSTEP_NCCL_LIBRARY ""
#endif

namespace lockstep::parallel {
namespace {

struct Loaded {
  NcclApi api;
  bool usable = false;
  std::string why;
};

template <typename Function>
bool find(void* library, const char* name, Function& into) {
  into = reinterpret_cast<Function>(dlsym(library, name));
  return into != nullptr;
}

bool fill(void* lib, NcclApi& api) {
  return find(lib, "ncclGetVersion", api.get_version) &&
         find(lib, "ncclGetUniqueId", api.get_unique_id) &&
         find(lib, "ncclCommInitRankConfig", api.init_rank) &&
         find(lib, "ncclCommGetAsyncError", api.async_error) &&
         find(lib, "ncclCommFinalize", api.finalize) && find(lib, "ncclCommDestroy", api.destroy) &&
         find(lib, "ncclCommAbort", api.abort) && find(lib, "ncclGroupStart", api.group_start) &&
         find(lib, "ncclGroupEnd", api.group_end) && find(lib, "ncclSend", api.send) &&
         find(lib, "ncclRecv", api.receive) && find(lib, "ncclAllGather", api.all_gather) &&
         find(lib, "ncclBroadcast", api.broadcast) &&
         find(lib, "ncclGetErrorString", api.error_string) &&
         find(lib, "ncclGetLastError", api.last_error);
}

Loaded load() {
  Loaded loaded;
  std::vector<std::string> places;
  if (const char* chosen = std::getenv("LOCKSTEP_NCCL_LIBRARY")) {
    places.emplace_back(chosen);
  } else {
    if (*LOCKSTEP_NCCL_LIBRARY != '\0') places.emplace_back(LOCKSTEP_NCCL_LIBRARY);
    places.emplace_back("libnccl.so.2");
  }
  for (const std::string& place : places) {
    void* library = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* error = dlerror();
      loaded.why = fmt::format(
          "NCCL cannot be loaded from {} ({}); install NCCL or set "
          "LOCKSTEP_NCCL_LIBRARY to its libnccl.so.2",
          place,
          error == nullptr ? "no reason given" : error);
      continue;
    }
    int version = 0;
    loaded.usable = fill(library, loaded.api) && loaded.api.get_version(&version) == ncclSuccess &&
                    version >= 21400;
    if (loaded.usable) return loaded;
    loaded.why = fmt::format(
        "{} is NCCL {}; 2.14 is the oldest with calls that do not block", place, version);
  }
  return loaded;
}

}  // namespace

const NcclApi* nccl_api(std::string* why) {
  static const Loaded loaded = load();
  if (why != nullptr) *why = loaded.why;
  return loaded.usable ? &loaded.api : nullptr;
}

void check_nccl(ncclResult_t result, const char* call) {
  if (result == ncclSuccess || result == ncclInProgress) return;
  const NcclApi* api = nccl_api();
  const char* detail = api->last_error(nullptr);
  throw TransportError(fmt::format("NCCL {} failed: {}{}{}",
                                   call,
                                   api->error_string(result),
                                   detail == nullptr || *detail == '\0' ? "" : ": ",
                                   detail == nullptr ? "" : detail));
}

}  // namespace lockstep::parallel
