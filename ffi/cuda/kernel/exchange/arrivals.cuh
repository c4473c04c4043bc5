// Rows that arrive in an array of the caller's (common/exchange.h): laid out, pulled, and the row of every slot told to
// the rank that owns the token. And the way back, by routes that are known. All warps of a dispatch or a combine.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/exchange.h"
#include "common/layout.h"
#include "cuda/device/copies.cuh"
#include "cuda/device/ptx/memory.cuh"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/exchange/dispatch.cuh"
#include "cuda/kernel/exchange/row_engine.cuh"

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
__device__ void take_slots(const Cta<Variant>& cta, Team team) {
  const auto& p = cta.params;
  const bool gradients = p.weight_gradients != nullptr;
  auto* result = gradients ? reinterpret_cast<uint32_t*>(p.weight_gradients)
                           : reinterpret_cast<uint32_t*>(p.made_slot_rows);
  if (result == nullptr) return;
  const auto* words = cta.template at<uint32_t>(gradients ? p.layout.routing_weight_gradients : p.layout.slot_rows);
  for (int64_t i = team.thread; i < p.shape.slots(); i += team.threads) result[i] = __ldcg(words + i);
}

// Counts the rows of each expert and source and lays them out, in every block alike; the first block also tells the
// caller. After the wait for the inputs of all ranks.
template <class Variant>
__device__ void lay_out(const Cta<Variant>& cta) {
  const auto& p = cta.params;
  auto& table = cta.shared.pulled.arrivals;
  const int32_t ranks = p.shape.ranks, local = p.shape.local_experts(), lane = threadIdx.x % 32;
  // Counts of a rank that never came would be those of another launch.
  const bool usable = !cta.signals.given_up();
  for (int32_t i = threadIdx.x; i < local * ranks; i += blockDim.x) {
    const int32_t expert = i / ranks, source = i % ranks;
    const dispatch::SlotsOfExpert named = dispatch::slots_of_expert(cta, expert, source);
    table.rows[i] = usable ? named.count : 0;
    table.first_place[source * local + expert] = usable ? named.start : 0;
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
        if (cta.block() == 0) {
          p.rows_per_expert[expert] = row - own;
          p.dropped_rows[expert] = rows - (row - own);
        }
      }
    }
  }
  __syncthreads();
}

// The last of `count` numbers, which do not fall, that is at most `value`; the first where none is.
__device__ __forceinline__ int32_t last_at_most(const int32_t* numbers, int32_t count, int32_t value) {
  int32_t low = 0, high = count;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    if (numbers[middle] <= value) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The row of the slot with a place in the order of a source; kNoRow where it found no room.
inline constexpr int32_t kNoRow = -1;
template <class Variant>
__device__ __forceinline__ int32_t row_of_place(const Cta<Variant>& cta, int32_t source, int32_t place) {
  const auto& p = cta.params;
  const auto& table = cta.shared.pulled.arrivals;
  const int32_t ranks = p.shape.ranks, local = p.shape.local_experts();
  const int32_t* first_places = table.first_place + source * local;
  const int32_t expert = last_at_most(first_places, local, place);
  const int32_t nth = place - first_places[expert];
  // Only where a wait was given up.
  if (nth < 0 || nth >= table.rows[expert * ranks + source]) return kNoRow;
  const int32_t row = table.first_row[expert * ranks + source] + nth;
  return row < p.room.end_from(table.first_row[expert * ranks]) ? row : kNoRow;
}

// Whether a row of the array is nobody's.
template <class Variant>
__device__ __forceinline__ bool is_unused(const Cta<Variant>& cta, int32_t row) {
  const auto& table = cta.shared.pulled.arrivals;
  const int32_t last = last_at_most(table.first_row, cta.params.shape.num_experts, row);  // local experts times ranks
  return row - table.first_row[last] >= table.rows[last];
}

// By a warp: a row times a factor to `target`. Returns in every lane the product of the row, without the factor, with
// that of the outputs.
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
      others[i] = ptx::load_once(outputs + first + 32 * i);
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
        const float2 other = Precision::unpack(other_words[j]);
        product += pair.x * other.x;
        product += pair.y * other.y;
      }
      target[first + 32 * i] = {scaled[0], scaled[1], scaled[2], scaled[3]};
    }
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) product += __shfl_xor_sync(0xffffffff, product, distance);
  return product;
}

