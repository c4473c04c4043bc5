#include "cuda/host/symmetric_memory.h"

#include <fstream>
#include <functional>
#include <random>

#include "cuda/host/errors.h"

namespace jaxmoe {
namespace {

// The same in all containers of a machine, another one after it has started anew.
uint64_t host_name() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  std::getline(file, text);
  return std::hash<std::string>()(text);
}

// Process numbers may be the same in two containers.
uint64_t process_name() {
  static const uint64_t name = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  return name;
}

constexpr char kSpread[] =
    " Spread the experts over GPUs of one host that reach each other, and use the other mesh axes for data; or pass "
    "implementation=\"xla\".";

std::string reach_in_process(const BlockName& name) {
  int device = 0, can_reach = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceCanAccessPeer(&can_reach, device, name.device);
  if (status != cudaSuccess) return cuda_text("cudaDeviceCanAccessPeer", status);
  if (!can_reach) {
    return "GPU " + std::to_string(device) + " has no way to the memory of GPU " + std::to_string(name.device) + "." +
           kSpread;
  }
  status = cudaDeviceEnablePeerAccess(name.device, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {  // by XLA
    cudaGetLastError();
    status = cudaSuccess;
  }
  return status == cudaSuccess ? "" : cuda_text("cudaDeviceEnablePeerAccess", status);
}

}  // namespace

std::string allocate(int64_t bytes, cudaStream_t stream, SharedMemory* memory) {
  void* block = nullptr;
  cudaError_t status = cudaMalloc(&block, bytes);
  if (status != cudaSuccess) return cuda_text("cudaMalloc", status);
  memory->own = static_cast<std::byte*>(block);
  memory->bytes = bytes;
  status = cudaMemsetAsync(block, 0, bytes, stream);
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
  return status == cudaSuccess ? "" : cuda_text("cudaMemset", status);
}

std::string name_block(const SharedMemory& memory, BlockName* name) {
  *name = {.host = host_name(), .process = process_name(), .device = 0, .address = memory.own, .handle = {},
           .handle_status = cudaSuccess};
  const cudaError_t status = cudaGetDevice(&name->device);
  if (status != cudaSuccess) return cuda_text("cudaGetDevice", status);
  if (memory.own == nullptr) return "";
  name->handle_status = cudaIpcGetMemHandle(&name->handle, memory.own);
  cudaGetLastError();  // it matters to other processes alone, which report it
  return "";
}

std::string reach_peer(int32_t rank, const BlockName& name, SharedMemory* memory) {
  if (name.host != host_name()) return "Rank " + std::to_string(rank) + " runs on another host." + kSpread;
  if (name.process == process_name()) {
    if (name.address != memory->own) {
      if (std::string error = reach_in_process(name); !error.empty()) return error;
    }
    memory->of_ranks[rank] = name.address;
    return "";
  }
  const std::string peer = " of rank " + std::to_string(rank);
  if (name.handle_status != cudaSuccess) return cuda_text("cudaIpcGetMemHandle" + peer, name.handle_status) + kSpread;
  void* block = nullptr;
  const cudaError_t status = cudaIpcOpenMemHandle(&block, name.handle, cudaIpcMemLazyEnablePeerAccess);
  if (status != cudaSuccess) {
    return cuda_text("cudaIpcOpenMemHandle" + peer, status) + kSpread;
  }
  memory->of_ranks[rank] = static_cast<std::byte*>(block);
  memory->is_mapped[rank] = true;
  return "";
}

void release_peers(SharedMemory* memory) {
  for (int32_t rank = 0; rank < kMaxPeers; ++rank) {
    if (memory->is_mapped[rank]) cudaIpcCloseMemHandle(memory->of_ranks[rank]);
    memory->of_ranks[rank] = nullptr;
    memory->is_mapped[rank] = false;
  }
}

void release(SharedMemory* memory) {
  release_peers(memory);
  if (memory->own != nullptr) cudaFree(memory->own);
  *memory = {};
}

}  // namespace jaxmoe
