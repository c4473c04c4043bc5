// What the hosts of a group's ranks tell each other before their GPUs share memory: an all-gather of one note each over
// XLA's communicator of the group. It happens when a program runs for the first time and when an arena grows.
// Caller: cuda/arena.cu.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/symmetric_memory.h"

namespace jaxmoe {

// How a rank reaches the others from the host. XLA destroys communicators while a process lives (one of two ranks when
// a program comes that also uses all four), so a handle is good for the run that it was given to and no longer.
struct Link {
  void* communicator;  // ncclComm_t; null for a group of one
  int32_t ranks;
  cudaStream_t stream;  // nothing is in flight on it
  double timeout_seconds;
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
  int64_t bytes;          // of the block that it wants to share
  int64_t succeeded;      // 0: the step before this exchange failed here; the rank's own error says why
  BlockName block;        // where others find it
};

// Sends `own` to all ranks and returns what each of them sent, in the order of ranks. Waits for all of them, or until
// the timeout. Returns what went wrong, empty where nothing did.
std::string exchange(const Link& link, const Note& own, std::vector<Note>* notes);

}  // namespace jaxmoe
