// The functions of NCCL that jaxmoe calls. They are looked up in the libnccl that XLA has loaded, whose communicators
// they are given; nothing links to it. Caller: cuda/symmetric_memory.cu.
//
// The header comes from the package nvidia-nccl-cu13 (cmake/nccl.cmake). Without it the CUDA part is built all the
// same, for groups of one GPU.
#pragma once

#if __has_include(<nccl_device.h>)
#define JAXMOE_HAS_NCCL 1
#include <nccl.h>
#include <nccl_device.h>
#else
#define JAXMOE_HAS_NCCL 0
#endif

#include <string>

namespace jaxmoe {

#if JAXMOE_HAS_NCCL

// Windows that peers reach by load and store exist from this version on.
inline constexpr int kOldestNccl = NCCL_VERSION(2, 28, 0);

struct Nccl {
  int version;

  decltype(&::ncclGetErrorString) error_text;
  decltype(&::ncclGetLastError) last_error;
  decltype(&::ncclCommGetAsyncError) async_error;
  decltype(&::ncclCommCount) count;
  decltype(&::ncclCommUserRank) rank;
  decltype(&::ncclCommCuDevice) device;
  ncclTeam_t (*team_in_reach)(ncclComm_t);  // ncclTeamLsa, which is overloaded
  decltype(&::ncclMemAlloc) allocate;
  decltype(&::ncclMemFree) free;
  decltype(&::ncclCommWindowRegister) register_window;
  decltype(&::ncclCommWindowDeregister) deregister_window;
};

// The loaded library. Returns what is missing, empty where nothing is.
std::string find_nccl(const Nccl** nccl);

#endif

}  // namespace jaxmoe
