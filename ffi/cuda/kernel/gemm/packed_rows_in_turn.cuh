// Products of 17 to 80 rows in 8 bits with packed weights (packed_eight_bit.cuh), where all groups of a column fit one base
// (packed_many_rows.cuh). A warpgroup sees that before the first step, so that steps have no branch for other groups: in one
// ptxas would wait for the products that are under way (C7518).
//
// Two products are under way in turn: while one is multiplied the other is added up, and the factor of the next one decoded.
// Their factors are the two blocks of columns of a step, or one block in two steps. None is under way from one round of the
// loop to the next: there ptxas would run them one after the other (C7514).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/ptx/fence.cuh"
#include "cuda/device/ptx/registers.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/ptx/wgmma_registers.cuh"
#include "cuda/kernel/gemm/group_words.cuh"
#include "cuda/kernel/gemm/packed_lines.cuh"
#include "cuda/kernel/gemm/packed_many_rows.cuh"
#include "cuda/kernel/gemm/steps.cuh"
#include "cuda/kernel/roles.cuh"

namespace jaxmoe {

// The base of this lane's column.
class OneBase {
 public:
  // By all lanes: looks at all groups of its column.
  __device__ __forceinline__ explicit OneBase(const PackedPart& part) {
    const GroupsOfLane source(part);
    if (part.row_bytes % sizeof(uint4) == 0) {
      look_at_all<uint4>(source);
    } else {
      look_at_all<uint32_t>(source);
    }
    const uint32_t largest_two = __vmaxu2(largest_even_, largest_odd_ >> 8 & kEven);
    const uint32_t smallest_two = __vminu2(smallest_even_, smallest_odd_ >> 8 & kEven);
    const int32_t largest = max(largest_two & 0xffff, largest_two >> 16);
    const int32_t smallest = min(smallest_two & 0xffff, smallest_two >> 16);
    const int32_t base = max(largest - ColumnBases::kWindow, 0);
    // A column behind the last one has no groups, and any base.
    fits_ = source.bytes == 0 || (smallest >= base && largest < ColumnBases::kNaN && base <= ColumnBases::kMost);
    base_ = base;
  }

  __device__ __forceinline__ bool fits() const { return fits_; }
  __device__ __forceinline__ int32_t base() const { return base_; }

 private:
  static constexpr uint32_t kEven = 0x00ff00ff;  // bytes of a word

  // Eight loads are on their way at a time: memory is as far away as a step takes, and with four at a time a layer took
  // longer. With sixteen most tiles look at far more words than they have (docs/performance/four_bits.md). Behind the last
  // word of a column, that one is looked at again.
  template <class Word>
  __device__ __forceinline__ void look_at_all(const GroupsOfLane& source) {
    constexpr int32_t kAtOnce = 8, kBytes = sizeof(Word);
    const int32_t last = source.bytes - kBytes;
#pragma unroll 1
    for (int32_t first = 0; first <= last; first += kAtOnce * kBytes) {
      Word words[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        words[i] = __ldg(reinterpret_cast<const Word*>(source.groups + min(first + i * kBytes, last)));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) look_at(words[i]);
    }
  }
  __device__ __forceinline__ void look_at(const uint4& words) {
    look_at(words.x);
    look_at(words.y);
    look_at(words.z);
    look_at(words.w);
  }
  __device__ __forceinline__ void look_at(uint32_t word) {
    const uint32_t even = word & kEven;
    smallest_even_ = __vminu2(smallest_even_, even);
    largest_even_ = __vmaxu2(largest_even_, even);
    smallest_odd_ = __vminu2(smallest_odd_, word);
    largest_odd_ = __vmaxu2(largest_odd_, word);
  }

  // So far, of the even byte of each half of a word; and of halves, whose upper byte is the odd one.
  uint32_t smallest_even_ = kEven, largest_even_ = 0, smallest_odd_ = ~0u, largest_odd_ = 0;
  int32_t base_;
  bool fits_;
};

// How far the groups of a step lie above the base of this lane's column, a byte each; those of the next step are on their way.
class GroupsAboveBase {
 public:
  __device__ __forceinline__ void begin(const PackedPart& part, const OneBase& base) {
    const GroupsOfLane source(part);
    groups_ = source.groups;
    left_and_base_ = (source.bytes << kBaseBits) + base.base();
    load();
  }
  // Those of the next step, at first of the first one.
  __device__ __forceinline__ void take() {
    now_ = next_ - ptx::permute(left_and_base_, 0, 0x0000);
    load();
  }
  __device__ __forceinline__ uint32_t of_column(int column) const { return GroupsOfLane::of_column(now_, column); }
  // Of the quad's column.
  __device__ __forceinline__ int32_t base_of(int column) const {
    return GroupsOfLane::of_column(left_and_base_, column) & ((1 << kBaseBits) - 1);
  }