// Vectors that a warp copies at a time.
inline constexpr int32_t kVectorsAtOnce = 4 * 32;

// By a warp: vectors from `begin` on, up to `end`, of a token to all rows that lanes in `there` have the numbers of.
__device__ __forceinline__ void spread(uint4* rows, const uint4* token, int32_t vectors, int32_t begin, int32_t end,
                                       int32_t row, uint32_t there, int lane) {
  constexpr int kLoadsInFlight = kVectorsAtOnce / 32;
#pragma unroll 1
  for (int32_t start = begin; start < end; start += kVectorsAtOnce) {
    uint4 values[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const int32_t vector = start + 32 * i + lane;
      if (vector < end) values[i] = ptx::load_once(token + vector);
    }
#pragma unroll 1
    for (uint32_t left = there; left != 0; left &= left - 1) {
      uint4* const target = rows + int64_t{__shfl_sync(0xffffffff, row, __ffs(left) - 1)} * vectors;
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) {
        const int32_t vector = start + 32 * i + lane;
        if (vector < end) target[vector] = values[i];
      }
    }
  }
}

// The same of the first `count` scales, `stride` to a row. They are asked for before between() and stored after it, so
// that their way over NVLink is not waited for twice.
template <class Between>
__device__ __forceinline__ void spread_scales(float* rows, const float* token, int32_t count, int32_t stride,
                                              int32_t row, uint32_t there, int lane, const Between& between) {
  constexpr int kInFlight = 2;  // of rows of up to 8192 columns all
  float held[kInFlight];
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    if (lane + 32 * i < count) held[i] = __ldcg(token + lane + 32 * i);
  }
  between();
  for (uint32_t left = there; left != 0; left &= left - 1) {
    float* const target = rows + int64_t{__shfl_sync(0xffffffff, row, __ffs(left) - 1)} * stride;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (lane + 32 * i < count) target[lane + 32 * i] = held[i];
    }
    for (int32_t block = lane + 32 * kInFlight; block < count; block += 32) target[block] = __ldcg(token + block);
  }
}

// All warps of the block: every token that local experts want, which crosses the link once, to all of its rows.
template <class Variant>
__device__ void pull_tokens(const Cta<Variant>& cta) {
  using Precision = typename Variant::Precision;
  const auto& p = cta.params;
  const int lane = threadIdx.x % 32;
  const int32_t ranks = p.shape.ranks, top_k = p.shape.top_k;
  const dispatch::Tokens<Variant> tokens(cta);
  const int32_t vectors = tokens.vectors(), blocks = scale_blocks(p.shape.hidden);
  const int32_t warps = cta.blocks() * Roles::kWarps;
  // Neighbouring multiprocessors take tokens of different ranks. Where there are more warps than tokens, several share
  // one.
  const int32_t items = ranks * p.shape.tokens;
  const int32_t sharing = items > 0 && items < warps ? warps / items : 1;
  const int32_t parts = at_most(ceil_div(vectors, kVectorsAtOnce), sharing);
  const int32_t vectors_of_part = ceil_div(ceil_div(vectors, parts), 32) * 32;
  RowEngine engine(cta.shared.pulled.pieces, threadIdx.x / 32, lane);
  for (int32_t item = threadIdx.x / 32 * cta.blocks() + cta.block(); item < items * parts; item += warps) {
    const int32_t part = item % parts;
    const int32_t source = (item / parts + cta.peers.rank()) % ranks;
    const int32_t token = item / parts / ranks;
    const int32_t slot = token * top_k + lane;
    int32_t row = kNoRow;
    if (lane < top_k) {
      const int64_t places = slots_from_source(p.layout, p.head, source);
      const int32_t place = __ldcg(cta.peers.template here<int32_t>(places) + slot);
      if (place >= 0) row = row_of_place(cta, source, place);
    }
    const uint32_t there = __ballot_sync(0xffffffff, row != kNoRow);
    if (there == 0) continue;
    if (part == 0 && row != kNoRow) {
      p.made_row_sources[row] = static_cast<int32_t>(RowTarget::of(source, slot).packed);
      cta.peers.template at<int32_t>(source, p.layout.slot_rows.offset)[slot] = row;
    }
    const dispatch::TokenPlace place{source, token};
    const int32_t begin = part * vectors_of_part, end = at_most(begin + vectors_of_part, vectors);
    const auto spread_elements = [&] {
      if (p.beside) {
        engine.copy(tokens.at(place) + begin, int64_t{end - begin} * kVectorBytes, [&](const auto& store) {
          for (uint32_t left = there; left != 0; left &= left - 1) {
            const int64_t target = __shfl_sync(0xffffffff, row, __ffs(left) - 1);
            store(static_cast<uint4*>(p.rows) + target * vectors + begin);
          }
        });
      } else {
        spread(static_cast<uint4*>(p.rows), tokens.at(place), vectors, begin, end, row, there, lane);
      }
    };
    if constexpr (Precision::kTokens.is_scaled()) {
      spread_scales(p.scales, tokens.scales_at(place), part == 0 ? blocks : 0, blocks, row, there, lane,
                    spread_elements);
    } else {
      spread_elements();
    }
  }
  engine.finish();
}

