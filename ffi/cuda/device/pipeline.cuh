// A ring of shared-memory stages between the thread that issues bulk copies and the warps that use what arrives.
//
//   producer, one thread:  acquire (empty)  commit (bytes to come)  copies onto full(position)
//                          acquire  expect (bytes)  copies  commit (the other bytes)  the other copies
//   consumer warps:        wait (full)      use                     release (empty)
//
// `full` of a stage is completed by one arrival, the commit, and by the bytes it announced; it pairs with wait().
// `empty` is completed by one release of every consumer warp of every block of the cluster, because the copies of
// each block may land in all of them (multicast); it pairs with acquire(). So no block writes a stage of another
// block before that block's consumers have left it, and a block must go through every stage of its cluster, even with
// nothing to do.
//
// Every role keeps its own Position; all of them take the same number of steps. These waits have no time limit: what
// they wait for is at most one bounded wait of the producer away.
#pragma once

#include <cstdint>

#include "cuda/device/ptx/mbarrier.cuh"

namespace jaxmoe {

template <class Stage_, int kStages, int kConsumerWarps, int kClusterSize>
class Pipeline {
 public:
  using Stage = Stage_;

  // In shared memory, at the same offset in all blocks of a cluster.
  struct Storage {
    Stage stages[kStages];  // first, so that stages are as well aligned as the storage
    uint64_t full[kStages];
    uint64_t empty[kStages];
  };

  // One number, since math warps have no register to spare.
  struct Position {
    uint32_t steps = 0;  // that were taken; as many as 32 bits hold are whole rounds of the ring
    static_assert((kStages & (kStages - 1)) == 0);

    __device__ int stage() const { return steps % kStages; }
    __device__ uint32_t parity() const { return steps / kStages % 2; }  // of this round of the ring
    __device__ void advance() { ++steps; }
    __device__ Position before() const { return {steps - 1}; }
    __device__ Position after(uint32_t more = 1) const { return {steps + more}; }
  };

  // One thread of the block, followed by fence_mbarrier_init() and a barrier of the block (the cluster, if it has
  // more).
  static __device__ void init(Storage& storage) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(&storage.full[stage], 1);
      ptx::mbarrier_init(&storage.empty[stage], kConsumerWarps * kClusterSize);
    }
  }

  explicit __device__ Pipeline(Storage& storage) : storage_(storage) {}

  __device__ Stage& stage(Position position) const { return storage_.stages[position.stage()]; }
  __device__ uint64_t* full(Position position) const { return &storage_.full[position.stage()]; }

  // Pairs with release() of every consumer warp, one round earlier; in the first round all stages are empty.
  __device__ void acquire(Position position) const {
    while (!ptx::mbarrier_try_wait(&storage_.empty[position.stage()], position.parity() ^ 1)) {}
  }

  // Whether acquire() would return at once; if so, it acquires as that does.
  __device__ bool is_empty(Position position) const {
    return ptx::mbarrier_test(&storage_.empty[position.stage()], position.parity() ^ 1);
  }

  // `bytes`: all that lands in this block's stage, copies of the other blocks included.
  __device__ void commit(Position position, uint32_t bytes) const {
    ptx::mbarrier_arrive_expect_bytes(full(position), bytes);
  }

  // Of copies that are on their way before the commit, which then announces the others.
  __device__ void expect(Position position, uint32_t bytes) const { ptx::mbarrier_expect_bytes(full(position), bytes); }

  // Pairs with commit() and the copies it announced.
  __device__ void wait(Position position) const {
    while (!ptx::mbarrier_try_wait(full(position), position.parity())) {}
  }

  // A look ahead, by each lane for itself: where it says so, wait() is not needed.
  __device__ bool looks_full(Position position) const {
    return ptx::mbarrier_test(full(position), position.parity());
  }

  // Whether wait() would return at once; the same answer in all lanes of a warp.
  __device__ bool is_full(Position position) const {
    return __any_sync(0xffffffff, ptx::mbarrier_test(full(position), position.parity()));
  }

  // By all lanes of a consumer warp once nothing of theirs reads the stage any more. Pairs with acquire() in every
  // block.
  __device__ void release(Position position, int lane) const {
    if constexpr (kClusterSize > 1) {
      if (lane < kClusterSize) ptx::mbarrier_arrive_cluster(&storage_.empty[position.stage()], lane);
    } else {
      if (lane == 0) ptx::mbarrier_arrive(&storage_.empty[position.stage()]);
    }
  }

 private:
  Storage& storage_;
};

}  // namespace jaxmoe
