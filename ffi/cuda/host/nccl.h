// The functions of NCCL that jaxmoe calls. They are looked up in the libnccl that XLA has loaded, whose communicators
// they are given: nothing links to it. Caller: cuda/host/notes.cc.
//
// They have been the same since NCCL 2.0, so they are declared here and no header of a certain version is needed.
#pragma once

#include <cstddef>
#include <string>

#include <cuda_runtime.h>

namespace jaxmoe {

struct Nccl {
  using Communicator = void*;  // ncclComm_t
  using Result = int;          // ncclResult_t
  static constexpr Result kSuccess = 0;
  static constexpr Result kInProgress = 7;  // of communicators that do not block (2.14 and newer)
  static constexpr int kBytes = 0;          // ncclInt8

  const char* (*error_text)(Result);
  Result (*async_error)(Communicator, Result*);
  Result (*count)(Communicator, int*);
  Result (*rank)(Communicator, int*);
  Result (*device)(Communicator, int*);
  Result (*all_gather)(const void* own, void* all, std::size_t own_count, int type, Communicator, cudaStream_t);
};

// The loaded library. Returns what is missing, empty where nothing is.
std::string find_nccl(const Nccl** nccl);

}  // namespace jaxmoe
