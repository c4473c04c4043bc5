// Records what the roles of a block do when (common/timeline.h). Without Variant::config.timeline everything here is
// empty, and the kernel's machine code is that of a kernel without it.
//
// Every track has one thread that records. mark(kind) says what the time since that thread's last mark went into, so
// that the events of a track leave no gap; start() begins anew. What has to be remembered from one mark to the next
// lies in shared memory: the roles have no registers for it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/scheduler.h"
#include "common/timeline.h"
#include "cuda/device/ptx/special_registers.cuh"

namespace jaxmoe {
// In shared memory.
template <bool kOn>
struct TimelineStorage {};
template <>
struct TimelineStorage<true> {
  uint64_t since[kBlockTracks];     // when the running event began; 0 where a track has none
  uint32_t stalled[kBlockTracks];   // ticks of it, see stall()
  uint32_t recorded[kBlockTracks];
};

// A track as its threads see it. Of every kThreads neighbouring ones the first records.
template <bool kOn, int kThreads>
class TimelineTrack {
 public:
  static constexpr bool kRecords = false;
  __device__ void start() const {}
  __device__ void mark(EventKind, const EventSubject& = {}) const {}
  __device__ void mark(EventKind, const Task&) const {}
  __device__ void finish(EventKind, const EventSubject&) const {}
  template <class Wait>
  __device__ __forceinline__ void stall(const Wait& wait) const {
    wait();
  }
};

template <int kThreads>
class TimelineTrack<true, kThreads> {
 public:
  static constexpr bool kRecords = true;

  __device__ __forceinline__ TimelineTrack(TimelineStorage<true>& storage, std::byte* const& buffer, int32_t track)
      : storage_(storage), buffer_(buffer), track_(track) {}

  // An event begins now, whatever came before.
  __device__ __forceinline__ void start() const {
    if (!records()) return;
    storage_.since[track_] = ptx::clock_ticks();
    storage_.stalled[track_] = 0;
  }

  // What has passed since start() or the last mark was this.
  __device__ __forceinline__ void mark(EventKind kind, const EventSubject& subject = {}) const {
    if (records()) write(kind, subject);
  }
  __device__ __forceinline__ void mark(EventKind kind, const Task& task) const {
    mark(kind, EventSubject{task.expert, task.row_tile, task.column_tile});
  }

  // The same, and no event follows until start(). Nothing where none was started.
  __device__ __forceinline__ void finish(EventKind kind, const EventSubject& subject) const {
    if (!records() || storage_.since[track_] == 0) return;
    write(kind, subject);
    storage_.since[track_] = 0;
  }

  // Waits, and notes how long that was in the running event.
  template <class Wait>
  __device__ __forceinline__ void stall(const Wait& wait) const {
    const uint32_t begin = ptx::clock_ticks_low();
    wait();
    const uint32_t ticks = ptx::clock_ticks_low() - begin;
    if (ticks > kNoWaitTicks && records()) atomicAdd(&storage_.stalled[track_], ticks);
  }

 private:
  // Asked anew every time: nothing of the timeline shall take a register from one event to the next.
  static __device__ __forceinline__ bool records() {
    if constexpr (kThreads == 1) return true;
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread % kThreads == 0;
  }

  // A wait that finds what it waits for takes fewer.
  static constexpr uint32_t kNoWaitTicks = 64;

  __device__ __forceinline__ void write(EventKind kind, const EventSubject& subject) const {
    const uint64_t end = ptx::clock_ticks();
    const uint32_t nth = storage_.recorded[track_]++;
    if (nth < kTrackEvents) {
      auto* events = reinterpret_cast<TimelineEvent*>(buffer_ + timeline_events_offset(ptx::read_blocks())) +
                     (int64_t{blockIdx.x} * kBlockTracks + track_) * kTrackEvents;
      events[nth] = {storage_.since[track_],
                     end,
                     static_cast<int16_t>(kind),
                     static_cast<int16_t>(subject.expert),
                     subject.row_tile,
                     subject.part,
                     storage_.stalled[track_]};
    }
    storage_.since[track_] = end;
    storage_.stalled[track_] = 0;
  }

  TimelineStorage<true>& storage_;
  std::byte* const& buffer_;  // where the launch's parameters have it: no register is held for it
  const int32_t track_;
};

template <bool kOn>
class Timeline {
 public:
  __device__ Timeline(TimelineStorage<kOn>&, std::byte* const&) {}
  template <int kThreads>
  __device__ TimelineTrack<kOn, kThreads> track(TrackRole, int32_t = 0) const {
    return {};
  }
  __device__ void begin() const {}
  __device__ void end() const {}
};

template <>
class Timeline<true> {
 public:
  __device__ __forceinline__ Timeline(TimelineStorage<true>& storage, std::byte* const& buffer)
      : storage_(storage), buffer_(buffer) {}

  template <int kThreads>
  __device__ __forceinline__ TimelineTrack<true, kThreads> track(TrackRole role, int32_t nth = 0) const {
    return {storage_, buffer_, first_track_of(role) + nth};
  }

  // Before anything is recorded, and a barrier of the block ahead of what other threads than the first record.
  __device__ void begin() const {
    if (threadIdx.x != 0) return;
    for (int32_t track = 0; track < kBlockTracks; ++track) storage_.since[track] = storage_.recorded[track] = 0;
    TimelineBlock& block = this_block();
    block.sm = ptx::sm_index();
    read_clocks(block.begin_ticks, block.begin_ns);
  }

  // A barrier of the block after all that was recorded.
  __device__ void end() const {
    if (threadIdx.x != 0) return;
    TimelineBlock& block = this_block();
    read_clocks(block.end_ticks, block.end_ns);
    for (int32_t track = 0; track < kBlockTracks; ++track) block.recorded[track] = storage_.recorded[track];
  }

 private:
  // Both at a moment when the timer moves: its steps may be long.
  static __device__ void read_clocks(uint64_t& ticks, uint64_t& ns) {
    const uint64_t before = ptx::nanoseconds();
    do {
      ns = ptx::nanoseconds();
    } while (ns == before);
    ticks = ptx::clock_ticks();
  }

  __device__ TimelineBlock& this_block() const {
    return reinterpret_cast<TimelineBlock*>(buffer_)[blockIdx.x];
  }

  TimelineStorage<true>& storage_;
  std::byte* const& buffer_;  // where the launch's parameters have it: no register is held for it
};

}  // namespace jaxmoe