// By a warp: a row that is nobody's.
template <class Variant>
__device__ __forceinline__ void clear_row(const Cta<Variant>& cta, int64_t row, int32_t vectors, int lane) {
  const auto& p = cta.params;
  uint4* const target = static_cast<uint4*>(p.rows) + row * vectors;
  for (int32_t v = lane; v < vectors; v += 32) target[v] = uint4{0, 0, 0, 0};
  if constexpr (Variant::Precision::kTokens.is_scaled()) {
    const int32_t blocks = scale_blocks(p.shape.hidden);
    for (int32_t block = lane; block < blocks; block += 32) p.scales[row * blocks + block] = 0.0f;
  }
}

// The rows of the array in turns, for warps: each(first, count) for neighbouring ones. Dealt by warp, then by block:
// neighbouring rows, of which some may be nobody's, go to different multiprocessors.
inline constexpr int32_t kMostRowsAtOnce = 8;
template <class Variant, class Each>
__device__ __forceinline__ void deal_rows(const Cta<Variant>& cta, const Each& each) {
  const int32_t rows = cta.params.room.rows;
  const int32_t warps = cta.blocks() * Roles::kWarps;
  const int32_t warp = threadIdx.x / 32 * cta.blocks() + cta.block();
  const int32_t at_once = at_most(ceil_div(rows, warps), kMostRowsAtOnce);
  for (int64_t first = int64_t{warp} * at_once; first < rows; first += int64_t{warps} * at_once) {
    each(static_cast<int32_t>(first), static_cast<int32_t>(at_most(rows - first, int64_t{at_once})));
  }
}

// All warps of the block.
template <class Variant>
__device__ void clear_unused_rows(const Cta<Variant>& cta) {
  const auto& p = cta.params;
  const int lane = threadIdx.x % 32;
  const int32_t vectors = dispatch::Tokens<Variant>(cta).vectors();
  deal_rows(cta, [&](int32_t first, int32_t count) {
    const bool unused = lane < count && is_unused(cta, first + lane);
    if (unused) p.made_row_sources[first + lane] = static_cast<int32_t>(RowTarget::kNone);
    for (uint32_t left = __ballot_sync(0xffffffff, unused); left != 0; left &= left - 1) {
      clear_row(cta, first + __ffs(left) - 1, vectors, lane);
    }
  });
}

