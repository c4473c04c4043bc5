// The arenas of this process: for every device and every group that the device is a rank of, one block of memory that
// all ranks of the group reach (common/layout.h says what lies in it). All layers and all programs of a group use the
// same arena, one launch after the other. Caller: cuda/layer_handler.cu.
//
// A group is known by its GPUs in the order of their ranks. XLA may hand out several communicators for one group, one
// after the other, and the same numbers of devices can stand for other devices in another program, so neither names it.
//
// Locks: the table of arenas has a mutex that is never held while anything waits. An arena is claimed by one thread at
// a time; where other ranks are involved, a thread that finds it claimed gets an error instead of waiting.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/layout.h"
#include "common/shape.h"
#include "common/timeline.h"
#include "cuda/exchange.h"
#include "cuda/kernel/params.cuh"
#include "cuda/launch.h"
#include "cuda/symmetric_memory.h"
#include "cuda/tensor_map.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe {

class Arena {
 public:
  Arena(int32_t device, int32_t ranks, int32_t rank) : device_(device), ranks_(ranks), rank_(rank) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Makes the arena large enough for launches of these sizes. Collective where it is not: all ranks have the same sizes
  // and the same history, so all of them come here together. Waits for the work of this device then. The stream of
  // `link` is the one on which the program's own kernels run.
  xla::ffi::Error reserve(const Link& link, const Shape& shape, const Schedule& schedule, int32_t itemsize);

  // Launches the kernel of a pass after the last launch on this arena, whatever stream that was on. `params` has
  // everything that does not depend on the arena. Neither allocates nor waits. What the program enqueues on its own
  // stream afterwards comes after the kernel.
  template <class Params>
  xla::ffi::Error launch(Params* params, ElementType type, const Weights& weights, int32_t itemsize,
                         cudaStream_t stream);

  // What the last launch recorded; nothing where there was none, or where the kernel is compiled without a timeline.
  // Waits for that launch.
  xla::ffi::ErrorOr<std::optional<LaunchTimeline>> timeline();

 private:
  bool holds(const Shape& shape, const Schedule& schedule, int32_t itemsize) const;
  xla::ffi::Error claim(std::unique_lock<std::mutex>* lock);
  xla::ffi::Error failure();
  xla::ffi::Error prepare_launches();
  xla::ffi::Error reserve_timeline(const Schedule& schedule);
  xla::ffi::Error replace_memory(const Link& link, int64_t bytes, const Schedule& schedule, int64_t ring_bytes);
  xla::ffi::Error meet(const Link& link, const char* step, int64_t bytes, bool succeeded, std::vector<Note>* notes);

  const int32_t device_;
  const int32_t ranks_;
  const int32_t rank_;
  std::mutex claimed_;
  SharedMemory memory_;
  HeadCapacity head_{};
  int64_t body_bytes_ = 0;
  cudaEvent_t last_launch_ = nullptr;
  cudaStream_t last_stream_ = nullptr;
  cudaStream_t program_stream_ = nullptr;  // of the program that was initialized last
  double timeout_seconds_ = 0;             // of the last launch
  FailureRecord* failure_record_ = nullptr;  // in host memory; written by the kernel
  std::string failure_text_;               // not empty: a launch has failed
  std::byte* timeline_ = nullptr;          // in memory of the GPU
  int32_t timeline_blocks_ = 0;            // that it has room for
  int32_t launch_blocks_ = 0;              // that the last launch had; none: 0
  bool launch_backward_ = false;           // whether it was one of a backward pass
  int64_t launches_ = 0;
};

// The arena of the current device `device` in the group that `link` leads to. Collective.
xla::ffi::ErrorOr<Arena*> find_arena(int32_t device, const Link& link);

}  // namespace jaxmoe
