// The ranks a rank test runs on.
#pragma once

#include "parallel/comm/group.hpp"

namespace lockstep::tests {

const parallel::Group& world();

}  // namespace lockstep::tests
