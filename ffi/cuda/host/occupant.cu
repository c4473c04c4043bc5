#include "cuda/host/occupant.h"

#include <cuda_runtime.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>

namespace jaxmoe {
namespace {

// In host memory that the GPU reads and writes.
struct Words {
  unsigned running;   // blocks that run
  unsigned let_go;    // 1: end
  unsigned in_time;   // blocks that have ended because of that, and not of their time
};

// So much shared memory that no other block fits beside it, of this kernel or of a layer's.
constexpr int kSharedBytes = 200 * 1024;

__global__ void hold(Words* words, unsigned long long most_ns) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  atomicAdd_system(&words->running, 1u);
  do {
    if (*const_cast<volatile unsigned*>(&words->let_go) != 0) {
      atomicAdd_system(&words->in_time, 1u);
      return;
    }
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < most_ns);
}

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

}  // namespace

struct Occupant::State {
  int device = 0;
  int blocks = 0;
  cudaStream_t stream = nullptr;
  Words* words = nullptr;
};

Occupant::Occupant(int device, int blocks, double most_seconds) : state_(std::make_unique<State>()) {
  State& s = *state_;
  s.device = device;
  s.blocks = blocks;
  check(cudaSetDevice(device), "cudaSetDevice");
  check(cudaStreamCreateWithFlags(&s.stream, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaHostAlloc(&s.words, sizeof(Words), cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  *s.words = {};
  check(cudaFuncSetAttribute(hold, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes), "cudaFuncSetAttribute");
  if (blocks == 0) return;
  hold<<<blocks, 1, kSharedBytes, s.stream>>>(s.words, static_cast<unsigned long long>(most_seconds * 1e9));
  check(cudaGetLastError(), "the kernel that holds multiprocessors");
  while (std::atomic_ref(s.words->running).load() < static_cast<unsigned>(blocks)) {
    if (cudaStreamQuery(s.stream) != cudaErrorNotReady) throw std::runtime_error("the multiprocessors were not free");
    std::this_thread::yield();
  }
}

Occupant::~Occupant() {
  release();
  // The words stay: to free them would wait for all kernels of all devices, and another occupant's does not end.
  cudaSetDevice(state_->device);
  cudaStreamSynchronize(state_->stream);
  cudaStreamDestroy(state_->stream);
}

void Occupant::release() { std::atomic_ref(state_->words->let_go).store(1); }

bool Occupant::held_to_the_end() {
  release();
  cudaSetDevice(state_->device);
  check(cudaStreamSynchronize(state_->stream), "cudaStreamSynchronize");
  return std::atomic_ref(state_->words->in_time).load() == static_cast<unsigned>(state_->blocks);
}

}  // namespace jaxmoe
