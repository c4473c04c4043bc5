// The signals of common/protocol.h on a GPU: counters of this rank in its own arena, and flags that ranks raise in each
// other's. Waits are bounded: one that takes too long records who waited where for what, and from then on no wait of
// this rank holds anyone up, so that the kernel runs to its end with rubbish in its tiles (every address that is made
// of such rubbish is checked), and the host reports the record.
//
// On a GPU every warp of a task releases its own part, so hidden_written, outputs_written and tasks_done count warps:
// their amounts and targets are those of protocol.h times `parts`.
#pragma once

#include <cstdint>

#include "common/layout.h"
#include "common/protocol.h"
#include "cuda/kernel/params.cuh"

namespace jaxmoe {
namespace ptx {

__device__ __forceinline__ uint32_t load_acquire_gpu(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t load_relaxed_gpu(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void add_release_gpu(uint32_t* word, uint32_t amount) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(amount) : "memory");
}
__device__ __forceinline__ void store_release_gpu(uint32_t* word, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
// Returns what was there before.
__device__ __forceinline__ uint32_t compare_and_swap_acquire_gpu(uint32_t* word, uint32_t expected, uint32_t value) {
  uint32_t seen;
  asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(seen)
               : "l"(word), "r"(expected), "r"(value)
               : "memory");
  return seen;
}
__device__ __forceinline__ void store_release_system(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}
__device__ __forceinline__ int32_t sm_index() {
  uint32_t value;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(value));
  return static_cast<int32_t>(value);
}

}  // namespace ptx

class Signals {
 public:
  static constexpr unsigned kShortNapNs = 32;
  static constexpr unsigned kLongNapNs = 500;

  // `epoch` lies in shared memory, since roles without a register to spare need it now and then. It is there behind a
  // barrier of the block that follows read_epoch().
  __device__ Signals(const LaunchParams& params, uint32_t& epoch) : params_(params), epoch_(epoch) {}

  // By one thread of the block.
  __device__ void read_epoch() const { epoch_ = *const_cast<const volatile uint32_t*>(&control()->epoch) + 1; }

  __device__ uint32_t epoch() const { return epoch_; }

  // By one thread. Returns once the word has reached its target, or the wait was given up. `nap_ns` lies between two
  // looks at the word: many who wait for one word slow down everyone's loads from its part of L2.
  __device__ __forceinline__ void wait(const Wait& wait, Site site, uint32_t parts = 1,
                                       unsigned nap_ns = kShortNapNs) const {
    const uint32_t* word = word_at(params_.rank, wait.signal, wait.index);
    const uint32_t target = wait.target * parts;
    const bool from_peer = is_from_peers(wait.signal);
    uint32_t seen = from_peer ? ptx::load_acquire_system(word) : ptx::load_acquire_gpu(word);
    if (has_reached(seen, target)) return;
    const uint64_t begin = ptx::nanoseconds();
    for (;;) {
#pragma unroll 1
      for (int poll = 0; poll < kPollsPerCheck; ++poll) {
        seen = from_peer ? ptx::load_acquire_system(word) : ptx::load_acquire_gpu(word);
        if (has_reached(seen, target)) return;
        __nanosleep(nap_ns);
      }
      if (given_up()) return;
      if (ptx::nanoseconds() - begin > params_.timeout_ns) break;
    }
    give_up({params_.rank, ptx::sm_index(), site, {wait.signal, wait.index, target}, seen});
  }

  // By one thread, behind whatever orders the work of others before it (a barrier of the warp or block).
  __device__ __forceinline__ void release(const Release& release) const {
    ptx::add_release_gpu(word_at(params_.rank, release.signal, release.index), release.amount);
  }

  // By one thread, behind an acquire of all that the flag announces.
  __device__ void release_to_all(Signal signal) const {
    if (given_up()) return;  // peers that wait for it will not take rubbish for results
    ptx::fence_system();
    for (int32_t peer = 0; peer < params_.shape.ranks; ++peer) {
      ptx::store_release_system(word_at(peer, signal, params_.rank), epoch_);
    }
  }

  __device__ bool given_up() const { return ptx::load_relaxed_gpu(&control()->given_up) != 0; }

  __device__ Control* control() const {
    return reinterpret_cast<Control*>(params_.arenas[params_.rank] + params_.layout.control.offset);
  }

 private:
  // Time and failure are looked at every quarter of a millisecond or so.
  static constexpr int kPollsPerCheck = 256;

  __device__ __forceinline__ uint32_t* word_at(int32_t rank, Signal signal, int32_t index) const {
    return reinterpret_cast<uint32_t*>(params_.arenas[rank] +
                                       word_of(params_.layout, params_.head, epoch_, signal, index));
  }

  __device__ void give_up(const WaitFailure& failure) const {
    if (atomicExch(&control()->given_up, 1u) != 0) return;  // another was first
    params_.failure->failure = failure;
    __threadfence_system();
    *const_cast<volatile uint32_t*>(&params_.failure->complete) = 1;
    __threadfence_system();
  }

  const LaunchParams& params_;
  uint32_t& epoch_;
};

}  // namespace jaxmoe
