# Device kernels: model/ops/*.cu, compiled by nvcc for sm_90a. Files without torch headers, so a few seconds to two minutes each.
set(LOCKSTEP_KERNEL_PARTS "")
if(NOT LOCKSTEP_CUDA STREQUAL "OFF")
  find_package(CUDAToolkit QUIET)
  if(CUDAToolkit_NVCC_EXECUTABLE AND (LOCKSTEP_CUDA STREQUAL "ON" OR EXISTS /dev/nvidiactl))
    set(LOCKSTEP_KERNEL_PARTS kernels)
  elseif(LOCKSTEP_CUDA STREQUAL "ON")
    message(FATAL_ERROR "LOCKSTEP_CUDA=ON, but no CUDA toolkit with nvcc was found; set CUDAToolkit_ROOT.")
  endif()
endif()
if(LOCKSTEP_KERNEL_PARTS)
  message(STATUS "Device kernels: ${CUDAToolkit_NVCC_EXECUTABLE}")
else()
  message(STATUS "Device kernels: not built (no CUDA toolkit or no GPU; LOCKSTEP_CUDA=ON builds them without a GPU)")
endif()

# lockstep_kernels(<target> <folder>): the objects of its *.cu become part of the target.
function(lockstep_kernels target folder)
  if(NOT LOCKSTEP_KERNEL_PARTS)
    return()
  endif()
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${folder}/*.cu)
  foreach(source ${sources})
    get_filename_component(name ${source} NAME_WE)
    set(object ${CMAKE_BINARY_DIR}/kernels/${name}.o)
    add_custom_command(
      OUTPUT ${object}
      COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} ${CUDAToolkit_NVCC_EXECUTABLE} -ccbin ${CMAKE_CXX_COMPILER}
              -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++20 -Xcompiler=-fPIC $<$<BOOL:${LOCKSTEP_CUDA_LINEINFO}>:-lineinfo>
              -I${PROJECT_SOURCE_DIR} -MD -MT ${object} -MF ${object}.d -c ${source} -o ${object}
      DEPENDS ${source}
      DEPFILE ${object}.d
      COMMENT "Building device kernels ${name}"
      COMMAND_EXPAND_LISTS VERBATIM)
    target_sources(${target} PRIVATE ${object})
    set_source_files_properties(${object} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
  endforeach()
  file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/kernels)
  target_link_libraries(${target} PRIVATE CUDA::cudart_static)
endfunction()
