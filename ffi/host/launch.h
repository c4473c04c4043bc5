// What all ranks of one launch of the host executor are given, and what tests make go wrong in it. Filled by
// host/layer_handler.cc and host/executor_bindings.cc, read by host/rank.h and host/signals.h.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <span>
#include <string>

#include "common/activation.h"
#include "common/formats.h"
#include "common/layout.h"
#include "common/shape.h"

namespace jaxmoe::host {

// What tests make go wrong. The defaults change nothing.
struct Disturbance {
  uint64_t delay_seed = 0;       // random delays of up to `most_delay_us` before every release and after every wait
  int32_t most_delay_us = 0;
  int32_t rank = -1;             // the rank at which the faults below happen; none: -1
  int32_t dropped_signal = -1;   // a Signal whose releases at `dropped_index` do not happen
  int32_t dropped_index = 0;
  int32_t skipped_site = -1;     // a Site whose waits return at once
};

// Whether a launch was given up, and why; shared by the ranks of its group.
class Outcome {
 public:
  // Some wait took too long. The others go on until they fail too: what is missing is among what they say.
  void give_up() { given_up_.store(true); }
  bool is_given_up() const { return given_up_.load(); }

  // A rank cannot go on, for want of memory or threads: whoever waits for it stops waiting. The first reason is kept.
  // Allocates nothing.
  void break_off(int32_t rank, const char* why) {
    const std::lock_guard lock(mutex_);
    give_up();
    if (broken_off_.load()) return;
    std::snprintf(reason_, sizeof reason_, "rank %d could not go on: %s", static_cast<int>(rank), why);
    broken_off_.store(true, std::memory_order_release);
  }
  // Pairs with the store in break_off().
  bool is_broken_off() const { return broken_off_.load(std::memory_order_acquire); }
  // Once that holds.
  std::string reason() const { return std::string("jaxmoe: ") + reason_; }

 private:
  std::atomic<bool> given_up_ = false;
  std::atomic<bool> broken_off_ = false;
  std::mutex mutex_;
  char reason_[256] = {};
};

// One launch of a group, as each of its ranks sees it. XLA's handlers know all but what ranks share, and the dispatchers, which
// run_beside_others() in host/instruction.h fills in.
struct Launch {
  Shape shape{};
  Schedule schedule{};
  Formats formats{};  // those of the precision with which it is run
  HeadCapacity head{};
  int32_t dispatchers_per_worker = 0;
  Activation activation{};
  bool power_of_two_scales = false;      // of tokens and of h, where they have scales
  std::span<std::byte* const> arenas{};  // of all ranks
  double timeout_seconds = 0;
  Outcome* outcome = nullptr;  // shared by the group
  Disturbance disturbance{};
};

}  // namespace jaxmoe::host
