// What the devices of this process tell each other in a run of one instruction (one call of the layer in a program), so
// that all of them do the same. XLA needs that: it lets the devices of a process wait for each other, for 40 s between
// initialize and execute and at the first collective after it, and then ends the process. So
//
//   an error of one device    is returned by execute on all of them. XLA passes it on as the error of the results.
//   a device that has to wait for ranks of other processes, which may still compile, keeps all of them in initialize,
//                             where nobody counts the seconds.
//
// Plain C++ without CUDA (tests/host/runs_test.cc). Caller: cuda/host/layer_handler.cc.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jaxmoe {

class Run {
 public:
  // What the first device of a run decides for all of them.
  struct Start {
    xla::ffi::Error refusal;  // why this run computes nothing; success where it does
    bool waits;               // whether devices wait for each other in initialize
  };

  Run(int64_t id, Start start) : id_(id), start_(std::move(start)) {}

  int64_t id() const { return id_; }
  bool is_refused() const { return start_.refusal.failure(); }

  // What execute returns.
  xla::ffi::Error error() {
    const std::lock_guard lock(mutex_);
    return is_refused() ? start_.refusal : error_;
  }

  // Where a device begins initialize; false where it has done so before.
  bool enter(int32_t device) {
    const std::lock_guard lock(mutex_);
    if (!entered_.insert(device).second) return false;
    ++events_;
    changed_.notify_all();
    return true;
  }
  bool has_entered(int32_t device) {
    const std::lock_guard lock(mutex_);
    return entered_.contains(device);
  }

  // A device does what may take longer than others wait for it, or has done a part of it.
  void goes_on() {
    const std::lock_guard lock(mutex_);
    ++events_;
    changed_.notify_all();
  }

  // A device has ended initialize, with this error or success. Where devices wait it returns when `devices` of them
  // have. It waits as long as one of them comes, goes on or goes within `seconds`.
  void leave(const xla::ffi::Error& error, int32_t devices, double seconds) {
    std::unique_lock lock(mutex_);
    if (error.failure()) keep(error);
    ++events_;
    ++left_;
    changed_.notify_all();
    while (start_.waits && left_ < devices && !is_given_up_) {
      const int64_t seen = events_;
      const auto limit = std::chrono::duration<double>(seconds);
      if (changed_.wait_for(lock, limit, [&] { return events_ != seen; })) continue;
      is_given_up_ = true;
      keep(xla::ffi::Error(xla::ffi::ErrorCode::kDeadlineExceeded,
                           "jaxmoe: " + std::to_string(left_) + " of the " + std::to_string(devices) +
                               " devices of this process that run this program came to the layer, the others not "
                               "within the limit (JAXMOE_TIMEOUT_SECONDS)."));
      changed_.notify_all();
    }
  }

 private:
  void keep(const xla::ffi::Error& error) {
    if (error_.success()) error_ = error;
  }

  const int64_t id_;
  const Start start_;
  std::mutex mutex_;
  std::condition_variable changed_;
  xla::ffi::Error error_ = xla::ffi::Error::Success();  // the first one
  std::set<int32_t> entered_;
  int64_t events_ = 0;
  int32_t left_ = 0;
  bool is_given_up_ = false;
};

// The last runs of an instruction. XLA numbers runs; where it does not, they all have one number, and a device that
// begins another one is known by that.
class Runs {
 public:
  // The run that `device` begins; `start` decides for it where that is its first device.
  template <class StartOf>
  std::shared_ptr<Run> enter(int64_t id, int32_t device, StartOf start) {
    const std::lock_guard lock(mutex_);
    for (const std::shared_ptr<Run>& run : runs_) {
      if (run->id() == id && run->enter(device)) return run;
    }
    runs_.push_back(std::make_shared<Run>(id, start()));
    if (runs_.size() > kRemembered) runs_.pop_front();
    runs_.back()->enter(device);
    return runs_.back();
  }

  // The run with this id that `device` began last. Null where it has been forgotten: a device can be that many runs
  // behind only where groups have one rank and nothing else holds the devices together.
  std::shared_ptr<Run> find(int64_t id, int32_t device) {
    const std::lock_guard lock(mutex_);
    for (auto run = runs_.rbegin(); run != runs_.rend(); ++run) {
      if ((*run)->id() == id && (*run)->has_entered(device)) return *run;
    }
    return nullptr;
  }

 private:
  static constexpr std::size_t kRemembered = 32;

  std::mutex mutex_;
  std::deque<std::shared_ptr<Run>> runs_;
};

}  // namespace jaxmoe
