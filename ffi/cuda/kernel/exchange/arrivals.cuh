// Rows that arrive in an array of the caller's (common/exchange.h): where each comes from, pulled from there, and the
// row of every slot told to the rank that owns the token. All warps of a dispatch on its own.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/exchange.h"
#include "common/layout.h"
#include "cuda/device/copies.cuh"
#include "cuda/device/ptx/memory.cuh"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/exchange/dispatch.cuh"
#include "cuda/kernel/exchange/scaled_rows.cuh"

namespace jaxmoe::arrivals {

// Nobody has a row, and weights of slots without one have no gradient. By the crew, before peers are told that this
// rank's inputs are there: they write afterwards.
template <class Variant>
__device__ void forget_slots(const Cta<Variant>& cta) {
  const auto& p = cta.params;
  const bool gradients = p.weight_gradients != nullptr;
  auto* words = cta.template at<uint32_t>(gradients ? p.layout.routing_weight_gradients : p.layout.slot_rows);
  if (!gradients && p.made_slot_rows == nullptr) return;
  const uint32_t nothing = gradients ? 0 : ~0u;
  for (int64_t i = thread_of(cta); i < p.shape.slots(); i += threads_of(cta)) words[i] = nothing;
}

// What peers have told this rank about its slots, after all have raised kAnswersReady.
template <class Variant>
__device__ void take_slots(const Cta<Variant>& cta) {
  const auto& p = cta.params;
  const bool gradients = p.weight_gradients != nullptr;
  auto* result = gradients ? reinterpret_cast<uint32_t*>(p.weight_gradients)
                           : reinterpret_cast<uint32_t*>(p.made_slot_rows);
  if (result == nullptr) return;
  const auto* words = cta.template at<uint32_t>(gradients ? p.layout.routing_weight_gradients : p.layout.slot_rows);
  for (int64_t i = thread_of(cta); i < p.shape.slots(); i += threads_of(cta)) result[i] = __ldcg(words + i);
}

// Counts the rows of each expert and source and lays them out, in every block alike; the first block also tells the
// caller. After the wait for the inputs of all ranks.
template <class Variant>
__device__ void lay_out(const Cta<Variant>& cta) {
  const auto& p = cta.params;
  auto& table = cta.shared.arrivals;
  const int32_t ranks = p.shape.ranks, local = p.shape.local_experts(), lane = threadIdx.x % 32;
  // Counts of a rank that never came would be those of another launch.
  const bool usable = !cta.signals.given_up();
  for (int32_t i = threadIdx.x; i < local * ranks; i += blockDim.x) {
    const dispatch::SlotsOfExpert named = dispatch::slots_of_expert(cta, i / ranks, i % ranks);
    table.rows[i] = usable ? named.count : 0;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    int32_t start = 0;  // of the experts of a round
    for (int32_t first = 0; first < local; first += 32) {
      const int32_t expert = first + lane;
      int32_t rows = 0;
      for (int32_t source = 0; source < ranks && expert < local; ++source) rows += table.rows[expert * ranks + source];
      // Where the next expert begins follows from where this one does: one lane after the other, in registers.
      int32_t own = 0;
#pragma unroll 1
      for (int32_t other = 0; other < at_most(local - first, 32); ++other) {
        if (other == lane) own = start;
        start = p.room.start_behind(start, __shfl_sync(0xffffffff, rows, other));
      }
      if (expert < local) {
        const int32_t end = p.room.end_from(own);
        int32_t row = own;
        for (int32_t source = 0; source < ranks; ++source) {
          table.first_row[expert * ranks + source] = row;
          row = at_most(row + table.rows[expert * ranks + source], end);
        }
        if (cta.block() == 0 && p.rows_per_expert != nullptr) {
          p.rows_per_expert[expert] = row - own;
          p.dropped_rows[expert] = rows - (row - own);
        }
      }
    }
    if (lane == 0) table.first_row[local * ranks] = p.room.rows;
  }
  __syncthreads();
}

// Of a row of the array; kNone where it is nobody's. By any lane alone.
template <class Variant>
__device__ __forceinline__ RowTarget source_of(const Cta<Variant>& cta, int32_t row) {
  const auto& p = cta.params;
  uint32_t packed = RowTarget::kNone;
  if (p.topk_ids == nullptr) {
    packed = static_cast<uint32_t>(p.row_sources[row]);
  } else {
    const auto& table = cta.shared.arrivals;
    // The last expert and source that begin here or before.
    int32_t low = 0, high = p.shape.num_experts;  // as many as local experts times ranks
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      if (table.first_row[middle] <= row) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const int32_t place = row - table.first_row[low];
    const int32_t source = low % p.shape.ranks;
    if (place >= 0 && place < table.rows[low]) {
      const int32_t start = dispatch::slots_of_expert(cta, low / p.shape.ranks, source).start;
      packed = RowTarget::of(source, __ldcg(cta.peers.template here<int32_t>(
                                                slots_from_source(p.layout, p.head, source)) +
                                            start + place)).packed;
    }
  }
  // Only where a wait was given up, or where routes are not those of a dispatch.
  const RowTarget target{packed};
  const bool is_there = target.source() < p.shape.ranks && target.slot() < p.shape.slots();
  return is_there ? target : RowTarget{RowTarget::kNone};
}

// By a warp: a row times a factor to `target`. Returns in every lane the product of the row, without the factor, with
// that of the outputs, where there are any.
template <class Precision>
__device__ __forceinline__ float scale_row(uint4* target, const uint4* source, const uint4* outputs, float factor,
                                           int32_t vectors, int lane) {
  constexpr int kLoadsInFlight = 4;
  float product = 0.0f;
#pragma unroll 1
  for (int32_t first = lane; first < vectors; first += 32 * kLoadsInFlight) {
    uint4 values[kLoadsInFlight], others[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      if (first + 32 * i >= vectors) continue;
      values[i] = ptx::load_once(source + first + 32 * i);
      if (outputs != nullptr) others[i] = ptx::load_once(outputs + first + 32 * i);
    }
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      if (first + 32 * i >= vectors) continue;
      const uint32_t words[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
      const uint32_t other_words[4] = {others[i].x, others[i].y, others[i].z, others[i].w};
      uint32_t scaled[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = Precision::unpack(words[j]);
        scaled[j] = Precision::pack(factor * pair.x, factor * pair.y);
        if (outputs != nullptr) {
          const float2 other = Precision::unpack(other_words[j]);
          product += pair.x * other.x;
          product += pair.y * other.y;
        }
      }
      target[first + 32 * i] = {scaled[0], scaled[1], scaled[2], scaled[3]};
    }
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) product += __shfl_xor_sync(0xffffffff, product, distance);
  return product;
}

// Rows that a warp looks up at once.
inline constexpr int32_t kMostRowsAtOnce = 8;

// By a warp. Where it has one row alone, the way over NVLink counts, and a row of 7168 elements takes it twice.
__device__ __forceinline__ void copy_whole_row(uint4* target, const uint4* source, int32_t vectors, bool is_alone,
                                               int lane) {
  if (is_alone) {
    copy_row<16>(target, nullptr, source, vectors, lane);
  } else {
    copy_row(target, nullptr, source, vectors, lane);
  }
}

// All warps of the block.
template <class Variant>
__device__ void pull(const Cta<Variant>& cta) {
  using Precision = typename Variant::Precision;
  const auto& p = cta.params;
  const int lane = threadIdx.x % 32;
  const dispatch::Tokens<Variant> tokens(cta);
  const int32_t vectors = tokens.vectors(), blocks = scale_blocks(p.shape.hidden);
  uint4* const rows = static_cast<uint4*>(p.rows);
  // Dealt by warp, then by block: neighbouring rows, of which some may be nobody's, go to different multiprocessors.
  const int32_t warps = cta.blocks() * Roles::kWarps;
  const int32_t warp = threadIdx.x / 32 * cta.blocks() + cta.block();
  const int32_t balanced = ceil_div(p.room.rows, warps);
  const int32_t rows_at_once = at_most(balanced, kMostRowsAtOnce);
  for (int64_t first = int64_t{warp} * rows_at_once; first < p.room.rows; first += int64_t{warps} * rows_at_once) {
    const int32_t count = static_cast<int32_t>(at_most(p.room.rows - first, int64_t{rows_at_once}));
    RowTarget from{RowTarget::kNone};
    float weight = 1.0f;
    if (lane < count) {
      const int32_t row = static_cast<int32_t>(first) + lane;
      from = source_of(cta, row);
      const bool is_row = from.packed != RowTarget::kNone;
      if (p.made_row_sources != nullptr) {
        p.made_row_sources[row] = static_cast<int32_t>(from.packed);
        if (is_row) cta.peers.template at<int32_t>(from.source(), p.layout.slot_rows.offset)[from.slot()] = row;
      }
      if (p.weights != nullptr && is_row) {
        weight = __ldcg(cta.peers.template at<float>(from.source(), p.layout.routing_weights.offset) + from.slot());
      }
    }
    for (int32_t i = 0; i < count; ++i) {
      const RowTarget source{__shfl_sync(0xffffffff, from.packed, i)};
      const int64_t row = first + i;
      uint4* const target = rows + row * vectors;
      if (source.packed == RowTarget::kNone) {
        for (int32_t v = lane; v < vectors; v += 32) target[v] = uint4{0, 0, 0, 0};
        if constexpr (Precision::kTokens.is_scaled()) {
          for (int32_t block = lane; block < blocks; block += 32) p.scales[row * blocks + block] = 0.0f;
        }
        continue;
      }
      const dispatch::TokenPlace token{source.source(), source.slot() / p.shape.top_k};
      if constexpr (Precision::kTokens.is_scaled()) {
        const PulledScales pulled(tokens.scales_at(token), blocks, lane);
        copy_whole_row(target, tokens.at(token), vectors, rows_at_once == 1, lane);
        pulled.store(p.scales + row * blocks, 1, nullptr);
      } else if (p.weights == nullptr) {
        copy_whole_row(target, tokens.at(token), vectors, rows_at_once == 1, lane);
      } else {
        const uint4* outputs =
            p.outputs == nullptr ? nullptr : static_cast<const uint4*>(p.outputs) + row * vectors;
        const float product = scale_row<Precision>(target, tokens.at(token), outputs,
                                                   __shfl_sync(0xffffffff, weight, i), vectors, lane);
        if (p.weight_gradients != nullptr && lane == 0) {
          cta.peers.template at<float>(source.source(), p.layout.routing_weight_gradients.offset)[source.slot()] =
              product;
        }
      }
    }
  }
}

// All warps of a combine: rows of the caller's, to where each came from.
template <class Variant>
__device__ void push(const Cta<Variant>& cta) {
  const auto& p = cta.params;
  const int lane = threadIdx.x % 32;
  const int32_t vectors = p.shape.hidden * static_cast<int32_t>(sizeof(typename Cta<Variant>::Element)) / kVectorBytes;
  const uint4* const rows = static_cast<const uint4*>(p.outputs);
  const int32_t warps = cta.blocks() * Roles::kWarps;
  const int32_t warp = threadIdx.x / 32 * cta.blocks() + cta.block();
  const int32_t rows_at_once = at_most(ceil_div(p.room.rows, warps), 32);
  for (int64_t first = int64_t{warp} * rows_at_once; first < p.room.rows; first += int64_t{warps} * rows_at_once) {
    const int32_t count = static_cast<int32_t>(at_most(p.room.rows - first, int64_t{rows_at_once}));
    RowTarget to{RowTarget::kNone};
    if (lane < count) to = source_of(cta, static_cast<int32_t>(first) + lane);
    for (uint32_t there = __ballot_sync(0xffffffff, to.packed != RowTarget::kNone); there != 0; there &= there - 1) {
      const int32_t i = __ffs(there) - 1;
      const RowTarget target{__shfl_sync(0xffffffff, to.packed, i)};
      copy_whole_row(
          cta.peers.template at<uint4>(target.source(), p.layout.answers.offset) + int64_t{target.slot()} * vectors,
          rows + (first + i) * vectors, vectors, rows_at_once == 1, lane);
    }
  }
}

}  // namespace jaxmoe::arrivals
