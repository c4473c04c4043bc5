// The signals of common/protocol.h among CPU threads, the counterpart of cuda/device/signals.cuh: waits are bounded,
// and tests may delay or leave out any of them. One object for each rank and launch, shared by its threads.
// Caller: host/executor.cc.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>

#include "common/layout.h"
#include "common/protocol.h"
#include "host/launch.h"

namespace jaxmoe::host {

class Signals {
 public:
  // Launch and layout have to outlive it.
  Signals(const Launch& launch, int32_t rank, const ArenaLayout& layout, uint32_t launch_number);

  // Runs a thread's work, which ends where one of its waits is given up, or where it throws something else.
  template <class Body>
  void guard(Body body) {
    try {
      body();
    } catch (const GivenUp&) {  // whoever threw it has recorded why
    } catch (const std::exception& thrown) {
      break_off(thrown.what());
    }
  }

  // This rank cannot go on: neither its threads nor its peers' wait for it any longer.
  void break_off(const char* why) {
    stopped_.store(true);
    launch_.outcome->break_off(rank_, why);
  }

  // Returns once the word has reached its target; throws what guard() catches when that takes too long, or when a rank
  // of the group cannot go on.
  void wait(const Wait& wait, Site site, int32_t worker);

  void release(const Release& release);

  // Tells every rank, this one too, that this launch's `signal` of this rank has happened.
  void release_to_all(Signal signal);

  // As tests ask for it.
  void delay() const;

  // A line for each thread that gave up, and why a rank could not go on where that stopped some; after all threads.
  std::string failures() const;

 private:
  struct GivenUp {};

  std::atomic_ref<uint32_t> word(int32_t rank, Signal signal, int32_t index) const;
  bool is_dropped(Signal signal, int32_t index) const;
  [[noreturn]] void give_up(const WaitFailure& failure);

  const Launch& launch_;
  const int32_t rank_;
  const ArenaLayout& layout_;
  const uint32_t launch_number_;
  const std::chrono::steady_clock::duration timeout_;
  std::mutex failures_mutex_;
  std::string failures_;
  std::atomic<bool> stopped_ = false;  // threads of this rank, because some rank could not go on
};

}  // namespace jaxmoe::host
