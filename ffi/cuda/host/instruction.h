// What the handlers of all FFI targets share: an instruction of a program, the devices that run it, and the kernels that
// are loaded there.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "cuda/host/arena.h"
#include "cuda/host/collectives.h"
#include "cuda/host/launch.h"
#include "cuda/host/programs.h"
#include "cuda/host/runs.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe {

// One per instruction of an executable, the same object for all devices that run it. The group of a device is the same
// in all its runs.
class Instruction {
 public:
  static xla::ffi::TypeId id;

  Runs runs;

  // Null where the device has not found its arena yet.
  Arena* arena_of(int device) {
    const std::lock_guard lock(mutex_);
    const auto found = arenas_.find(device);
    return found == arenas_.end() ? nullptr : found->second;
  }
  void remember(int device, Arena* arena) {
    const std::lock_guard lock(mutex_);
    arenas_[device] = arena;
  }

  // Whether `devices` devices have arenas with room for a launch, so that none of them has to meet its group.
  bool is_ready(int32_t devices, const LaunchSizes& sizes) {
    const std::lock_guard lock(mutex_);
    if (static_cast<int32_t>(arenas_.size()) < devices) return false;
    return std::ranges::all_of(arenas_, [&](const auto& of_device) { return of_device.second->holds(sizes); });
  }

  // True once for every device.
  bool is_first_launch(int device) {
    const std::lock_guard lock(mutex_);
    return launched_.insert(device).second;
  }

 private:
  std::mutex mutex_;
  std::map<int, Arena*> arenas_;
  std::set<int> launched_;
};
// How many devices of this process run a program, 0 where that is not known. `devices`: as all processes number them,
// none where Python could not tell; `count`: how many there are in all.
int32_t local_devices(const std::vector<int64_t>& devices, std::size_t count);

// The device of a stream as the CUDA runtime counts; XLA's ordinal counts only the devices that JAX may see.
xla::ffi::ErrorOr<int> device_of(cudaStream_t stream);

// Makes `device` the current one of this thread for a while.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    cudaGetDevice(&previous_);
    if (previous_ != device) cudaSetDevice(device);
    current_ = device;
  }
  ~CurrentDevice() {
    if (previous_ != current_) cudaSetDevice(previous_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int previous_ = 0;
  int current_ = 0;
};

// Sizes with the workers of `device`, which is current, in the place of none; the first call for a kernel loads it.
xla::ffi::ErrorOr<LaunchSizes> with_workers(int device, LaunchSizes sizes);

}  // namespace jaxmoe
