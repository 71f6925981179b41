// MPI on host memory. Included by this room's sources only.
#pragma once

#include <mpi.h>

#include <memory>

#include "parallel/comm/transport.hpp"

namespace lockstep::parallel {

/// Throws TransportError with MPI's own words unless `code` is success.
void check_mpi(int code, const char* call);

/// The communicator outlives the transport.
std::unique_ptr<Transport> mpi_transport(MPI_Comm comm);

}  // namespace lockstep::parallel
