// The kernels that bring tokens to experts of the caller's own, and what these answer back. This file is their table of
// contents.
//
//   dispatch   tokens and slot lists to where peers reach them, then rows pulled into an array of the caller's
//   combine    rows of such an array pushed to the owners of the tokens, then added up
//
// All warps do the same. A dispatch sorts by the ids that it is given, or takes the routes of one before. Launched and
// mustered as the kernels of a layer are (kernel.cuh), on as many multiprocessors as the caller leaves it. Where a rank
// ends, all peers have raised kAnswersReady: nobody reads its tokens or writes its slots any more.
#pragma once

#include <cuda_runtime.h>

#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/ends.cuh"
#include "cuda/kernel/exchange/arrivals.cuh"
#include "cuda/kernel/exchange/combine.cuh"
#include "cuda/kernel/exchange/publish.cuh"
#include "cuda/kernel/exchange/sort.cuh"
#include "cuda/kernel/roles.cuh"

namespace jaxmoe {

template <class Variant>
__global__ void __launch_bounds__(Roles::kThreads, 1) moe_dispatch(const __grid_constant__ ExchangeParams params) {
  extern __shared__ __align__(1024) std::byte shared_bytes[];
  const Cta<Variant> cta(params, *reinterpret_cast<ExchangeStorage*>(shared_bytes));
  const auto copy_inputs = [&](Team team) {
    publish::copy_inputs(cta, team);
    publish::copy_weights(cta, team);
  };
  ends::enroll<true>(cta, ends::DoNothing{}, copy_inputs, [&] {
    arrivals::forget_slots(cta);
    if (params.topk_ids != nullptr) sort::run(cta);
    publish::tell_peers(cta);
    ptx::fence_proxy_async_shared();  // the sorter's scratch lies where pieces of rows will
    publish::wait_for_all(cta, Signal::kInputsReady, Site::kWalk);
    if (params.topk_ids != nullptr) {
      arrivals::lay_out(cta);
      arrivals::pull_tokens(cta);
      arrivals::clear_unused_rows(cta);
    } else if constexpr (!Variant::Precision::kTokens.is_scaled()) {  // wide rows alone: gradients, and other tokens
      arrivals::pull_rows(cta);
    }
    publish::tell_all(cta, Signal::kTasksDone, Signal::kAnswersReady, Site::kAnnounce);
    publish::wait_for_all(cta, Signal::kAnswersReady, Site::kCombine);
    arrivals::take_slots(cta, Team{threads_of(cta), thread_of(cta)});
  });
  ends::leave(cta);
}

template <class Variant>
__global__ void __launch_bounds__(Roles::kThreads, 1) moe_combine(const __grid_constant__ ExchangeParams params) {
  extern __shared__ __align__(1024) std::byte shared_bytes[];
  const Cta<Variant> cta(params, *reinterpret_cast<ExchangeStorage*>(shared_bytes));
  ends::enroll<false>(cta, ends::allow_answers(cta), [](Team) {}, [&] {
    publish::wait_for_all(cta, Signal::kInputsReady, Site::kWalk);
    arrivals::push(cta);
    publish::tell_all(cta, Signal::kTasksDone, Signal::kAnswersReady, Site::kAnnounce);
    const int warp = Roles::warp();
    if (warp >= Roles::kFirstMathWarp) {
      combine::run<Variant::config.registers.math>(cta, warp - Roles::kFirstMathWarp, threadIdx.x % 32);
    }
  });
  ends::leave(cta);
}

}  // namespace jaxmoe
