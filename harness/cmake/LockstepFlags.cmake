# The only place for warning and floating-point flags.
add_library(lockstep_warnings INTERFACE)
target_compile_options(lockstep_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wconversion -Wdouble-promotion -Werror>)

# No fast-math anywhere. Contraction is off, so that a*b+c rounds twice unless the source says std::fma: what a file
# computes does not depend on what the compiler felt like fusing.
add_library(lockstep_numerics INTERFACE)
target_compile_options(lockstep_numerics INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off -fno-fast-math -march=${LOCKSTEP_MARCH}>)

if(CMAKE_BUILD_TYPE STREQUAL "Release")
  set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")
endif()
if(LOCKSTEP_SANITIZE)
  add_compile_options(-fsanitize=${LOCKSTEP_SANITIZE} -fno-omit-frame-pointer -O1)
  add_link_options(-fsanitize=${LOCKSTEP_SANITIZE})
endif()
