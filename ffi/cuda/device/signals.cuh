// The signals of common/protocol.h on a GPU: counters of this rank in its own arena, and flags that ranks raise in each
// other's. Waits are bounded: one that takes too long records who waited where for what, and from then on no wait of
// this rank holds anyone up, so that the kernel runs to its end with rubbish in its tiles (every address that is made
// of such rubbish is checked), and the host reports the record.
//
// On a GPU h_written, answers_written and tasks_done count math warps, each of which has a part of a task, whoever releases it:
// targets are those of protocol.h times the number of those warps, amounts of a part are as they stand there.
#pragma once

#include <cstdint>

#include "common/layout.h"
#include "common/protocol.h"
#include "common/shape.h"
#include "cuda/device/peers.cuh"
#include "cuda/device/ptx/memory.cuh"
#include "cuda/device/ptx/special_registers.cuh"

namespace jaxmoe {

// Between two looks at a word: many who wait for one word slow down everyone's loads from its part of L2.
inline constexpr unsigned kShortNapNs = 32;
inline constexpr unsigned kLongNapNs = 500;

// `kTaskParts` warps have a part of each task.
template <uint32_t kTaskParts>
class Signals {
 public:
  // `launch_number` lies in shared memory, since roles without a register to spare need it now and then. It is there
  // after a barrier of the block that follows read_launch_number().
  __device__ Signals(const RankParams& params, uint32_t& launch_number)
      : params_(params), peers_(params), launch_number_(launch_number) {}

  // By one thread of the block.
  __device__ void read_launch_number() const {
    launch_number_ = *const_cast<const volatile uint32_t*>(&control()->launch_number) + 1;
  }

  __device__ uint32_t launch_number() const { return launch_number_; }

  // By one thread. Returns once the word has reached its target, or the wait was given up.
  __device__ __forceinline__ void wait(const Wait& wait, Site site, unsigned nap_ns = kShortNapNs) const {
    wait_for_parts(wait, site, 1, nap_ns);
  }

  // The same for what tasks release, all parts of each.
  __device__ __forceinline__ void wait_for_tasks(const Wait& wait, Site site, unsigned nap_ns = kShortNapNs) const {
    wait_for_parts(wait, site, kTaskParts, nap_ns);
  }
  // Before a task, which waits for rows or for other tasks.
  __device__ __forceinline__ void wait_before_task(const Wait& wait, Site site, bool for_rows) const {
    wait_for_parts(wait, site, for_rows ? 1 : kTaskParts, kShortNapNs);
  }

  // Whether wait_for_tasks() would return at once; if so, it acquires as that does.
  __device__ __forceinline__ bool tasks_have_reached(const Wait& wait) const {
    return has_reached(ptx::load_acquire_gpu(word_at(params_.rank, wait.signal, wait.index)), wait.target * kTaskParts);
  }

  // By one thread, after whatever orders the work of others before it (a barrier of the warp or block).
  __device__ __forceinline__ void release(const Release& release) const {
    ptx::add_release_gpu(word_at(params_.rank, release.signal, release.index), release.amount);
  }

  // What `warps` warps have stored of a task, by one thread for all of them.
  __device__ __forceinline__ void release_parts(Release release, uint32_t warps) const {
    release.amount *= warps;
    this->release(release);
  }

  // By one thread, after an acquire of all that the flag announces.
  __device__ void release_to_all(Signal signal) const {
    raise_at_all(launch_number_, [&](int32_t peer) { return word_at(peer, signal, params_.rank); });
  }

  // By one thread, after an acquire of all answers of the experts below `experts`.
  __device__ void tell_experts_answered(uint32_t experts) const {
    raise_at_all(ExpertsAnswered{launch_number_, experts}.word(),
                 [&](int32_t peer) { return answered_word(peer, params_.rank); });
  }

  // What `source` has told last, acquired; 0 before it tells anything in this launch.
  __device__ __forceinline__ uint32_t experts_answered(int32_t source) const {
    return ExpertsAnswered::of(Peers::seen(answered_word(params_.rank, source))).in_launch(launch_number_);
  }

  __device__ bool given_up() const { return ptx::load_relaxed_gpu(&control()->given_up) != 0; }

  // The same at the beginning of a launch, for all threads of a multiprocessor by one load: what earlier launches have left.
  __device__ bool gave_up_before() const { return __ldca(&control()->given_up) != 0; }

  __device__ Control* control() const { return peers_.here<Control>(params_.layout.control.offset); }

 private:
  // Time and failure are looked at every quarter of a millisecond or so.
  static constexpr int kPollsPerCheck = 256;

  __device__ __forceinline__ void wait_for_parts(const Wait& wait, Site site, uint32_t parts, unsigned nap_ns) const {
    const uint32_t* word = word_at(params_.rank, wait.signal, wait.index);
    const uint32_t target = wait.target * parts;
    const bool from_peer = is_from_peers(wait.signal);
    uint32_t seen = from_peer ? Peers::seen(word) : ptx::load_acquire_gpu(word);
    if (has_reached(seen, target)) return;
    const uint64_t begin = ptx::nanoseconds();
    for (;;) {
#pragma unroll 1
      for (int poll = 0; poll < kPollsPerCheck; ++poll) {
        seen = from_peer ? Peers::seen(word) : ptx::load_acquire_gpu(word);
        if (has_reached(seen, target)) return;
        __nanosleep(nap_ns);
      }
      if (given_up()) return;
      if (ptx::nanoseconds() - begin > params_.timeout_ns) break;
    }
    give_up({params_.rank, ptx::sm_index(), site, {wait.signal, wait.index, target}, seen});
  }

  // Writes `value` where `word_of_peer` says, at every peer.
  template <class Word, class WordOfPeer>
  __device__ __forceinline__ void raise_at_all(Word value, const WordOfPeer& word_of_peer) const {
    const bool has_failed = given_up();  // on its way while the fence waits
    Peers::fence();
    if (has_failed) return;  // peers that wait for it will not take rubbish for results
    for (int32_t peer = 0; peer < params_.shape.ranks; ++peer) Peers::raise(word_of_peer(peer), value);
  }

  // The address of the arena first: otherwise the compiler loads it after the offset, at the end of a longer chain.
  __device__ __forceinline__ uint32_t* word_at(int32_t rank, Signal signal, int32_t index) const {
    return reinterpret_cast<uint32_t*>(peers_.arena(rank) +
                                       word_of(params_.layout, params_.head, launch_number_, signal, index));
  }

  __device__ __forceinline__ uint64_t* answered_word(int32_t rank, int32_t source) const {
    return reinterpret_cast<uint64_t*>(word_at(rank, Signal::kExpertsAnswered, source));
  }

  __device__ void give_up(const WaitFailure& failure) const {
    if (atomicExch(&control()->given_up, 1u) != 0) return;  // another was first
    params_.failure->failure = failure;
    __threadfence_system();
    *const_cast<volatile uint32_t*>(&params_.failure->complete) = 1;
    __threadfence_system();
  }

  const RankParams& params_;
  const Peers peers_;
  uint32_t& launch_number_;
};

}  // namespace jaxmoe
