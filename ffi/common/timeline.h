// The timeline: what every role did when, as events that the GPU kernel (cuda/device/timeline.cuh, where it is compiled
// in) and the host executor (host/timeline.h, where it is switched on) record alike, and that jaxmoe/profiling reads.
//
// A track is a place where one thing happens at a time: a warp of dispatch, a math warpgroup. An event is a stretch of
// a track, and ends where the next one of that track begins. Plain C++20, no CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "common/scheduler.h"
#include "common/shape.h"

namespace jaxmoe {

enum class TrackRole : int32_t { kBlock = 0, kProducer, kDispatch, kMath, kAnswers, kCount };
inline constexpr int32_t kNumTrackRoles = static_cast<int32_t>(TrackRole::kCount);
inline constexpr const char* kTrackRoleNames[kNumTrackRoles] = {"block", "producer", "dispatch", "math", "answers"};

enum class EventKind : int32_t {
  // block: before the roles part
  kCopyInputs = 0,
  kSort,
  kPublish,
  kWaitInputs,
  // producer
  kTakeTask,
  kWaitRows,     // for rows_arrived, before gate/up
  kWaitH,        // for h_written, before down and h_gradient
  kWaitGradients,  // for h_gradients_written, before the other gradients
  kLoadGateUp,
  kLoadDown,
  kLoadGradient,
  // dispatch
  kFindRows,
  kWaitSlot,     // for those that read the tile that had the ring slot
  kDispatch,     // a chunk of rows, from their owners into the ring
  kWaitTasks,    // for tasks_done, by the thread that announces the end of the rank
  // math
  kWaitStages,   // for the first stage of a task, and so for the task
  kGateUp,       // products of a tile, in the order of Gemm
  kDown,
  kHGradient,
  kTokenGradient,
  kGateGradient,
  kUpGradient,
  kDownGradient,
  kNoRows,       // a tile of which this warpgroup has no rows: stages handed on, nothing multiplied
  kEpilogue,
  kWaitAnswers,  // for answers_ready of all ranks
  kCombine,
  // answers: stores of a down tile, from its epilogue until what announces them has been released
  kAnswers,
  kCount
};
inline constexpr int32_t kNumEventKinds = static_cast<int32_t>(EventKind::kCount);

struct EventKindInfo {
  const char* name;
  bool waits;  // for another role, block or rank
};
inline constexpr EventKindInfo kEventKinds[kNumEventKinds] = {
    {"copy_inputs", false},   {"sort", false},           {"publish", false},
    {"wait_inputs", true},    {"take_task", false},      {"wait_rows", true},
    {"wait_h", true},         {"wait_gradients", true},  {"load_gate_up", false},
    {"load_down", false},     {"load_gradient", false},  {"find_rows", false},
    {"wait_slot", true},      {"dispatch", false},       {"wait_tasks", true},
    {"wait_stages", true},    {"gate_up", false},        {"down", false},
    {"h_gradient", false},    {"token_gradient", false}, {"gate_gradient", false},
    {"up_gradient", false},   {"down_gradient", false},  {"no_rows", true},
    {"epilogue", false},      {"wait_answers", true},    {"combine", false},
    {"answers", false}};

// What goes on around a task: the wait before it, its loads, its products.
JAXMOE_ANY constexpr EventKind wait_event_of(const Task& task) {
  if (task.gemm == Gemm::kGateUp) return EventKind::kWaitRows;
  if (task.gemm == Gemm::kHGradient && (task.part & kSavedPart) != 0) return EventKind::kWaitRows;
  return task.gemm == Gemm::kDown || task.gemm == Gemm::kHGradient ? EventKind::kWaitH : EventKind::kWaitGradients;
}
JAXMOE_ANY constexpr EventKind load_event_of(Gemm gemm) {
  if (gemm == Gemm::kGateUp) return EventKind::kLoadGateUp;
  return gemm == Gemm::kDown ? EventKind::kLoadDown : EventKind::kLoadGradient;
}
JAXMOE_ANY constexpr EventKind event_of(Gemm gemm) {
  return static_cast<EventKind>(static_cast<int32_t>(EventKind::kGateUp) + static_cast<int32_t>(gemm));
}
constexpr bool products_are_named_as_their_gemms() {
  for (int32_t gemm = 0; gemm < static_cast<int32_t>(Gemm::kCount); ++gemm) {
    const EventKindInfo& info = kEventKinds[static_cast<int32_t>(event_of(static_cast<Gemm>(gemm)))];
    if (std::string_view(info.name) != kGemmNames[gemm]) return false;
  }
  return true;
}
static_assert(products_are_named_as_their_gemms());

// What an event is about; -1 where that means nothing.
struct EventSubject {
  int32_t expert = -1;    // local
  int32_t row_tile = -1;  // over all local experts; of a weight gradient the first one of the segment
  int32_t part = -1;      // of the row tile: the column tile of a GEMM, the first row of a chunk
};

// As a GPU writes it.
struct TimelineEvent {
  uint64_t begin;    // ticks of the SM's clock
  uint64_t end;
  int16_t kind;      // EventKind
  int16_t expert;
  int32_t row_tile;
  int32_t part;
  uint32_t stalled;  // ticks, of end - begin, that went into waiting for stages of shared memory
};
static_assert(sizeof(TimelineEvent) == 32);

// Tracks of a thread block.
inline constexpr int32_t kTracksOfRole[kNumTrackRoles] = {1, 1, 3, 2, 2};
inline constexpr int32_t kBlockTracks = 9;
JAXMOE_ANY constexpr int32_t first_track_of(TrackRole role) {
  // An array of the host cannot be indexed on a GPU, by a number that only the run knows.
  switch (role) {
    case TrackRole::kBlock: return 0;
    case TrackRole::kProducer: return 1;
    case TrackRole::kDispatch: return 2;
    case TrackRole::kMath: return 5;
    default: return 7;
  }
}
constexpr bool tracks_are_numbered_in_order() {
  int32_t track = 0;
  for (int32_t role = 0; role < kNumTrackRoles; track += kTracksOfRole[role++]) {
    if (first_track_of(static_cast<TrackRole>(role)) != track) return false;
  }
  return track == kBlockTracks;
}
static_assert(tracks_are_numbered_in_order());

// An SM has a clock of its own, fine but of no fixed frequency; the timer that all SMs share may move in steps of up to
// a microsecond. Both are read when a block begins and when it ends, and its ticks turn into time on the line between.
struct TimelineBlock {
  uint64_t begin_ticks, begin_ns;
  uint64_t end_ticks, end_ns;
  int32_t sm;
  uint32_t recorded[kBlockTracks];  // events of each track; those beyond its capacity are dropped
};

// A busy track has, for 8192 tokens of deepseek-v3 on 4 GPUs, about 600 events in a forward pass and, counted from the
// schedule, 2600 in a backward pass, which has three for every tile of the weights; on 2 GPUs, with twice the experts,
// 4600. Several times that where experts are unevenly popular.
inline constexpr int32_t kTrackEvents = 8192;

// A buffer in GPU memory: [blocks] TimelineBlock, then [blocks, kBlockTracks, kTrackEvents] TimelineEvent.
JAXMOE_ANY constexpr int64_t timeline_events_offset(int32_t blocks) {
  return ceil_div(blocks * int64_t{sizeof(TimelineBlock)}, int64_t{1024}) * 1024;
}
JAXMOE_ANY constexpr int64_t timeline_bytes(int32_t blocks) {
  return timeline_events_offset(blocks) +
         int64_t{blocks} * kBlockTracks * kTrackEvents * int64_t{sizeof(TimelineEvent)};
}

// As Python gets it, from either platform: one launch of one rank.
struct TimelineRow {
  int32_t block;  // thread block; a worker of the host executor
  int32_t role;   // TrackRole
  int32_t nth;    // track of that role in the block
  int32_t kind;   // EventKind
  int32_t expert;
  int32_t row_tile;
  int32_t part;
  uint32_t stalled;
  uint64_t begin;
  uint64_t end;
};
struct TimelineClock {
  int32_t sm;
  uint32_t dropped;  // events of this block
  uint64_t begin_ticks, begin_ns;
  uint64_t end_ticks, end_ns;
};
struct LaunchTimeline {
  int32_t device;  // as the platform counts
  int32_t ranks;
  int32_t rank;
  int64_t launch;  // number of the launch, counted where it is recorded
  bool backward;   // of a backward pass
  std::vector<TimelineClock> clocks;  // of each block
  std::vector<TimelineRow> rows;
};

// What lies in a buffer of timeline_bytes(blocks) after a launch.
inline LaunchTimeline decode_timeline(const std::byte* buffer, int32_t blocks) {
  LaunchTimeline launch{};
  const std::byte* track_events = buffer + timeline_events_offset(blocks);
  for (int32_t block = 0; block < blocks; ++block) {
    TimelineBlock header;
    std::memcpy(&header, buffer + block * sizeof(header), sizeof(header));
    TimelineClock clock{header.sm, 0, header.begin_ticks, header.begin_ns, header.end_ticks, header.end_ns};
    for (int32_t role = 0; role < kNumTrackRoles; ++role) {
      for (int32_t nth = 0; nth < kTracksOfRole[role]; ++nth) {
        const uint32_t recorded = header.recorded[first_track_of(static_cast<TrackRole>(role)) + nth];
        const uint32_t kept = at_most(recorded, static_cast<uint32_t>(kTrackEvents));
        clock.dropped += recorded - kept;
        for (uint32_t i = 0; i < kept; ++i) {
          TimelineEvent event;
          std::memcpy(&event, track_events + i * sizeof(event), sizeof(event));
          launch.rows.push_back({block, role, nth, event.kind, event.expert, event.row_tile, event.part,
                                 event.stalled, event.begin, event.end});
        }
        track_events += kTrackEvents * sizeof(TimelineEvent);
      }
    }
    launch.clocks.push_back(clock);
  }
  return launch;
}

}  // namespace jaxmoe
