// The ranks of a group, as a kernel of one of them reaches them: the arena of every rank is mapped into the addresses
// of this device. All that crosses from GPU to GPU goes to an address that at() returns or through raise(), so this is
// where another fabric than NVLink would enter.
//
//   at()      where dispatch pulls rows from, and where sort and the epilogues push to, by bulk copies too
//   raise()   after fence(), a flag at one rank; what the thread did or acquired before fence() is visible to whoever
//             sees it. A store that released by itself would wait for the same once more, for each peer.
//   seen()    what a peer has raised here
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/device/ptx/memory.cuh"
#include "cuda/device/rank_params.cuh"

namespace jaxmoe {

class Peers {
 public:
  explicit __device__ Peers(const RankParams& params) : params_(params) {}

  // This rank's number.
  __device__ __forceinline__ int32_t rank() const { return params_.rank; }

  __device__ __forceinline__ std::byte* arena(int32_t rank) const { return params_.arenas[rank]; }
  template <class T>
  __device__ __forceinline__ T* at(int32_t rank, int64_t offset) const {
    return reinterpret_cast<T*>(arena(rank) + offset);
  }
  // In this rank's own arena.
  template <class T>
  __device__ __forceinline__ T* here(int64_t offset) const {
    return at<T>(params_.rank, offset);
  }

  static __device__ __forceinline__ void fence() { ptx::fence_system(); }
  template <class Word>
  static __device__ __forceinline__ void raise(Word* flag, Word value) {
    ptx::store_relaxed_system(flag, value);
  }
  template <class Word>
  static __device__ __forceinline__ Word seen(const Word* flag) {
    return ptx::load_acquire_system(flag);
  }

 private:
  const RankParams& params_;
};

}  // namespace jaxmoe
