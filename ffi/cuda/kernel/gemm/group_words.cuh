// The scales of groups of packed weights, on their way from memory to the warps that multiply (packed.cuh,
// packed_eight_bit.cuh), which load them ahead of the steps that they are for: memory is as far away as a stage takes.
// Through shared memory, by asynchronous copies, they took 4 % longer (docs/performance.md).
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/ptx/memory.cuh"
#include "cuda/device/ptx/registers.cuh"

namespace jaxmoe {

// What a warp has of a tile of packed weights: 32 columns in two blocks of 16, or one block of a tile whose columns two
// blocks of threads share. In shared memory, since math warps have no register for it.
struct PackedPart {
  const uint8_t* groups[2];  // of its first column of each block
  int32_t columns[2];        // that the matrix has from there on
  int32_t row_bytes;         // groups of a column
  int32_t lines[2];          // of the stage, where its columns of each block begin
  int16_t row_blocks;        // of 8, of the tile
  bool sixteen;              // numbers to a group, else 32
  bool one_block;
  bool no_columns;           // the matrix has none of its warpgroup's

  static constexpr int32_t kLoadBytes = 16;  // of GroupWords
  // Whether the lanes that load groups have them brought into L2 as well, and not the producer, a task at a time: of groups
  // of 16 numbers, beside few rows. More rows, and groups of 32, were slower with it (docs/performance/four_bits.md). Only
  // for columns whose groups are whole loads.
  static __device__ __forceinline__ bool lanes_ask(bool sixteen, int32_t row_bytes, int32_t row_blocks) {
    constexpr int32_t kFewBlocks = 4;
    return sixteen && row_blocks <= kFewBlocks && row_bytes % kLoadBytes == 0;
  }

  // Calls body(columns, rows) with types for the code that multiplies as many blocks of columns, and of rows as many as the
  // first number that is enough.
  template <int... kRowBlocks, class Body>
  __device__ __forceinline__ void with_blocks(const Body& body) const {
    if (one_block) {
      with_row_blocks<1, kRowBlocks...>(body);
    } else {
      with_row_blocks<2, kRowBlocks...>(body);
    }
  }
  // Where it is known how many blocks of columns there are.
  template <int kColumnBlocks, int kRowBlocks, int... kMore, class Body>
  __device__ __forceinline__ void with_row_blocks(const Body& body) const {
    if constexpr (sizeof...(kMore) > 0) {
      if (row_blocks > kRowBlocks) return with_row_blocks<kColumnBlocks, kMore...>(body);
    }
    body(std::integral_constant<int, kColumnBlocks>{}, std::integral_constant<int, kRowBlocks>{});
  }
};

// With g = lane / 4 and t = lane % 4, the four lanes of a quad have columns g and g + 8 of each block: its column number
// 2 b + h is g + 8 h of block b. A lane loads the groups of the quad's column number t. This is where they lie.
struct GroupsOfLane {
  const uint8_t* groups;
  int32_t bytes;  // none of a column behind the last one

  __device__ __forceinline__ explicit GroupsOfLane(const PackedPart& part) {
    const int lane = ptx::read_lane(), g = lane / 4, t = lane % 4;
    const int32_t column = g + 8 * (t % 2);
    groups = part.groups[t / 2] + int64_t{column} * part.row_bytes;
    bytes = column < part.columns[t / 2] ? part.row_bytes : 0;
  }

  // What the lane of the quad's column `column` has.
  static __device__ __forceinline__ uint32_t of_column(uint32_t word, int column) {
    constexpr int kQuad = 4;
    return __shfl_sync(0xffffffff, word, column, kQuad);
  }
};

// Groups of several steps in one load, 16 bytes, handed on step by step. Nothing touches what begin() and take() have
// asked for before it is taken. Where PackedPart::lanes_ask(), each load also has the groups that lie kLaterBytes further on
// in its column brought into L2. kGroup numbers have a scale.
//
// Columns that are no whole number of loads begin at multiples of two bytes, since their numbers are a multiple of 64. Behind
// the last group of such a column may come the first ones of the next column: numbers there are zeros, so that only a scale
// that becomes none (GroupScales) reaches this column too.
//
// kSlides: there are some more registers, and of such columns the multiples of 16 bytes are loaded, each once: of two
// neighbours are the groups taken. None lies behind the matrix: its columns are a multiple of 8. Else the words from the
// multiple of four before the groups are loaded, five at a time. Each lane has another line, and L1 presumably looks up one
// in a cycle: the first five of all warps took longer than memory is away.
template <int kGroup, bool kSlides>
class GroupWords {
 public:
  __device__ __forceinline__ void begin(const PackedPart& part) {
    const GroupsOfLane source(part);
    groups_ = source.groups;
    left_ = source.bytes;
    whole_loads_ = part.row_bytes % kLoadBytes == 0;
    asks_ = PackedPart::lanes_ask(part.sixteen, part.row_bytes, part.row_blocks);
    if constexpr (kSlides) {
      if (!whole_loads_) {
        before_.offset = reinterpret_cast<uintptr_t>(groups_) % kLoadBytes;
        groups_ -= before_.offset;
        if (left_ > 0) left_ += before_.offset;
        load_vector(before_.words);
      }
    }
    load();
  }

