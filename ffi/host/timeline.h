// The timeline of one rank of the host executor: the same events as those of a GPU (common/timeline.h), of its threads.
// A worker is a block of three tracks that never overlap in time: `block` until all inputs are there, then `math`;
// `dispatch` is that of its dispatchers. Nothing is asynchronous here: there are no tracks for producers and answers.
//
// Recording is a switch of the process, for tests and for jaxmoe.profiling; a launch looks at it once.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "common/scheduler.h"
#include "common/timeline.h"

namespace jaxmoe::host {

// Whether launches record.
inline std::atomic<bool> timeline_is_on = false;

// Switches it; forgets earlier launches where it is switched on. Returns what held before.
bool record_timelines(bool on);

// Keeps `launch` until the next one of that device and rank.
void keep_timeline(LaunchTimeline launch);
std::vector<LaunchTimeline> kept_timelines();

// The events of one thread, on one track at a time. Without `rows` nothing is recorded.
class TrackRecorder {
 public:
  TrackRecorder() = default;
  TrackRecorder(std::vector<TimelineRow>* rows, int32_t block, TrackRole role, int32_t nth)
      : rows_(rows), block_(block), role_(role), nth_(nth), since_(rows == nullptr ? 0 : nanoseconds()) {}

  // What has passed since the last mark was this.
  void mark(EventKind kind, const EventSubject& subject = {}) {
    if (rows_ == nullptr) return;
    const uint64_t now = nanoseconds();
    rows_->push_back({block_, static_cast<int32_t>(role_), nth_, static_cast<int32_t>(kind), subject.expert,
                      subject.row_tile, subject.part, 0, since_, now});
    since_ = now;
  }
  void mark(EventKind kind, const Task& task) { mark(kind, {task.expert, task.row_tile, task.column_tile}); }

  // What follows is on another track of the same thread.
  void move_to(TrackRole role) { role_ = role; }

  static uint64_t nanoseconds() {
    return static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
            .count());
  }

 private:
  std::vector<TimelineRow>* rows_ = nullptr;
  int32_t block_ = 0;
  TrackRole role_ = TrackRole::kBlock;
  int32_t nth_ = 0;
  uint64_t since_ = 0;
};

// The events of one launch of one rank, thread by thread.
class RankTimeline {
 public:
  RankTimeline(bool on, int32_t workers, int32_t dispatchers)
      : on_(on), workers_(workers), of_thread_(on ? workers + dispatchers : 0),
        begin_(on ? TrackRecorder::nanoseconds() : 0) {}

  bool on() const { return on_; }
  TrackRecorder of_worker(int32_t worker) {
    return {on_ ? &of_thread_[worker] : nullptr, worker, TrackRole::kBlock, 0};
  }
  TrackRecorder of_dispatcher(int32_t dispatcher, int32_t dispatchers_per_worker) {
    return {on_ ? &of_thread_[workers_ + dispatcher] : nullptr, dispatcher / dispatchers_per_worker,
            TrackRole::kDispatch, dispatcher % dispatchers_per_worker};
  }

  // After all threads.
  LaunchTimeline collect(int32_t device, int32_t ranks, int32_t rank, int64_t launch, bool backward) const {
    LaunchTimeline result{device, ranks, rank, launch, backward, {}, {}};
    const uint64_t end = TrackRecorder::nanoseconds();
    for (int32_t worker = 0; worker < workers_; ++worker) {
      result.clocks.push_back({worker, 0, begin_, begin_, end, end});
    }
    for (const std::vector<TimelineRow>& rows : of_thread_) {
      result.rows.insert(result.rows.end(), rows.begin(), rows.end());
    }
    return result;
  }

 private:
  bool on_;
  int32_t workers_;
  std::vector<std::vector<TimelineRow>> of_thread_;
  uint64_t begin_;
};

}  // namespace jaxmoe::host
