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

# NCCL: its header and the CUDA runtime are needed to build, the library itself only to run (it is loaded when asked for). The torch
# wheel brings one.
set(LOCKSTEP_NCCL AUTO CACHE STRING "AUTO: build communication over NCCL when nccl.h and the CUDA runtime are found; ON; OFF")
set(LOCKSTEP_NCCL_PARTS "")
add_library(lockstep_nccl INTERFACE)
if(NOT LOCKSTEP_NCCL STREQUAL "OFF" AND NOT LOCKSTEP_CUDA STREQUAL "OFF")
  find_package(CUDAToolkit QUIET)
  find_path(LOCKSTEP_NCCL_INCLUDE nccl.h HINTS ${LOCKSTEP_TORCH_DIR}/../nvidia/nccl/include ${CUDAToolkit_INCLUDE_DIRS})
  find_file(LOCKSTEP_NCCL_LIBRARY libnccl.so.2 HINTS ${LOCKSTEP_TORCH_DIR}/../nvidia/nccl/lib PATH_SUFFIXES lib lib64)
  if(TARGET CUDA::cudart_static AND LOCKSTEP_NCCL_INCLUDE)
    set(LOCKSTEP_NCCL_PARTS nccl)
    target_include_directories(lockstep_nccl SYSTEM INTERFACE ${LOCKSTEP_NCCL_INCLUDE} ${CUDAToolkit_INCLUDE_DIRS})
    target_link_libraries(lockstep_nccl INTERFACE CUDA::cudart_static ${CMAKE_DL_LIBS})
    if(LOCKSTEP_NCCL_LIBRARY)
      target_compile_definitions(lockstep_nccl INTERFACE LOCKSTEP_NCCL_LIBRARY="${LOCKSTEP_NCCL_LIBRARY}")
    endif()
    message(STATUS "NCCL: header in ${LOCKSTEP_NCCL_INCLUDE}, library ${LOCKSTEP_NCCL_LIBRARY}")
  elseif(LOCKSTEP_NCCL STREQUAL "ON")
    message(FATAL_ERROR "LOCKSTEP_NCCL=ON, but nccl.h ('${LOCKSTEP_NCCL_INCLUDE}') or the CUDA runtime of a toolkit "
                        "('${CUDAToolkit_LIBRARY_DIR}') was not found; set LOCKSTEP_NCCL_INCLUDE and CUDAToolkit_ROOT.")
  else()
    message(STATUS "NCCL: not built in (nccl.h or the CUDA runtime is missing)")
  endif()
endif()
