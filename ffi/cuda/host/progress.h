// How far this process is with the launches of its layers (cuda/host/gpu.h), for those who know nothing of CUDA.
#pragma once

#include <cstdint>
#include <vector>

namespace jaxmoe {

// On one GPU. A launch may wait for work of the program that comes before it, such as tokens of another host: then
// nothing of ours runs that could say so. jaxmoe/network/roll_call.py does.
struct LaunchProgress {
  int32_t device;
  int64_t enqueued;        // since the process has started
  int64_t waiting;         // number of one that has not ended, counted as they were enqueued; 0 where none is known
  double waiting_seconds;  // since that was enqueued
};

// Of all GPUs of this process. Waits for no GPU, and for no thread that does.
std::vector<LaunchProgress> launch_progress();

}  // namespace jaxmoe
