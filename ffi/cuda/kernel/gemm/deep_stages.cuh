// Stages as math warps that decode weights see them: as steps, of which a stage holds one, or, of a tile with few rows, two
// (DeepStage). Which step of its stage a place is has a type, so that loops are unrolled over the steps of a stage: asked of a
// number it took so many more instructions that nothing was gained (docs/performance/four_bits.md, "Two steps to a
// stage"). A stage is waited for before its first step, and released after its last one. multiply.cuh makes these; load_deep.cuh
// fills deep stages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/device/ptx/registers.cuh"
#include "cuda/kernel/gemm/steps.cuh"

namespace jaxmoe {

// One step of a deep stage.
template <class Deep, int kNth>
struct StepOfDeepStage {
  using A = typename Deep::A;
  // Its part of the lines.
  struct B {
    static constexpr int kLineBytes = Deep::B::kLineBytes;

    // Where something lies that is so far from the first line, swizzled, of the first step.
    __device__ __forceinline__ const std::byte* at(int32_t offset) const {
      return lines + (offset ^ kNth * kLineBytes / Deep::kSteps);
    }

    const std::byte* lines;
  };

  const A& a;
  B b;
  const float* row_scales;  // null where there are none
};

// Kind: of the deep stages, or void where a stage has one step.
template <class Ring, class Kind>
class StepsOfStages {
 public:
  static constexpr bool kDeep = !std::is_void_v<Kind>;
  using Position = typename Ring::Position;  // of stages

  // The step with that number of a stage.
  template <int kNth_>
  struct Place {
    static constexpr int kNth = kNth_;
    Position stage;
  };
  using First = Place<0>;

 private:
  using Stage = std::conditional_t<kDeep, Kind, typename Ring::Stage>;
  static constexpr int steps_of_stage() {
    if constexpr (kDeep) return Kind::kSteps;
    return 1;
  }

 public:
  static constexpr int kSteps = steps_of_stage();
  using A = typename Stage::A;  // of a step
  static constexpr int kLineBytes = Stage::B::kLineBytes;  // of weights
  // Whether stages have half of the columns of a tile.
  static constexpr bool kHalf = kDeep && Stage::B::kBoxes < Ring::Stage::B::kBoxes;

  explicit __device__ StepsOfStages(const Ring& ring) : ring_(ring) {}

  // The step behind one.
  template <int kNth>
  static __device__ __forceinline__ auto after(Place<kNth> place) {
    if constexpr (kNth + 1 < kSteps) {
      return Place<kNth + 1>{place.stage};
    } else {
      return First{place.stage.after()};
    }
  }
  // The same where there is `more`; else one that is there in any case, and may be loaded once more.
  template <int kNth>
  static __device__ __forceinline__ auto after_or_there(Place<kNth> place, bool more) {
    if constexpr (kNth + 1 < kSteps) {
      return Place<kNth + 1>{place.stage};
    } else {
      return First{more ? place.stage.after() : place.stage};
    }
  }

  template <int kNth>
  __device__ __forceinline__ decltype(auto) stage(Place<kNth> place) const {
    if constexpr (kDeep) {
      auto& deep = ring_.stage(place.stage).template as<Kind>();
      const float* scales = nullptr;
      if constexpr (requires { deep.row_scales; }) scales = deep.row_scales[kNth];
      return StepOfDeepStage<Kind, kNth>{deep.a[kNth], {deep.b.lines[0]}, scales};
    } else {
      return static_cast<const typename Ring::Stage&>(ring_.stage(place.stage));
    }
  }

  // As those of Pipeline. Within a stage nothing is waited for.
  template <int kNth>
  __device__ __forceinline__ void wait(Place<kNth> place) const {
    if constexpr (kNth == 0) ring_.wait(place.stage);
  }
  template <int kNth>
  __device__ __forceinline__ bool looks_full(Place<kNth> place) const {
    if constexpr (kNth == 0) return ring_.looks_full(place.stage);
    return true;
  }
  template <int kNth>
  __device__ __forceinline__ void release(Place<kNth> place, int lane) const {
    if constexpr (kNth + 1 == kSteps) ring_.release(place.stage, lane);
  }

  // Calls body(place, step, more) for all steps of a tile, and meanwhile as for_each_step(); `position` moves on by their
  // stages. more: whether others follow, for who needs no register for the step then. The last stage may have a step that is
  // none of the tile: it is released without.
  template <bool kInOne = false, class Meanwhile, class Body>
  __device__ __forceinline__ void for_each(int32_t steps, Position& position, const Meanwhile& meanwhile,
                                           const Body& body) const {
    if constexpr (!kDeep) {
      for_each_step<kInOne>(steps, meanwhile, [&](int32_t step) __attribute__((always_inline)) {
        body(First{position}, step, step + 1 < steps);
        position.advance();
      });
    } else {
      // As for_each_step(), a stage at a time, and counted down.
      static_assert(kSteps == 2 && kAnnounceStep % 2 == 1 && !kInOne);
      int32_t left = steps;  // with those of the stage in hand
      int32_t end = steps - (kAnnounceStep - 1) > kSteps ? steps - (kAnnounceStep - 1) : kSteps;
#pragma unroll 1
      for (;;) {
#pragma unroll 1
        for (; left > end; left -= kSteps) {
          const First first{position};
          body(first, steps - left, left > 1);
          if (left > 1) {
            body(after(first), steps - left + 1, left > kSteps);
          } else {
            ring_.release(position, ptx::read_lane());
          }
          position.advance();
        }
        if (left <= 0) return;
        meanwhile(left > kSteps ? kAnnounceStep : steps - 1);
        end = left > kSteps ? kSteps : 0;
      }
    }
  }

 private:
  const Ring& ring_;
};

}  // namespace jaxmoe
