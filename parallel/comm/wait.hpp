// Waiting for an MPI request with a deadline. Included by this room's sources only.
#pragma once

#include <mpi.h>

#include <string>
#include <string_view>

#include "parallel/comm/group.hpp"

namespace lockstep::parallel {

struct GroupImpl {
  MPI_Comm comm = MPI_COMM_NULL;  // MPI_COMM_NULL: a group of one without MPI
  bool owned = false;
  int rank = 0, size = 1;
  std::string name = "single";

  GroupImpl() = default;
  GroupImpl(const GroupImpl&) = delete;
  GroupImpl& operator=(const GroupImpl&) = delete;
  ~GroupImpl() {
    int finalized = 0;
    if (owned && comm != MPI_COMM_NULL && MPI_Finalized(&finalized) == MPI_SUCCESS &&
        finalized == 0)
      MPI_Comm_free(&comm);
  }
};

/// "group cp rank 0 of 2: layer 3 kda state", the beginning of every message.
std::string where(const GroupImpl& g, std::string_view what);

/// Throws kComm with MPI's own words unless `code` is success.
void check(int code, const GroupImpl& g, std::string_view what, std::string_view call);

/// Polls until the request ends. Throws kComm when the deadline passes, naming the ranks that keep
/// it from ending and what they do. `peer` is the rank waited for, -1 in a collective.
void wait(MPI_Request& request,
          const GroupImpl& g,
          std::string_view what,
          std::string_view call,
          int peer = -1);

}  // namespace lockstep::parallel
