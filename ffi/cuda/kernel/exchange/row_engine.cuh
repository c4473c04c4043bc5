// Rows copied by the copy engine, through shared memory. A warp that loads and stores itself has 2 KiB in flight; this
// way it has a whole piece of a row, so that few multiprocessors fill the links. For exchanges beside other work.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/shape.h"
#include "cuda/device/ptx/fence.cuh"
#include "cuda/device/ptx/mbarrier.cuh"
#include "cuda/device/ptx/tma.cuh"
#include "cuda/kernel/storage.cuh"

namespace jaxmoe {

// That of one warp, all of whose lanes call everything here.
class RowEngine {
 public:
  // After a barrier of the block behind whatever used the pieces' memory before, whose threads have called
  // ptx::fence_proxy_async_shared(), and behind the acquire of what is copied.
  __device__ RowEngine(RowPieces& pieces, int warp, int lane)
      : piece_(pieces.bytes[warp]), full_(&pieces.full[warp]), lane_(lane) {
    if (lane_ != 0) return;
    ptx::mbarrier_init(full_, 1);
    ptx::fence_mbarrier_init();
    ptx::fence_proxy_async_global();
  }

  // `bytes` from `source` to every address that to_each(store) calls store(address) with, in all lanes alike. All are
  // multiples of 16.
  template <class ToEach>
  __device__ __forceinline__ void copy(const void* source, int64_t bytes, const ToEach& to_each) {
    for (int64_t begin = 0; begin < bytes; begin += RowPieces::kBytes) {
      const auto size = static_cast<uint32_t>(at_most(bytes - begin, int64_t{RowPieces::kBytes}));
      if (lane_ == 0) {
        ptx::wait_stores_read<0>();  // of the piece before, which lay here
        ptx::mbarrier_arrive_expect_bytes(full_, size);
        ptx::load_bytes(piece_, static_cast<const std::byte*>(source) + begin, full_, size);
        while (!ptx::mbarrier_try_wait(full_, parity_)) {
        }
      }
      parity_ ^= 1;
      __syncwarp();
      to_each([&](void* target) {
        if (lane_ == 0) ptx::store_bytes(static_cast<std::byte*>(target) + begin, piece_, size);
      });
      if (lane_ == 0) ptx::commit_stores();
    }
  }

  // All that was copied is in memory, for a release behind a barrier of the block.
  __device__ __forceinline__ void finish() const {
    if (lane_ == 0) {
      ptx::wait_stores_complete<0>();
      ptx::fence_proxy_async_global();
    }
    __syncwarp();
  }

 private:
  std::byte* const piece_;
  uint64_t* const full_;
  const int lane_;
  uint32_t parity_ = 0;
};

}  // namespace jaxmoe
