// The kernels of both passes: one launch from tokens to outputs, or from tokens and the gradients of their outputs to
// all gradients of the layer. This file is their table of contents.
//
//   sort, publish         all warps of every block     slots sorted by expert, inputs where peers reach them
//   producer              warp 0, one thread           what the products read, into shared memory
//   dispatch              warps 1 to 3                 rows from their owners into the ring
//   releaser              warp 3, one thread           signals of tasks, where weights are decoded in registers
//   math                  the other two warpgroups     products (gemm/products.cuh), their results to rings, owners and
//                                                      the layer's results
//   combine               dispatch and math warps      sums of answers, by whoever has nothing else to do
//
// Launched with a block for every multiprocessor; how many of them have one decides the crew (crew.cuh). Blocks of the
// crew wait for each other.
#pragma once

#include <cuda_runtime.h>

#include "cuda/device/ptx/registers.cuh"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/ends.cuh"
#include "cuda/kernel/exchange/combine.cuh"
#include "cuda/kernel/exchange/dispatch.cuh"
#include "cuda/kernel/gemm/math.cuh"
#include "cuda/kernel/gemm/producer.cuh"
#include "cuda/kernel/gemm/releaser.cuh"
#include "cuda/kernel/roles.cuh"

namespace jaxmoe {

template <class Variant>
__device__ __forceinline__ void run_dispatch_warp(const Cta<Variant>& cta, int dispatch_warp) {
  constexpr int kDispatching = Roles::kDispatchWarps - kHasReleaser<Variant>;
  if constexpr (kHasReleaser<Variant>) {
    static_assert(!kAddsUpEarly<Variant> && !Cta<Variant>::kSumsAtExperts, "these count on all dispatch warps");
    if (dispatch_warp == kDispatching) {
      if (ptx::elect_lane()) releaser::run(cta);
      return;
    }
  }
  // Numbered from 0 on among those that dispatch.
  const int dispatcher = cta.block() * kDispatching + dispatch_warp - combine::announces_alone(cta);
  if (dispatcher >= 0) dispatch::run(cta, dispatch_warp, dispatcher);
  combine::run_beside_products<Variant::config.registers.control>(cta, dispatch_warp, ptx::read_lane());
}

template <class Variant>
__device__ __forceinline__ void run_block(const typename Variant::Params& params) {
  extern __shared__ __align__(1024) std::byte shared_bytes[];
  auto& shared = *reinterpret_cast<KernelStorage<Variant>*>(shared_bytes);
  const Cta<Variant> cta(params, shared);
  ends::prepare(cta, [] {});
  if constexpr (Cta<Variant>::kWeightGradients) {
    ends::clear_unused_gradients(cta);
  } else if constexpr (!Cta<Variant>::kBackward) {
    ends::clear_unused_saved(cta);
  }

  const int warp = Roles::warp();
  if (warp < Roles::kFirstMathWarp) {
    ptx::release_registers<Variant::config.registers.control>();
    if (warp == Roles::kProducerWarp) {
      if (ptx::elect_lane()) producer::run(cta);
    } else {
      run_dispatch_warp(cta, warp - Roles::kFirstDispatchWarp);
    }
  } else {
    ptx::take_registers<Variant::config.registers.math>();
    math::run(cta);
    // With sums at experts the warp's number is asked for again: math has no register to hold it there.
    const int again = Cta<Variant>::kSumsAtExperts ? Roles::warp() : warp;
    combine::run<Variant::config.registers.math>(cta, again - Roles::kFirstMathWarp, ptx::read_lane());
  }
  ends::leave(cta);
  cta.timeline.end();
}

// Two names, for profilers.
template <class Variant>
__global__ void __launch_bounds__(Roles::kThreads, 1) moe_forward(const __grid_constant__ ForwardParams params) {
  run_block<Variant>(params);
}
template <class Variant>
__global__ void __launch_bounds__(Roles::kThreads, 1) moe_backward(const __grid_constant__ BackwardParams params) {
  run_block<Variant>(params);
}

}  // namespace jaxmoe
