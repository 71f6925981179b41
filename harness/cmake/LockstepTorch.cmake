# LibTorch from the Python wheel, taken as imported libraries: the wheel's own CMake package stops where no CUDA toolkit is
# installed, and Lockstep has to build there too.
set(LOCKSTEP_TORCH_DIR "" CACHE PATH "The wheel's torch folder (holds include/ and lib/); empty: looked for")
if(NOT LOCKSTEP_TORCH_DIR)
  set(_cache $ENV{LOCKSTEP_CACHE})
  if(NOT _cache)
    set(_cache $ENV{HOME}/.cache/lockstep)
  endif()
  file(GLOB _found ${_cache}/torch-2.11.0/lib/python3*/site-packages/torch)
  if(_found)
    list(GET _found 0 _torch)
  else()
    execute_process(COMMAND python3 -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
                    OUTPUT_VARIABLE _torch OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  set(LOCKSTEP_TORCH_DIR "${_torch}" CACHE PATH "The wheel's torch folder (holds include/ and lib/)" FORCE)
endif()
if(NOT EXISTS "${LOCKSTEP_TORCH_DIR}/include/ATen/ATen.h")
  message(FATAL_ERROR "LibTorch not found (looked at '${LOCKSTEP_TORCH_DIR}'). Run scripts/setup, which installs torch==2.11.0 "
                      "into the cache, or pass -DLOCKSTEP_TORCH_DIR=<site-packages>/torch.")
endif()
message(STATUS "LibTorch: ${LOCKSTEP_TORCH_DIR}")

add_library(lockstep_torch INTERFACE)
target_include_directories(lockstep_torch SYSTEM INTERFACE
  ${LOCKSTEP_TORCH_DIR}/include ${LOCKSTEP_TORCH_DIR}/include/torch/csrc/api/include)
target_link_directories(lockstep_torch INTERFACE ${LOCKSTEP_TORCH_DIR}/lib)
# libtorch_cpu exports its own, older std::filesystem, parts of which (remove_all) jump to address 0. The C++ library must be
# searched first, so it is named first.
target_link_libraries(lockstep_torch INTERFACE
  -Wl,--no-as-needed -lstdc++ ${LOCKSTEP_TORCH_DIR}/lib/libtorch_cpu.so ${LOCKSTEP_TORCH_DIR}/lib/libc10.so -Wl,--as-needed)
# Own loops run on the threads of the OpenMP library that LibTorch brings; a second one would be a second set of threads.
file(GLOB _gomp ${LOCKSTEP_TORCH_DIR}/lib/libgomp*.so*)
if(NOT _gomp)
  message(FATAL_ERROR "No libgomp in ${LOCKSTEP_TORCH_DIR}/lib: this LibTorch has other threads than OpenMP's, or another "
                      "OpenMP. Take the wheel that scripts/setup installs.")
endif()
list(GET _gomp 0 LOCKSTEP_GOMP)
target_link_libraries(lockstep_torch INTERFACE ${LOCKSTEP_GOMP})
target_link_options(lockstep_torch INTERFACE -Wl,-rpath,${LOCKSTEP_TORCH_DIR}/lib -Wl,--allow-shlib-undefined)
