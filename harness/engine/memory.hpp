// Memory of this process.
#pragma once

#include <cstdint>

namespace lockstep::harness {

/// High-water mark of resident bytes.
int64_t peak_rss_bytes();

}  // namespace lockstep::harness
