// Memory that all GPUs of a group reach: NCCL windows over XLA's communicator of the group, ordinary device memory for
// a group of one. Caller: cuda/arena.cu. Everything here works on the current device.
//
// Functions named collective are called by all ranks of the communicator, in the same order; each waits for the others.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/kernel/params.cuh"

namespace jaxmoe {

// One rank's block of such memory, and where this device sees the blocks of the others.
struct SharedMemory {
  std::byte* own = nullptr;  // null: there is none
  int64_t bytes = 0;
  bool shareable = false;        // of NCCL's allocator
  void* communicator = nullptr;  // ncclComm_t of the window; null while nobody else reaches it
  void* window = nullptr;        // ncclWindow_t
  std::byte* of_ranks[kMaxPeers] = {};
};

// Allocates a block that only this device reaches yet. Returns what went wrong, empty where nothing did.
std::string allocate(int64_t bytes, bool shareable, SharedMemory* memory);

// Lets the ranks reach each other's blocks, which are all of the same size. Collective.
std::string share(void* communicator, int32_t ranks, cudaStream_t stream, SharedMemory* memory);

// Gives a block back. No kernel may still use it; peers that do must have ended theirs.
void release(SharedMemory* memory);

// A communicator as NCCL describes it.
struct Membership {
  int32_t ranks;
  int32_t rank;
  int32_t device;
  int32_t in_reach;  // ranks that this device reaches by load and store, itself included
};
std::string membership(void* communicator, Membership* found);

// What the ranks of a group tell each other before they share memory.
struct Note {
  unsigned char gpu[16];  // its UUID
  int64_t bytes;          // of the block that it wants to share
  int64_t allocated;      // 0: there was no memory for it
};

// Sends `own` to all ranks and returns what each of them sent. Collective. `board` is a block of kBoardBytes, not
// shared yet, that is given back on return.
inline constexpr int64_t kBoardBytes = int64_t{1} << 21;  // the least that NCCL's allocator gives
std::string exchange(void* communicator, int32_t ranks, const Note& own, cudaStream_t stream, SharedMemory* board,
                     std::vector<Note>* notes);

}  // namespace jaxmoe