 private:
  static constexpr int32_t kBytes = sizeof(uint32_t), kBaseBits = 8;

  __device__ __forceinline__ void load() {
    ptx::load_if(left_and_base_ >= 1 << kBaseBits, next_, reinterpret_cast<const uint32_t*>(groups_));
    groups_ += kBytes;
    left_and_base_ -= kBytes << kBaseBits;
  }

  const uint8_t* groups_;  // those of the step behind the next one
  int32_t left_and_base_;  // bytes from there on, none or negative: nothing is loaded; the base. For two there is no register
  uint32_t now_ = 0, next_ = 0;
};

// `kLineBytes`: of packed columns in a stage.
template <int kColumnBlocks, int kBlocks, int kLineBytes>
class PackedRowsInTurn {
 public:
  // `base` fits in all lanes of the warpgroup. Of one block of columns steps are an even number.
  __device__ PackedRowsInTurn(const PackedPart& part, const OneBase& base) : part_(part), places_(part), base_(base) {}

  template <class Steps, class Meanwhile, class Track>
  __device__ __forceinline__ void multiply(ptx::Accumulators& sums, const Steps& ring,
                                           typename Steps::Position& position, int32_t steps,
                                           const Meanwhile& meanwhile, const Track& track) {
    groups_.begin(part_, base_);
    begin_sums<kBlocks>(sums);
    ptx::clear_accumulators(even_);
    ptx::clear_accumulators(odd_);
    using First = typename Steps::First;
    const First first{position};
    track.stall([&] { ring.wait(first); });
    groups_.take();
    load<0>(ring.stage(first));
    decode<0>(first_);
    load_second(ring, first, track);
    // From a place on, with its first factor decoded.
    const auto round = [&](auto place, int32_t step, bool more) __attribute__((always_inline)) {
      // The last round loads once more what it has, instead of branching around what the others do.
      const auto next = [&] {
        if constexpr (kSteps == 1) return Steps::after_or_there(place, more);
        if constexpr (kSteps > 1) return First{more ? place.stage.after(kSteps / Steps::kSteps) : place.stage};
      }();
      const bool full = ring.looks_full(next);
      issue<0>(ring, place);
      if constexpr (!kInPairs && kParts > 1) issue<1>(ring, place);
      if constexpr (kSteps > 1) groups_.take();
      decode<kColumnBlocks - 1>(second_);
      if constexpr (kInPairs || kParts == 1) issue<1>(ring, place);
      if (!full) track.stall([&] { ring.wait(next); });
      load<0>(ring.stage(next));
      groups_.take();
      add_items_from<0>(sums, ring, place, next);
      if constexpr (kSteps > 1) {
        if (more) load_second(ring, next, track);
      }
    };
    if constexpr (kSteps == 1) {
      ring.for_each(steps, position, meanwhile, round);
    } else {
      // As for_each_step(), a round at a time.
      static_assert(kAnnounceStep % kSteps == kSteps - 1);
      int32_t step = 0, end = at_most(steps, kAnnounceStep + 1) - kSteps;  // of the rounds before anything is due
#pragma unroll 1
      for (;;) {
#pragma unroll 1
        for (; step < end; step += kSteps) {
          round(First{position}, step, step + kSteps < steps);
          position = position.after(kSteps / Steps::kSteps);
        }
        if (step == steps) break;
        meanwhile(step + kSteps - 1);
        end = step < steps - kSteps ? steps - kSteps : steps;
      }
    }
    end_sums<kBlocks>(sums);
#pragma unroll
    for (int column = 0; column < 2 * kColumnBlocks; ++column) {
      scale_column<kBlocks>(sums, column, ColumnBases::scale_of(groups_.base_of(column)));
    }
  }

 private:
  static constexpr int kSteps = 3 - kColumnBlocks;  // of a round
  // A factor is multiplied with so many parts of the rows, one after the other, as there are registers for two products.
  static constexpr int kParts = kBlocks <= 6 ? 1 : 2, kOfPart = kBlocks / kParts;
  // Both factors of a step one after the other, part by part of the rows, whose scales they share.
  static constexpr bool kInPairs = kSteps == 1;
  static constexpr int kItems = 2 * kParts;  // of a round: those of the first factor and those of the second
  static_assert(kParts * kOfPart == kBlocks);
  template <int kItem>
  static constexpr int kFactor = kInPairs ? kItem % 2 : kItem / kParts;
  template <int kItem>
  static constexpr int kFirst = (kInPairs ? kItem / 2 : kItem % kParts) * kOfPart;  // row block

