// What a launch of either pass tells the code of device/ about its rank: sizes, where everything lies, and where the
// arenas of all ranks are. kernel/params.cuh adds the arrays of the layer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/activation.h"
#include "common/layout.h"
#include "common/protocol.h"
#include "common/shape.h"

namespace jaxmoe {

// Most ranks of a group on one NVLink domain that the kernels are written for.
inline constexpr int32_t kMaxPeers = 8;
static_assert(kMaxExperts <= kMaxPeers * kMaxLocalExperts);

// In host memory that the GPU can write, one per arena; the first wait that is given up fills it.
struct FailureRecord {
  uint32_t complete;  // 1: `failure` is all there; 0: nothing has failed
  WaitFailure failure;
};

struct RankParams {
  Shape shape;
  Schedule schedule;
  HeadCapacity head;
  ArenaLayout layout;
  Activation activation;
  bool power_of_two_scales;  // of rows in 8 bits
  int32_t rank;
  uint64_t timeout_ns;  // of every wait
  FailureRecord* failure;
  std::byte* arenas[kMaxPeers];  // of all ranks, as this device sees them; arenas[rank] is its own
};

}  // namespace jaxmoe