  // Those of the first step, as long after begin() as can be.
  __device__ __forceinline__ void take_first() {
    take_loaded();
    load();
  }
  // Those of a step that is not the first, number kNth of its stage, which has kOfStage.
  template <int kNth, int kOfStage>
  __device__ __forceinline__ void take(int32_t step) {
    constexpr int kSteps = kLoadBytes * kGroup / kStepNumbers;  // that a load is for
    constexpr int kWords = 4 / kSteps;                          // to a step
    static_assert(kSteps % kOfStage == 0);
    if (kNth == 0 && (kOfStage == kSteps || step % kSteps == 0)) {
      take_loaded();
      load();
    } else {
      now_[0] = now_[kWords];
      now_[1] = now_[kWords + 1];
      now_[2] = now_[3];
    }
  }

  // A word of the step's groups of the quad's column `column`: the first, or the second.
  __device__ __forceinline__ uint32_t of_column(int column, bool second = false) const {
    return GroupsOfLane::of_column(second ? now_[1] : now_[0], column);
  }

 private:
  static constexpr int32_t kLoadBytes = PackedPart::kLoadBytes, kStepNumbers = 128, kLaterBytes = 64;

  // The 16 bytes before those of the next load, and where in them groups begin.
  struct Before {
    uint32_t words[4]{};
    int32_t offset = 0;  // bytes, even
  };
  struct Nothing {};

  __device__ __forceinline__ void load() {
    if (kSlides || whole_loads_) {
      if constexpr (kGroup == 16) ptx::prefetch_if(asks_ && left_ > kLaterBytes, groups_ + kLaterBytes);
      load_vector(next_);
      return;
    }
    const int32_t before = reinterpret_cast<uintptr_t>(groups_) % 4;
    const auto* const from = reinterpret_cast<const uint32_t*>(groups_ - before);
#pragma unroll
    for (int i = 0; i < 5; ++i) ptx::load_if(left_ > 0 && left_ + before > 4 * i, next_[i], from + i);
    pass_load();
  }
  __device__ __forceinline__ void load_vector(uint32_t* words) {
    ptx::load_if(left_ > 0, words, reinterpret_cast<const uint4*>(groups_));
    pass_load();
  }
  __device__ __forceinline__ void pass_load() {
    groups_ += kLoadBytes;
    left_ -= kLoadBytes;
  }

  __device__ __forceinline__ void take_loaded() {
    if constexpr (kSlides) {
      if (whole_loads_) {
#pragma unroll
        for (int i = 0; i < 4; ++i) now_[i] = next_[i];
      } else {
        take_between();
      }
    } else {
      take_words(next_, reinterpret_cast<uintptr_t>(groups_) % 4);
    }
  }
  // From before_ and what has been loaded.
  __device__ __forceinline__ void take_between() {
    uint32_t window[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      window[i] = before_.words[i];
      window[i + 4] = before_.words[i] = next_[i];
    }
#pragma unroll
    for (int i = 0; i < 6; ++i) window[i] = before_.offset & 8 ? window[i + 2] : window[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) window[i] = before_.offset & 4 ? window[i + 1] : window[i];
    take_words(window, before_.offset % 4);
  }
  // From that many bytes behind the first of five words on.
  __device__ __forceinline__ void take_words(const uint32_t* words, uint32_t bytes) {
#pragma unroll
    for (int i = 0; i < 4; ++i) now_[i] = __funnelshift_r(words[i], words[i + 1], 8 * bytes);
  }

  const uint8_t* groups_;    // the next load
  int32_t left_;             // bytes of the column from there on; none or negative: there is no such load
  bool whole_loads_, asks_;
  uint32_t now_[4]{}, next_[5]{};  // groups of this step and those after it; what is being loaded
  std::conditional_t<kSlides, Before, Nothing> before_;
};

// The same a step at a time, where there are no more registers: of groups of 32 that are a multiple of four to a column.
// kHoldsPlace: there are three for where the next one lies.
template <bool kHoldsPlace>
class OneGroupWord {
 public:
  __device__ __forceinline__ void begin(const PackedPart& part) {
    if constexpr (kHoldsPlace) {
      const GroupsOfLane source(part);
      groups_ = source.groups;
      bytes_ = source.bytes;
    }
    load(part, 0);
  }
  __device__ __forceinline__ void take(const PackedPart& part, int32_t step) {
    now_ = next_;
    load(part, step + 1);
  }
  __device__ __forceinline__ uint32_t of_column(int column) const { return GroupsOfLane::of_column(now_, column); }

 private:
  static constexpr int32_t kBytes = sizeof(uint32_t);

  __device__ __forceinline__ void load(const PackedPart& part, int32_t step) {
    if constexpr (kHoldsPlace) {
      ptx::load_if(bytes_ > 0, next_, reinterpret_cast<const uint32_t*>(groups_));
      groups_ += kBytes;
      bytes_ -= kBytes;
    } else {
      const GroupsOfLane source(part);
      const int32_t first = kBytes * step;
      ptx::load_if(first < source.bytes, next_, reinterpret_cast<const uint32_t*>(source.groups + first));
    }
  }

  const uint8_t* groups_;  // the next one, and those behind it
  int32_t bytes_;
  uint32_t now_ = 0, next_ = 0;
};

}  // namespace jaxmoe
