# Writes build_facts.cpp (version, commit, -march, build type) into the build folder. Included by CMakeLists.txt it adds a step to
# every build that asks git again and rewrites the file only when something changed; run as a script it is that step.
if(CMAKE_SCRIPT_MODE_FILE)
  execute_process(COMMAND git -C ${SOURCE_DIR} describe --always --dirty --abbrev=12 --exclude=*
                  OUTPUT_VARIABLE COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  configure_file(${SOURCE_DIR}/harness/cmake/build_facts.cpp.in ${OUTPUT} @ONLY)
  return()
endif()

function(lockstep_build_facts target)
  set(output ${CMAKE_BINARY_DIR}/generated/build_facts.cpp)
  add_custom_target(build_facts
    COMMAND ${CMAKE_COMMAND} -DSOURCE_DIR=${PROJECT_SOURCE_DIR} -DOUTPUT=${output} -DVERSION=${PROJECT_VERSION}
            -DMARCH=${LOCKSTEP_MARCH} -DTYPE=${CMAKE_BUILD_TYPE} -P ${PROJECT_SOURCE_DIR}/harness/cmake/LockstepBuildFacts.cmake
    BYPRODUCTS ${output}
    COMMENT "")
  set_source_files_properties(${output} PROPERTIES GENERATED ON SKIP_PRECOMPILE_HEADERS ON)
  target_sources(${target} PRIVATE ${output})
  add_dependencies(${target} build_facts)
endfunction()
