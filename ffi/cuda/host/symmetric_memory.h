// Memory of one device that the other GPUs of its group reach: ordinary device memory, seen by peers of the same
// process through their access to the device, by those of other processes of the host through CUDA's interprocess
// handles. Caller: cuda/host/arena.cc. Everything here works on the current device.
//
// Not NCCL's windows, which end with the communicator that they were made on: XLA destroys communicators that other
// programs still have memory on (ffi/memory.md).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/device/rank_params.cuh"

namespace jaxmoe {

// A block of this device, and where it sees the blocks of its peers.
struct SharedMemory {
  std::byte* own = nullptr;  // null: there is none
  int64_t bytes = 0;
  std::byte* of_ranks[kMaxPeers] = {};
  bool is_mapped[kMaxPeers] = {};  // of another process: to be given back
};

// What another rank has to know to reach a block.
struct BlockName {
  uint64_t host;     // the running system
  uint64_t process;  // drawn at random when it started
  int32_t device;    // as that process counts
  std::byte* address;
  cudaIpcMemHandle_t handle;  // for other processes
  cudaError_t handle_status;  // why there is none
};

// The functions below return what went wrong, empty where nothing did.

// Allocates a block of zeros that only this device reaches yet. Waits for `stream`, which writes the zeros.
std::string allocate(int64_t bytes, cudaStream_t stream, SharedMemory* memory);

// Names a block for others; the name without a block says where this process runs.
std::string name_block(const SharedMemory& memory, BlockName* name);

// Lets this device reach the block of `rank`, which stays there until release_peers().
std::string reach_peer(int32_t rank, const BlockName& name, SharedMemory* memory);

// This device will not touch the blocks of others again. Their owners may free them once they know.
void release_peers(SharedMemory* memory);

// Gives everything back. No kernel uses the block, and no peer reaches it any longer.
void release(SharedMemory* memory);

}  // namespace jaxmoe
