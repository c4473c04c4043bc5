// The timelines of this process's arenas (cuda/host/arena.h), for those who know nothing of CUDA.
#pragma once

#include <vector>

#include "common/timeline.h"

namespace jaxmoe {

// What the last launch on each arena recorded. Waits for those launches; throws std::runtime_error where one cannot be
// read. None where the kernels are compiled without a timeline.
std::vector<LaunchTimeline> arena_timelines();

}  // namespace jaxmoe
