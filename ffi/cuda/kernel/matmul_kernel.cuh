// The two halves of a layer, around what the caller computes in between. This file is their table of contents.
//
//   dispatch_matmul   sort, publish      all warps of every block   as in a layer
//                     producer           warp 0, one thread         rows of the ring and matrices, into shared memory
//                     dispatch           warps 1 to 3               rows into the ring, the place of each in the array
//                     math               the other warpgroups       products, to their places
//   matmul_combine    producer, math     the same                   rows of the array times matrices, to the owners
//                     combine            the math warps             sums of answers
//
// Where a rank ends, all peers have raised kAnswersReady: nobody reads its tokens or writes its slots any more.
#pragma once

#include <cuda_runtime.h>

#include "cuda/device/ptx/registers.cuh"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/ends.cuh"
#include "cuda/kernel/exchange/arrivals.cuh"
#include "cuda/kernel/exchange/combine.cuh"
#include "cuda/kernel/exchange/dispatch.cuh"
#include "cuda/kernel/gemm/math.cuh"
#include "cuda/kernel/gemm/producer.cuh"
#include "cuda/kernel/roles.cuh"

namespace jaxmoe {

template <class Variant>
__global__ void __launch_bounds__(Roles::kThreads, 1) moe_dispatch_matmul(const __grid_constant__ MatmulParams params) {
  extern __shared__ __align__(1024) std::byte shared_bytes[];
  const Cta<Variant> cta(params, *reinterpret_cast<KernelStorage<Variant>*>(shared_bytes));
  ends::prepare(cta, [&] { arrivals::forget_slots(cta); });

  const int warp = Roles::warp();
  if (warp < Roles::kFirstMathWarp) {
    ptx::release_registers<Variant::config.registers.control>();
    if (warp == Roles::kProducerWarp) {
      if (ptx::elect_lane()) producer::run(cta);
    } else {
      const int dispatch_warp = warp - Roles::kFirstDispatchWarp;
      dispatch::run(cta, dispatch_warp, cta.block() * Roles::kDispatchWarps + dispatch_warp);
      if (cta.block() == 0 && warp == Roles::kFirstDispatchWarp && ptx::elect_lane()) combine::announce(cta);
    }
  } else {
    ptx::take_registers<Variant::config.registers.math>();
    math::run(cta);
    if (!cta.is_latecomer()) {
      combine::wait_for_answers(cta, warp - Roles::kFirstMathWarp, threadIdx.x % 32);
      arrivals::take_slots(cta, Team{int64_t{cta.blocks()} * Roles::kMathThreads,
                                     int64_t{cta.block()} * Roles::kMathThreads + threadIdx.x % Roles::kMathThreads});
    }
  }
  ends::leave(cta);
}

template <class Variant>
__global__ void __launch_bounds__(Roles::kThreads, 1) moe_matmul_combine(const __grid_constant__ MatmulParams params) {
  extern __shared__ __align__(1024) std::byte shared_bytes[];
  const Cta<Variant> cta(params, *reinterpret_cast<KernelStorage<Variant>*>(shared_bytes));
  ends::prepare_for_answers(cta);

  const int warp = Roles::warp();
  if (warp < Roles::kFirstMathWarp) {
    ptx::release_registers<Variant::config.registers.control>();
    if (warp == Roles::kProducerWarp) {
      if (ptx::elect_lane()) producer::run(cta);
    } else if (cta.block() == 0 && warp == Roles::kFirstDispatchWarp && ptx::elect_lane()) {
      combine::announce(cta);
    }
  } else {
    ptx::take_registers<Variant::config.registers.math>();
    math::run(cta);
    combine::run<Variant::config.registers.math>(cta, warp - Roles::kFirstMathWarp, threadIdx.x % 32);
  }
  ends::leave(cta);
}

}  // namespace jaxmoe
