// What a stage of the pipeline holds: as much of both factors of a product as one step multiplies, as the copy engine
// lays it down and the tensor cores read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/tiling.h"
#include "cuda/device/ptx/wgmma.cuh"

namespace jaxmoe {

inline constexpr int32_t kBoxWidth = 64;  // rows of A, columns of B
inline constexpr int32_t kFewRows = 16;   // of a box of A for a tile that is not full, in a forward pass

// `kWidth` rows of A, or columns of B, in boxes of 64. A box is 64 lines of 128 bytes, the period of the swizzle. Where
// the factor lies along the depth (ptx::Major), a line is one row or column; along the width, all 64 at one depth.
template <class Element_, int kWidth>
struct OperandTile {
  using Element = Element_;
  static constexpr int kLineBytes = 128;
  static constexpr int kLine = kLineBytes / sizeof(Element);  // elements
  static constexpr int kBoxes = kWidth / kBoxWidth;
  static constexpr uint32_t kBoxBytes = kBoxWidth * kLineBytes;
  static constexpr int kSliceDepth = 32 / sizeof(Element);  // of one wgmma
  static_assert(kWidth % kFewRows == 0);

  // Between one slice and the next.
  template <ptx::Major kMajor>
  static constexpr uint32_t kSliceBytes = kSliceDepth * (kMajor == ptx::Major::kDepth ? sizeof(Element) : kLineBytes);

  // Where the tensor cores find it, from the box on that begins with a row or column.
  template <ptx::Major kMajor>
  __device__ __forceinline__ uint64_t descriptor(int first) const {
    static_assert(kMajor == ptx::Major::kDepth || kLine == kBoxWidth);
    return kMajor == ptx::Major::kDepth ? ptx::depth_major_descriptor(lines[first])
                                        : ptx::width_major_descriptor(lines[first], kBoxBytes);
  }

  __device__ __forceinline__ Element* box(int box) { return lines[kBoxWidth * box]; }

  static constexpr int kPanels = 1;
  __device__ __forceinline__ OperandTile& panel(int) { return *this; }

  Element lines[kWidth][kLine];  // box by box
};

// A factor along the depth, two lines deep: all first lines, then all second ones.
template <class Panel>
struct TwoPanels {
  static constexpr int kPanels = 2;
  static constexpr int kLineBytes = Panel::kLineBytes, kLine = Panel::kLine, kBoxBytes = Panel::kBoxBytes;

  __device__ __forceinline__ Panel& panel(int panel) { return panels[panel]; }
  __device__ __forceinline__ const Panel& panel(int panel) const { return panels[panel]; }

  Panel panels[kPanels];
};

// `kWidth` columns of B with two numbers of 4 bits in a byte, as deep as two lines of 16-bit rows. A line is 64 bytes
// of one column. Beside rows of 16 bits nothing is swizzled: half a warp reads 32 bytes of 4 lines at a time, which
// costs two turns at shared memory instead of one. A swizzle of 64 bytes would not change that, since it leaves the
// halves together. Beside rows of 8 bits a warp reads 16 bytes of 8 lines (of few rows), and with that swizzle in one turn
// instead of four, or whole lines.
//
// With 128 bytes to a line it has two steps, swizzled as others of that length. The copy engine takes about as long for a
// line of 64 bytes, and of few rows it is such lines that math warps waited for (docs/performance/four_bits.md, "Two steps to
// a stage").
template <int kWidth, int kLineBytes_ = 64>
struct PackedTile {
  static constexpr int kLineBytes = kLineBytes_;
  static constexpr int kLine = 2 * kLineBytes;  // numbers
  static constexpr int kBoxColumns = 128;
  static constexpr int kBoxes = kWidth / kBoxColumns;
  static constexpr uint32_t kBoxBytes = kBoxColumns * kLineBytes;

  __device__ __forceinline__ std::byte* box(int box) { return lines[kBoxColumns * box]; }
  // Where something lies that is so far from the first line, swizzled.
  __device__ __forceinline__ const std::byte* at(int32_t offset) const { return lines[0] + offset; }

  std::byte lines[kWidth][kLineBytes];
};
template <int kWidth>
using DeepPackedTile = PackedTile<kWidth, 2 * PackedTile<kWidth>::kLineBytes>;

// The lower half of the descriptor of a factor along the depth, from its first row on, which has the address. To be made
// uniform (ptx::as_uniform) where it is used.
template <class Tile>
__device__ __forceinline__ uint32_t descriptor_place(const Tile& tile) {
  return static_cast<uint32_t>(tile.template descriptor<ptx::Major::kDepth>(0));
}

template <class A_, class B_>
struct Stage {
  using A = A_;
  using B = B_;
  static_assert(A::kBoxBytes % 1024 == 0 && B::kBoxBytes % 1024 == 0, "a box begins a period of the swizzle's pattern");

  A a;
  B b;
};

// With the scales of `kRows` rows of A, for the depth of a line.
template <class A, class B, int kRows>
struct ScaledStage : Stage<A, B> {
  alignas(1024) float row_scales[kRows];  // the stage behind it begins a period too
};

// Two steps of a tile with few rows (deep_stages.cuh): what the rows of a step leave free holds the weights of another.
template <class A_, class B_>
struct DeepStage {
  using A = A_;  // of a step
  using B = B_;
  static constexpr int kSteps = 2;
  static_assert(A::kBoxBytes % 1024 == 0 && sizeof(A) % 1024 == 0 && B::kBoxBytes % 1024 == 0);

  A a[kSteps];
  B b;
};
template <class A, class B, int kRows>
struct ScaledDeepStage : DeepStage<A, B> {
  alignas(1024) float row_scales[DeepStage<A, B>::kSteps][kRows];
};

// A stage that holds one step, or the two of a deep one in its place: of a kind of its own where blocks share the columns of a
// tile.
template <std::size_t kBytes>
struct RoomBehind {
  std::byte bytes[kBytes];
};
template <>
struct RoomBehind<0> {};
template <class One, class Deep_, class DeepHalf_ = Deep_>
struct StageOfEither : One, RoomBehind<(sizeof(Deep_) > sizeof(One) ? sizeof(Deep_) - sizeof(One) : 0)> {
  using Deep = Deep_;
  using DeepHalf = DeepHalf_;
  static_assert(sizeof(DeepHalf) <= sizeof(One) || sizeof(DeepHalf) <= sizeof(Deep));

  template <class Kind>
  __device__ __forceinline__ Kind& as() {
    return *reinterpret_cast<Kind*>(this);
  }
};

template <class Stage>
inline constexpr bool kHasDeepHalf = !std::is_same_v<typename Stage::DeepHalf, typename Stage::Deep>;

}  // namespace jaxmoe
