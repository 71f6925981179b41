# Third-party libraries from the distribution's packages.
find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(MPI REQUIRED COMPONENTS C)
find_package(HDF5 REQUIRED COMPONENTS C)

add_library(lockstep_mpi INTERFACE)
target_link_libraries(lockstep_mpi INTERFACE MPI::MPI_C)
# The C interface only: mpi.h would otherwise drag in the C++ bindings that MPI 3 removed.
target_compile_definitions(lockstep_mpi INTERFACE OMPI_SKIP_MPICXX=1 MPICH_SKIP_MPICXX=1)

add_library(lockstep_hdf5 INTERFACE)
target_include_directories(lockstep_hdf5 SYSTEM INTERFACE ${HDF5_INCLUDE_DIRS})
target_link_libraries(lockstep_hdf5 INTERFACE ${HDF5_C_LIBRARIES})

find_path(LOCKSTEP_TOML_INCLUDE toml++/toml.h REQUIRED)
add_library(lockstep_toml INTERFACE)
target_include_directories(lockstep_toml SYSTEM INTERFACE ${LOCKSTEP_TOML_INCLUDE})

find_path(LOCKSTEP_CLI11_INCLUDE CLI/CLI.hpp REQUIRED)
add_library(lockstep_cli11 INTERFACE)
target_include_directories(lockstep_cli11 SYSTEM INTERFACE ${LOCKSTEP_CLI11_INCLUDE})

find_package(ZLIB REQUIRED)
add_library(lockstep_zlib INTERFACE)
target_link_libraries(lockstep_zlib INTERFACE ZLIB::ZLIB)
