// See signals.h.
#include "host/signals.h"

#include <algorithm>
#include <functional>
#include <random>
#include <thread>

namespace jaxmoe::host {

using Clock = std::chrono::steady_clock;

Signals::Signals(const Launch& launch, int32_t rank, const ArenaLayout& layout, uint32_t launch_number)
    : launch_(launch), rank_(rank), layout_(layout), launch_number_(launch_number),
      timeout_(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(launch.timeout_seconds))) {}

void Signals::wait(const Wait& wait, Site site, int32_t worker) {
  const Disturbance& disturbance = launch_.disturbance;
  if (wait.index < 0 || (disturbance.rank == rank_ && disturbance.skipped_site == static_cast<int32_t>(site))) return;
  const std::atomic_ref<uint32_t> counter = word(rank_, wait.signal, wait.index);
  uint32_t seen = counter.load(std::memory_order_acquire);
  if (!has_reached(seen, wait.target)) {
    const Clock::time_point deadline = Clock::now() + timeout_;
    for (int polls = 0; !has_reached(seen, wait.target); ++polls) {
      if (launch_.outcome->is_broken_off()) {
        stopped_.store(true);
        throw GivenUp{};
      }
      if (Clock::now() > deadline) give_up({rank_, worker, site, wait, seen});
      if (polls < 64) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(std::min(polls, 1000)));
      }
      seen = counter.load(std::memory_order_acquire);
    }
  }
  delay();
}

// Other threads go on until their own waits fail: what is missing is among what they say, whoever noticed first.
void Signals::give_up(const WaitFailure& failure) {
  launch_.outcome->give_up();
  const std::lock_guard lock(failures_mutex_);
  failures_ += (failures_.empty() ? "" : "\n") + describe(failure, launch_.timeout_seconds, "worker");
  throw GivenUp{};
}

std::string Signals::failures() const {
  if (!stopped_.load()) return failures_;
  return failures_ + (failures_.empty() ? "" : "\n") + launch_.outcome->reason();
}

void Signals::release(const Release& release) {
  delay();
  if (!is_dropped(release.signal, release.index)) {
    word(rank_, release.signal, release.index).fetch_add(release.amount, std::memory_order_release);
  }
}

void Signals::release_to_all(Signal signal) {
  for (int32_t peer = 0; peer < launch_.shape.ranks; ++peer) {
    delay();
    if (!is_dropped(signal, peer)) word(peer, signal, rank_).store(launch_number_, std::memory_order_release);
  }
}

void Signals::delay() const {
  if (launch_.disturbance.most_delay_us == 0) return;
  thread_local std::minstd_rand random(static_cast<unsigned>(
      launch_.disturbance.delay_seed + std::hash<std::thread::id>{}(std::this_thread::get_id())));
  const int32_t us = static_cast<int32_t>(random() % static_cast<unsigned>(launch_.disturbance.most_delay_us + 1));
  if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

std::atomic_ref<uint32_t> Signals::word(int32_t rank, Signal signal, int32_t index) const {
  std::byte* address = launch_.arenas[rank] + word_of(layout_, launch_.head, launch_number_, signal, index);
  return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(address));
}

bool Signals::is_dropped(Signal signal, int32_t index) const {
  const Disturbance& disturbance = launch_.disturbance;
  return disturbance.rank == rank_ && disturbance.dropped_signal == static_cast<int32_t>(signal) &&
         disturbance.dropped_index == index;
}

}  // namespace jaxmoe::host
