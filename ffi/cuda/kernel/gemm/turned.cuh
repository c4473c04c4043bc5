// The order of numbers along the depth of rows beside packed weights (packed.cuh, packed_eight_bit.cuh): tokens in the
// ring, and h.
//
// A thread decodes neighbours of a column at a time. The tensor cores want the first factor so that four threads have
// neighbouring places in turn, and the order along the depth is free as long as both factors have the same. So rows are
// written in the order in which their partners come out of words, and nothing is moved between them:
//
//   16 bits   place 8 v + 2 t + e of each 64 has the number 16 t + 8 (v / 4) + v % 4 + 4 e
//   8 bits    of few rows to a tile, of each 32 the even numbers come first and then the odd ones: a product is one group.
//             Of more, place 4 w + t, in words of 4, of each 128 has the word 8 t + w: a thread has one group of a step
//
// Tokens are turned on their way into the ring (exchange/dispatch.cuh), h on its way out of shared memory
// (epilogues/across.cuh, across_eight_bit_h.cuh).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace jaxmoe::turned {

inline constexpr int kNumbers = 64;  // of 16 bits: as many are turned among themselves, 8 lanes with a vector each

// The vector of places that lane `lane` of each 8 has after turn_vector().
__device__ __forceinline__ int vector_of(int lane) { return lane % 2 * 4 + lane % 8 / 2; }

// Of four lanes, every second one, lane i has word i of all afterwards: a transposition, one bit of the lane at a time. All
// lanes of a warp.
__device__ __forceinline__ uint4 transpose_words(const uint4& vector, int lane) {
  uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int bit = 0; bit < 2; ++bit) {
    const int distance = 2 << bit;
    const bool upper = (lane & distance) != 0;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t& first = words[bit == 0 ? 2 * pair : pair];
      uint32_t& second = words[bit == 0 ? 2 * pair + 1 : pair + 2];
      const uint32_t received = __shfl_xor_sync(0xffffffff, upper ? first : second, distance);
      (upper ? first : second) = received;
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

// The numbers of a lane's vector of a row in memory order, of 16 bits each, become those of its vector of places. All
// lanes of a warp.
__device__ __forceinline__ uint4 turn_vector(const uint4& numbers, int lane) {
  // Numbers i and i + 4 of 8 are neighbours.
  return transpose_words({__byte_perm(numbers.x, numbers.z, 0x5410), __byte_perm(numbers.x, numbers.z, 0x7632),
                          __byte_perm(numbers.y, numbers.w, 0x5410), __byte_perm(numbers.y, numbers.w, 0x7632)},
                         lane);
}

// Which order rows of 8 bits have, by how many a block of threads multiplies in their tile: packed_few_rows.cuh, or
// packed_many_rows.cuh and packed_rows_in_turn.cuh.
__host__ __device__ constexpr bool has_even_first(int32_t rows) { return rows <= 16; }

// The same of 8 bits. Of few rows every two lanes turn theirs together.
__device__ __forceinline__ uint4 turn_vector_of_bytes(const uint4& numbers, int lane, bool even_first) {
  if (!even_first) return transpose_words(numbers, lane);
  constexpr uint32_t kEven = 0x6420, kOdd = 0x7531;
  const uint2 even{__byte_perm(numbers.x, numbers.y, kEven), __byte_perm(numbers.z, numbers.w, kEven)};
  const uint2 odd{__byte_perm(numbers.x, numbers.y, kOdd), __byte_perm(numbers.z, numbers.w, kOdd)};
  const bool second = lane % 2 != 0;
  const uint32_t x = __shfl_xor_sync(0xffffffff, second ? even.x : odd.x, 1);
  const uint32_t y = __shfl_xor_sync(0xffffffff, second ? even.y : odd.y, 1);
  return second ? uint4{x, y, odd.x, odd.y} : uint4{even.x, even.y, x, y};
}
// The vector of places that a lane of each 8 has then.
__device__ __forceinline__ int vector_of_bytes(int lane, bool even_first) {
  return even_first ? lane % 8 : vector_of(lane);
}

// Turns rows of `numbers` of 16 bits each in shared memory where they lie, `stride` bytes apart. By a warp, of whose rows nobody
// reads or writes anything meanwhile.
__device__ __forceinline__ void turn_rows(std::byte* rows, int32_t count, int32_t stride, int32_t numbers, int lane) {
  constexpr int kLanes = 8, kAtOnce = 32 / kLanes;
  if (count <= 0 || numbers <= 0) return;
  const int32_t pieces = numbers / kNumbers;  // of a row
#pragma unroll 1
  for (int32_t first = 0; first < count * pieces; first += kAtOnce) {
    const int32_t piece = first + lane / kLanes;
    const bool exists = piece < count * pieces;
    auto* const vectors = reinterpret_cast<uint4*>(rows + piece / pieces * stride) + piece % pieces * kLanes;
    const uint4 turned = turn_vector(exists ? vectors[lane % kLanes] : uint4{}, lane);
    if (exists) vectors[vector_of(lane)] = turned;
  }
}

}  // namespace jaxmoe::turned