// Where a row comes from by routes that the caller has, which may be anything; kNone where it is nobody's.
template <class Variant>
__device__ __forceinline__ RowTarget known_source(const Cta<Variant>& cta, int32_t row) {
  const auto& p = cta.params;
  const RowTarget source{static_cast<uint32_t>(p.row_sources[row])};
  const bool is_there = source.source() < p.shape.ranks && source.slot() < p.shape.slots();
  return is_there ? source : RowTarget{RowTarget::kNone};
}

// By a warp. Where it has one row alone, the way over NVLink counts, and a row of 7168 elements takes it twice.
__device__ __forceinline__ void copy_whole_row(uint4* target, const uint4* source, int32_t vectors, bool is_alone,
                                               int lane) {
  if (is_alone) {
    copy_row<16>(target, nullptr, source, vectors, lane);
  } else {
    copy_row(target, nullptr, source, vectors, lane);
  }
}

// All warps of the block: rows by known routes, each for itself, times the weights of their slots where there are any.
template <class Variant>
__device__ void pull_rows(const Cta<Variant>& cta) {
  using Precision = typename Variant::Precision::Wide;
  const auto& p = cta.params;
  const int lane = threadIdx.x % 32;
  const dispatch::Tokens<Variant> tokens(cta);
  const int32_t vectors = tokens.vectors();
  deal_rows(cta, [&](int32_t first, int32_t count) {
    RowTarget from{RowTarget::kNone};
    float weight = 1.0f;
    if (lane < count) from = known_source(cta, first + lane);
    if (p.weights != nullptr && from.packed != RowTarget::kNone) {
      weight = __ldcg(cta.peers.template at<float>(from.source(), p.layout.routing_weights.offset) + from.slot());
    }
    for (int32_t i = 0; i < count; ++i) {
      const RowTarget source{__shfl_sync(0xffffffff, from.packed, i)};
      const int64_t row = first + i;
      if (source.packed == RowTarget::kNone) {
        clear_row(cta, row, vectors, lane);
        continue;
      }
      uint4* const target = static_cast<uint4*>(p.rows) + row * vectors;
      const uint4* token = tokens.at({source.source(), source.slot() / p.shape.top_k});
      if (p.weights == nullptr) {
        copy_whole_row(target, token, vectors, count == 1, lane);
        continue;
      }
      const uint4* outputs = static_cast<const uint4*>(p.outputs) + row * vectors;
      const float product =
          scale_row<Precision>(target, token, outputs, __shfl_sync(0xffffffff, weight, i), vectors, lane);
      if (lane == 0) {
        cta.peers.template at<float>(source.source(), p.layout.routing_weight_gradients.offset)[source.slot()] =
            product;
      }
    }
  });
}

// All warps of a combine: rows of the caller's, to where each came from.
template <class Variant>
__device__ void push(const Cta<Variant>& cta) {
  const auto& p = cta.params;
  const int lane = threadIdx.x % 32;
  const int32_t vectors = p.shape.hidden * static_cast<int32_t>(sizeof(typename Cta<Variant>::Element)) / kVectorBytes;
  const uint4* const rows = static_cast<const uint4*>(p.outputs);
  RowEngine engine(cta.shared.pulled.pieces, threadIdx.x / 32, lane);
  deal_rows(cta, [&](int32_t first, int32_t count) {
    RowTarget to{RowTarget::kNone};
    if (lane < count) to = known_source(cta, first + lane);
    for (uint32_t left = __ballot_sync(0xffffffff, to.packed != RowTarget::kNone); left != 0; left &= left - 1) {
      const int32_t i = __ffs(left) - 1;
      const RowTarget target{__shfl_sync(0xffffffff, to.packed, i)};
      const uint4* const row = rows + int64_t{first + i} * vectors;
      uint4* const answer =
          cta.peers.template at<uint4>(target.source(), p.layout.answers.offset) + int64_t{target.slot()} * vectors;
      if (p.beside) {
        engine.copy(row, int64_t{vectors} * kVectorBytes, [&](const auto& store) { store(answer); });
      } else {
        copy_whole_row(answer, row, vectors, count == 1, lane);
      }
    }
  });
  engine.finish();
}

}  // namespace jaxmoe::arrivals