  using Factor = ptx::FactorWords[kSlicesOfStep];
  using Products = ptx::FewAccumulators<8 * kOfPart>;

  template <int kItem>
  __device__ __forceinline__ Factor& factor() {
    if constexpr (kFactor<kItem> == 0) {
      return first_;
    } else {
      return second_;
    }
  }
  template <int kItem>
  __device__ __forceinline__ Products& products() {
    if constexpr (kItem % 2 == 0) {
      return even_;
    } else {
      return odd_;
    }
  }
  // The place of a factor, in a round that begins at `place`.
  template <int kItem, class Steps, class Place>
  static __device__ __forceinline__ auto place_of(const Steps&, Place place) {
    if constexpr (kSteps > 1 && kFactor<kItem> > 0) {
      return Steps::after(place);
    } else {
      return place;
    }
  }

  // The words of the item that is decoded next.
  template <int kBlock, class Stage>
  __device__ __forceinline__ void load(const Stage& stage) {
#pragma unroll
    for (int half = 0; half < 2; ++half) words_[half] = places_.words(stage, kBlock, half);
  }
  template <class Steps, class Place, class Track>
  __device__ __forceinline__ void load_second(const Steps& ring, Place place, const Track& track) {
    if constexpr (kSteps > 1) {
      track.stall([&] { ring.wait(Steps::after(place)); });
      load<0>(ring.stage(Steps::after(place)));
    } else {
      load<1>(ring.stage(place));
    }
  }

  // With the groups of the step that was taken last.
  template <int kBlock>
  __device__ __forceinline__ void decode(Factor& factor) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t above = groups_.of_column(2 * kBlock + half);
      Magnitudes::shifted(group_of_lane(above)).decode_group(words_[half], factor, half);
    }
  }

  template <int kItem, class Steps, class Place>
  __device__ __forceinline__ void issue(const Steps& ring, Place place) {
    const uint32_t rows = ptx::as_uniform(descriptor_place(ring.stage(place_of<kItem>(ring, place)).a));
    issue_step<typename Steps::A>(products<kItem>(), factor<kItem>(), rows, kFirst<kItem>);
  }

  // Adds up what is under way, and issues the others. Scales of rows are loaded anew for each item, or each pair of them
  // (`of_last`: those of the item before): there are no registers to hold all.
  template <int kItem, class Steps, class Place, class Next>
  __device__ __forceinline__ void add_items_from(ptx::Accumulators& sums, const Steps& ring, Place place, Next next,
                                                 const RowScales<kOfPart>& of_last = {}) {
    constexpr bool kLastOfFactor = kFirst<kItem> == kBlocks - kOfPart;
    constexpr int kBlock = kFactor<kItem> * (kColumnBlocks - 1);  // of columns
    const auto of_item = place_of<kItem>(ring, place);
    const auto rows =
        kInPairs && kItem % 2 != 0 ? of_last : RowScales<kOfPart>::of(ring.stage(of_item), kFirst<kItem>);
    ptx::wait_products<kItem + 1 < kItems ? 1 : 0>();
    auto& products = this->products<kItem>();
    ptx::own_accumulators(products);
    if constexpr (kLastOfFactor) {
#pragma unroll
      for (auto& words : factor<kItem>()) ptx::own_words(words);
    }
#pragma unroll
    for (int i = 0; i < kOfPart; ++i) {
      float* const of_sums = sums.values + 4 * (16 * kBlock + kFirst<kItem> + i);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        of_sums[n] += (n % 2 == 0 ? rows.rows[i].x : rows.rows[i].y) * products.values[4 * i + n];
      }
    }
    if constexpr (kItem + 2 < kItems) issue<kItem + 2>(ring, place);
    if constexpr (kLastOfFactor && (kSteps > 1 || kFactor<kItem> == 1)) ring.release(of_item, ptx::read_lane());
    if constexpr (kLastOfFactor && kFactor<kItem> == 0) {
      decode<0>(first_);
      if constexpr (kSteps == 1) load<kColumnBlocks - 1>(ring.stage(next));
    }
    if constexpr (kItem + 1 < kItems) add_items_from<kItem + 1>(sums, ring, place, next, rows);
  }

  const PackedPart& part_;
  const GroupPlaces<kLineBytes> places_;
  const OneBase& base_;
  GroupsAboveBase groups_;
  uint4 words_[2];  // of the item that is decoded next
  Factor first_, second_;  // of the blocks of a step, or of two steps
  Products even_, odd_;
};

}  // namespace jaxmoe
