// What the hosts of a group's ranks tell each other before their GPUs share memory: an all-gather of one note each over
// XLA's communicator of the group. It happens when a program names GPUs that are new, and when an arena grows.
// Caller: cuda/host/gpu.cc.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "cuda/host/symmetric_memory.h"

namespace jaxmoe {

using Clock = std::chrono::steady_clock;

// How a rank reaches the others from the host. XLA destroys communicators while a process lives (one of two ranks when
// a program comes that also uses all four), so a handle is good for the run that it was given to and no longer.
struct Link {
  void* communicator;  // ncclComm_t; null for a group of one
  int32_t ranks;
  cudaStream_t stream;  // of the program's own kernels
  double timeout_seconds;  // for the ranks of one exchange to come
  // Tells the other devices of this process that this one goes on: they wait for it, and not for ever.
  std::function<void()> goes_on = [] {};
};

struct Membership {
  int32_t ranks;
  int32_t rank;
  int32_t device;
};
// What NCCL says of the communicator. Returns what went wrong, empty where nothing did.
std::string membership(const Link& link, Membership* found);

struct Note {
  unsigned char gpu[16];  // its UUID
  uint64_t agreement;     // a hash of what all ranks must have the same
  int64_t bytes;          // of the block that it wants to share
  int64_t succeeded;      // 0: the step before this exchange failed here; the rank's own error says why
  BlockName block;        // where others find it
};

// Where notes lie on their way. Made by the first exchange of a GPU, which keeps it: after one that did not end the GPU
// may still write to it.
struct Board {
  Note* on_gpu = nullptr;   // the own one, then those of all ranks
  Note* on_host = nullptr;  // the same
  cudaEvent_t gathered = nullptr;
};

// Sends `own` to all ranks and returns what each of them sent, in the order of ranks. Waits for all of them, as long as
// `link` allows from here on. Returns what went wrong, empty where nothing did. The other ranks may then wait for this
// one, and this GPU may hold a collective that never ends.
std::string exchange(Board* board, const Link& link, const Note& own, std::vector<Note>* notes);

// Asks `is_pending` until it says no; false when the time is over.
template <class IsPending>
bool wait_until(Clock::time_point deadline, IsPending is_pending) {
  while (is_pending()) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return true;
}

}  // namespace jaxmoe
