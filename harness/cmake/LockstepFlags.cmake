# The only place for warning and floating-point flags.
add_library(lockstep_warnings INTERFACE)
target_compile_options(lockstep_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wconversion -Wdouble-promotion $<$<BOOL:${LOCKSTEP_WERROR}>:-Werror>>)

# No fast-math anywhere. Contraction is off, so that a*b+c rounds twice unless the source says std::fma: what a file
# computes does not depend on what the compiler felt like fusing.
add_library(lockstep_numerics INTERFACE)
target_compile_options(lockstep_numerics INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off -fno-fast-math -march=${LOCKSTEP_MARCH}>)

# Most files only call tensor functions: optimising their template glue costs build time and gains nothing. Loops of our own live
# in files without torch headers, in rooms marked HOT, and get -O3. (The precompiled header fixes one level for all that use it.)
set(CMAKE_CXX_FLAGS_RELEASE "-O1 -DNDEBUG")
set(LOCKSTEP_HOT_FLAGS "")
if(CMAKE_BUILD_TYPE STREQUAL "Release")
  set(LOCKSTEP_HOT_FLAGS "-O3")
endif()
if(LOCKSTEP_SANITIZE)
  add_compile_options(-fsanitize=${LOCKSTEP_SANITIZE} -fno-omit-frame-pointer -O1)
  add_link_options(-fsanitize=${LOCKSTEP_SANITIZE})
  # GCC sees uninitialised members of the standard library in instrumented code.
  target_compile_options(lockstep_warnings INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-maybe-uninitialized>)
endif()
