#include "cuda/symmetric_memory.h"

#include <cstring>
#include <memory>
#include <thread>

#include "cuda/nccl.h"

namespace jaxmoe {
namespace {

std::string cuda_text(const char* what, cudaError_t status) {
  cudaGetLastError();  // so that the failure is not reported a second time, by whoever asks next
  return std::string(what) + ": " + cudaGetErrorString(status) + ".";
}

#if JAXMOE_HAS_NCCL

std::string nccl_text(const Nccl& nccl, const char* what, ncclResult_t result) {
  cudaGetLastError();
  return std::string(what) + ": " + nccl.error_text(result) + " (" + nccl.last_error(nullptr) + ").";
}

// Communicators may be non-blocking.
ncclResult_t finish(const Nccl& nccl, ncclComm_t communicator, ncclResult_t result) {
  while (result == ncclInProgress) {
    std::this_thread::yield();
    if (nccl.async_error(communicator, &result) != ncclSuccess) return ncclSystemError;
  }
  return result;
}

// Where a rank's block lies for this device, and the first words of it.
struct PeerView {
  void* block;
  Note note;
};

// One thread for each rank. Up to 2.28 NCCL offers these addresses to device code alone; the parts of a window that are
// read for them have the same place from 2.28.9 to 2.32.3, so header and library may be of different versions.
__global__ void look_at_peers(ncclWindow_t window, PeerView* views) {
  void* block = ncclGetLsaPointer(window, 0, static_cast<int>(threadIdx.x));
  views[threadIdx.x] = {block, *static_cast<const Note*>(block)};
}

std::string peer_views(void* window, int32_t ranks, cudaStream_t stream, PeerView* views) {
  void* page = nullptr;
  cudaError_t status = cudaHostAlloc(&page, ranks * sizeof(PeerView), cudaHostAllocMapped | cudaHostAllocPortable);
  if (status != cudaSuccess) return cuda_text("host memory for the addresses of peers", status);
  look_at_peers<<<1, ranks, 0, stream>>>(static_cast<ncclWindow_t>(window), static_cast<PeerView*>(page));
  status = cudaGetLastError();
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
  std::memcpy(views, page, ranks * sizeof(PeerView));
  cudaFreeHost(page);
  return status == cudaSuccess ? "" : cuda_text("the addresses of peers could not be read", status);
}

std::string share_and_look(void* communicator, int32_t ranks, cudaStream_t stream, SharedMemory* memory,
                           PeerView* views) {
  const Nccl* nccl = nullptr;
  if (const std::string missing = find_nccl(&nccl); !missing.empty()) return missing;
  const auto group = static_cast<ncclComm_t>(communicator);
  ncclWindow_t window = nullptr;
  const ncclResult_t result = finish(
      *nccl, group, nccl->register_window(group, memory->own, memory->bytes, &window, NCCL_WIN_COLL_SYMMETRIC));
  if (result != ncclSuccess) return nccl_text(*nccl, "ncclCommWindowRegister", result);
  if (window == nullptr) {
    return "NCCL gave no window: symmetric memory is off or not available on this machine. Do not set "
           "NCCL_CUMEM_ENABLE=0 or NCCL_WIN_ENABLE=0.";
  }
  memory->communicator = communicator;
  memory->window = window;
  if (const std::string error = peer_views(window, ranks, stream, views); !error.empty()) return error;
  for (int32_t rank = 0; rank < ranks; ++rank) memory->of_ranks[rank] = static_cast<std::byte*>(views[rank].block);
  return "";
}

#endif

}  // namespace

std::string allocate(int64_t bytes, bool shareable, SharedMemory* memory) {
  void* block = nullptr;
  if (!shareable) {
    const cudaError_t status = cudaMalloc(&block, bytes);
    if (status != cudaSuccess) return cuda_text("cudaMalloc", status);
    memory->of_ranks[0] = static_cast<std::byte*>(block);
  } else {
#if JAXMOE_HAS_NCCL
    const Nccl* nccl = nullptr;
    if (const std::string missing = find_nccl(&nccl); !missing.empty()) return missing;
    const ncclResult_t result = nccl->allocate(&block, bytes);
    if (result != ncclSuccess) return nccl_text(*nccl, "ncclMemAlloc", result);
#endif
  }
  memory->own = static_cast<std::byte*>(block);
  memory->bytes = bytes;
  memory->shareable = shareable;
  return "";
}

void release(SharedMemory* memory) {
  if (memory->own != nullptr && !memory->shareable) cudaFree(memory->own);
#if JAXMOE_HAS_NCCL
  const Nccl* nccl = nullptr;
  if (memory->own != nullptr && memory->shareable && find_nccl(&nccl).empty()) {
    if (memory->window != nullptr) {
      const auto group = static_cast<ncclComm_t>(memory->communicator);
      finish(*nccl, group, nccl->deregister_window(group, static_cast<ncclWindow_t>(memory->window)));
    }
    nccl->free(memory->own);
  }
#endif
  *memory = {};
}

#if JAXMOE_HAS_NCCL

std::string share(void* communicator, int32_t ranks, cudaStream_t stream, SharedMemory* memory) {
  PeerView views[kMaxPeers];
  return share_and_look(communicator, ranks, stream, memory, views);
}

std::string membership(void* communicator, Membership* found) {
  const Nccl* nccl = nullptr;
  if (const std::string missing = find_nccl(&nccl); !missing.empty()) return missing;
  const auto group = static_cast<ncclComm_t>(communicator);
  ncclResult_t result = nccl->count(group, &found->ranks);
  if (result == ncclSuccess) result = nccl->rank(group, &found->rank);
  if (result == ncclSuccess) result = nccl->device(group, &found->device);
  if (result != ncclSuccess) return nccl_text(*nccl, "XLA's communicator cannot be asked for its ranks", result);
  found->in_reach = nccl->team_in_reach(group).nRanks;
  return "";
}

std::string exchange(void* communicator, int32_t ranks, const Note& own, cudaStream_t stream, SharedMemory* board,
                     std::vector<Note>* notes) {
  struct Return {
    SharedMemory* board;
    ~Return() { release(board); }
  } on_return{board};
  cudaError_t status = cudaMemcpyAsync(board->own, &own, sizeof(own), cudaMemcpyHostToDevice, stream);
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
  if (status != cudaSuccess) return cuda_text("cudaMemcpy", status);
  // A window is there once all ranks have called for it, each after it has written: it is the meeting and the mail.
  PeerView views[kMaxPeers];
  if (const std::string error = share_and_look(communicator, ranks, stream, board, views); !error.empty()) return error;
  notes->clear();
  for (int32_t rank = 0; rank < ranks; ++rank) notes->push_back(views[rank].note);
  return "";
}

#else

namespace {
constexpr char kNoHeader[] =
    "jaxmoe was built without NCCL's header nccl_device.h, through which it reaches other GPUs. Install "
    "nvidia-nccl-cu13>=2.28 in the environment that builds, then build jaxmoe again.";
}

std::string share(void*, int32_t, cudaStream_t, SharedMemory*) { return kNoHeader; }
std::string membership(void*, Membership*) { return kNoHeader; }
std::string exchange(void*, int32_t, const Note&, cudaStream_t, SharedMemory*, std::vector<Note>*) { return kNoHeader; }

#endif

}  // namespace jaxmoe
