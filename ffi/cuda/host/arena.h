// An arena: a block of memory that all ranks of a group reach (common/layout.h says what lies in it). A process has one
// for every device and every group that the device is a rank of (cuda/host/arenas.h); all layers and all programs of
// the group use it, one launch after the other.
//
// An arena is claimed by one thread at a time; where other ranks are involved, a thread that finds it claimed gets an
// error instead of waiting.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "common/activation.h"
#include "common/layout.h"
#include "common/shape.h"
#include "common/timeline.h"
#include "cuda/host/notes.h"
#include "cuda/host/gpu.h"
#include "cuda/host/launch.h"
#include "cuda/host/meeting.h"
#include "cuda/host/symmetric_memory.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe {

// A call on one device.
struct ArenaCall {
  LaunchSizes sizes;
  LaunchArrays arrays;
  Activation activation;
  bool power_of_two_scales;
  // Of a call that runs beside the program (Gpu::start): its arrays; empty: it is a part of the program.
  std::vector<const void*> beside{};
  double timeout_seconds;
  cudaStream_t stream;
  // On the GPU; its rank is compared with that of the arena when it has been read. Null: it is not compared.
  const int32_t* place;
};

class Arena {
 public:
  Arena(int32_t device, int32_t ranks, int32_t rank)
      : device_(device), gpu_(Gpu::of(device)), ranks_(ranks), rank_(rank) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  int32_t rank() const { return rank_; }

  // Whether a launch of these sizes finds room.
  bool holds(const LaunchSizes& sizes);

  // Makes the arena large enough for launches of these sizes. Collective where it is not: all ranks have the same sizes
  // and the same history, so all of them come here together. Waits for the work of this device then, and for the other
  // ranks at each step as long as `link` allows.
  xla::ffi::Error reserve(const Link& link, const LaunchSizes& sizes);

  // Launches the kernel of a call after the last launch on this GPU, whatever stream that was on. Neither allocates nor
  // waits. What the program enqueues on its own stream afterwards comes after the kernel, unless that runs beside.
  xla::ffi::Error launch(const ArenaCall& call);

  // What a launch on this arena has found wrong so far; empty where none has. Does not wait.
  std::string failure();

  // What the last launch recorded; nothing where there was none, or where the kernel is compiled without a timeline.
  // Waits for that launch.
  xla::ffi::ErrorOr<std::optional<LaunchTimeline>> timeline();

 private:
  // In host memory that the GPU writes.
  struct Report {
    FailureRecord failure;
    int32_t place = kNoPlace;  // of this rank in its group, as the program sees it
  };
  static constexpr int32_t kNoPlace = -1;

  xla::ffi::Error claim(std::unique_lock<std::mutex>* lock);
  xla::ffi::Error usable();
  xla::ffi::Error make_room(const Link& link, const LaunchSizes& sizes);  // reserve(), of who has claimed it
  xla::ffi::Error prepare_launches();
  xla::ffi::Error reserve_timeline(const LaunchSizes& sizes);
  xla::ffi::Error replace_memory(const Link& link, const WantedArena& wanted, const Schedule& schedule,
                                 int64_t ring_bytes);
  void offer(const HeadCapacity& head, int64_t bytes);

  const int32_t device_;
  Gpu& gpu_;
  const int32_t ranks_;
  const int32_t rank_;
  std::mutex claimed_;
  SharedMemory memory_;
  int64_t body_bytes_ = 0;
  xla::ffi::Error shortage_ = xla::ffi::Error::Success();  // why the last reserve() made no room
  cudaStream_t program_stream_ = nullptr;  // of the program that was initialized last
  std::byte* timeline_ = nullptr;          // in memory of the GPU
  int32_t timeline_blocks_ = 0;            // that it has room for
  int32_t launch_blocks_ = 0;              // that the last launch had; none: 0
  bool launch_backward_ = false;           // whether it was one of a backward pass
  int64_t launches_ = 0;

  std::mutex state_mutex_;  // of what follows, which other threads look at
  HeadCapacity head_{};     // that launches can have, in so many bytes; nothing while memory is replaced
  int64_t bytes_ = 0;
  Report* report_ = nullptr;
  double timeout_seconds_ = 0;  // of the last launch
  std::string failure_;
};

}  // namespace jaxmoe
