// The producer's half of a product: one thread loads what all steps of one tile multiply into the ring of stages.
// producer.cuh waits for the signal before a task (and then calls ptx::fence_proxy_async_global()); multiply.cuh has
// the half that consumes the stages. Both halves, in every block of a cluster, take the same tasks in the same order; a
// block that has no row tile in a task of its cluster takes it with rows == 0.
#pragma once

#include <cstdint>

#include "common/block_part.h"
#include "common/scheduler.h"
#include "cuda/device/ptx/tma.cuh"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm/products.cuh"

namespace jaxmoe {

// The row of A that this block's part of a task begins with.
template <class A, class Variant>
__device__ __forceinline__ int32_t first_row_of_a(const Cta<Variant>& cta, const Task& task) {
  if constexpr (A::kMajor == ptx::Major::kDepth) return first_row_of<Variant>(task);
  return first_weight_row(cta, task);
}

// Whether the rows of A come a whole tile at once, or few at a time: those of a forward pass, which all lie along the
// depth. It is fewer copies and, of few rows, fewer bytes. Others come in boxes of 64.
template <class A>
inline constexpr bool kInTiles = requires { A::Tensor::kFewMap; };

// The B of a block's part of a task. Where the blocks of the cluster all need the same, each loads a part of it for all.
template <class Product, class Variant>
class LoadedB {
  using Shape = GemmShape<Variant>;
  using Ring = typename Shape::Ring;
  using Stage = typename Shape::Stage;
  using B = typename Product::B;
  static constexpr int kBoxes = Stage::B::kBoxes;
  static constexpr int kSharedBoxes = kBoxes / Tiling::kBlocks;
  // Of a column tile that the blocks share each has the boxes of its half, in the place of the first ones.
  static constexpr bool kMayShare = Cta<Variant>::kSharesColumns && Product::kGemm == Gemm::kDown;

 public:
  // A block without rows has no use for B, but its copy of a shared one arrives all the same.
  __device__ __forceinline__ LoadedB(const Cta<Variant>& cta, const Task& task, bool any_rows, uint64_t policy)
      : cta_(cta), task_(task), own_(has_own_columns(task)), any_(any_rows || !own_),
        half_(kMayShare && cta.shares_columns(task)), policy_(policy), b_(B::columns_of(cta.params, task)) {
    if constexpr (kMayShare) b_.first = cta.first_answer_column(task);
  }

  // Of a step.
  __device__ __forceinline__ uint32_t bytes() const {
    return any_ ? half_ ? sizeof(Stage::b) / 2 : sizeof(Stage::b) : 0;
  }
  __device__ __forceinline__ void load(Stage& stage, uint64_t* full, int32_t part, int32_t k) const {
    const auto& p = cta_.params;
    if (!own_) {
#pragma unroll
      for (int i = 0; i < kSharedBoxes; ++i) {
        const int box = ptx::read_cluster_rank() * kSharedBoxes + i;
        b_.load(p, task_, part, k, box, [&](const CUtensorMap& map, auto... at) {
          constexpr uint16_t kAll = (1u << Tiling::kBlocks) - 1;
          ptx::load_box_multicast(stage.b.box(box), &map, full, policy_, kAll, at...);
        });
      }
    } else if (any_) {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        if (kMayShare && half_ && box == kBoxes / 2) break;
        b_.load(p, task_, part, k, box, [&](const CUtensorMap& map, auto... at) {
          ptx::load_box(stage.b.box(box), &map, full, policy_, at...);
        });
      }
    }
  }

 private:
  const Cta<Variant>& cta_;
  const Task& task_;
  const bool own_, any_, half_;
  const uint64_t policy_;
  B b_;
};

// Whether weights are on their way before the rows of a task are waited for: those that nobody has to decode first. Deep stages
// have a way of their own (load_deep.cuh).
template <class Variant>
inline constexpr bool kWeightsFirst = Variant::kPass == Pass::kForward && !Cta<Variant>::kDecodes;

// Loads the B of a task's first steps, of at most so many, as far as stages are empty. Returns of how many: load_tile() goes on
// from there. The blocks of a cluster may come to different numbers: bytes may land in a stage before its block expects them.
template <class Product, class Variant>
__device__ __forceinline__ int32_t load_weights_first(const Cta<Variant>& cta,
                                                      const typename GemmShape<Variant>::Ring& ring,
                                                      typename GemmShape<Variant>::Ring::Position position,
                                                      const Task& task, uint64_t b_policy, int32_t most) {
  using A = typename GemmShape<Variant>::Stage::A;
  constexpr int32_t kStepDepth = A::kLine * A::kPanels;
  static_assert(Product::Depth::kStepDepth == kStepDepth);
  const LoadedB<Product, Variant> b(cta, task, task.rows > 0, b_policy);
  const int32_t steps = at_most(Product::Depth::steps(cta.params, task), most);
  int32_t begun = 0;
#pragma unroll 1
  for (; begun < steps && ring.is_empty(position); ++begun) {
    ring.expect(position, b.bytes());
    b.load(ring.stage(position), ring.full(position), 0, begun * kStepDepth);
    position.advance();
  }
  return begun;
}

// Where the scales of a task's rows lie, for the depth that begins with k.
template <class Product, class Variant>
__device__ __forceinline__ const float* first_row_scale(const Cta<Variant>& cta, const Task& task, int32_t k) {
  const auto& p = cta.params;
  constexpr bool kDown = Product::kGemm == Gemm::kDown;
  const int32_t depth = kDown ? p.shape.intermediate : p.shape.hidden;
  return ring_scales(cta, kDown ? p.layout.h : p.layout.rows, depth) +
         ring_scale(Tiling::kRows, first_row_of<Variant>(task), scale_blocks(depth), k / kScaleColumns);
}

// `position` moves on by the steps of the product; the B of the first `begun` of them is on its way. The policies are
// those of ptx/tma.cuh. For B: evict_first where these are weights of an expert with a single row tile, evict_normal
// where row tiles share them, which then find each other's lines in L2. `track` is that of the timeline. `near_end` is
// called before the last kStepsLeft steps are loaded, where there are as many; returns whether it was.
inline constexpr int32_t kStepsLeft = 3;
template <class Product, class Variant, class Track, class NearEnd>
__device__ __forceinline__ bool load_tile(const Cta<Variant>& cta, const typename GemmShape<Variant>::Ring& ring,
                                          typename GemmShape<Variant>::Ring::Position& position, const Task& task,
                                          uint64_t b_policy, uint64_t a_policy, int32_t begun, const Track& track,
                                          const NearEnd& near_end) {
  using Stage = typename GemmShape<Variant>::Stage;
  using A = typename Product::A;
  const auto& p = cta.params;
  // Rows that nobody asked for only reach accumulators that are never stored, but to multiply them takes time
  // (docs/performance/forward.md, "Zeros behind the rows"). Zeros take less: boxes outside of the tensor, of which nothing
  // is read, once in a task into each stage; what comes later leaves them there. Elsewhere rows stay as they are in the stage.
  constexpr bool kZeros = kInTiles<A> && Cta<Variant>::kZerosBehindRows;
  const int32_t rows = A::kMajor == ptx::Major::kDepth ? task.rows : Tiling::kRows;
  const bool whole = kInTiles<A> && rows > (kZeros ? Tiling::kRows - kFewRows : Tiling::kRows / 2);
  const int32_t boxes = ceil_div(rows, kInTiles<A> ? kFewRows : kBoxWidth);
  constexpr uint32_t kBytesOfBox = (kInTiles<A> ? kFewRows : kBoxWidth) * Stage::A::kLineBytes;
  constexpr int kPanels = Stage::A::kPanels;
  constexpr bool kRowScales = requires(Stage& stage) { stage.row_scales; };
  static_assert(kPanels == 1 || kInTiles<A>);
  static_assert(!kZeros || (kPanels == 1 && !kRowScales));  // bytes of a step with zeros are those of rows alone
  const uint32_t scale_bytes = kRowScales ? boxes * kFewRows * sizeof(float) : 0;
  const uint32_t bytes_of_a = (whole ? sizeof(Stage::a) : kPanels * boxes * kBytesOfBox) + scale_bytes;
  constexpr int32_t kOutside = 1 << 30;
  [[maybe_unused]] int32_t steps_with_zeros = kZeros && rows > 0 && !whole ? Variant::config.stages : 0;
  const A a{first_row_of_a<A>(cta, task)};
  const LoadedB<Product, Variant> b(cta, task, boxes > 0, b_policy);

  int32_t steps_left = Product::Depth::steps(p, task);
  Product::Depth::for_each_step(p, task, [&](int32_t part, int32_t k) {
    if (steps_left-- == kStepsLeft) near_end();
    Stage& stage = ring.stage(position);
    uint64_t* full = ring.full(position);
    int32_t bytes_of_rows = bytes_of_a, rows_and_zeros = boxes * kFewRows;
    if constexpr (kZeros) {
      if (steps_with_zeros > 0) {
        --steps_with_zeros;
        rows_and_zeros = ceil_div(rows, Roles::kWarpgroupRows) * Roles::kWarpgroupRows;
        bytes_of_rows = rows_and_zeros * Stage::A::kLineBytes;
      }
    }
    if (kWeightsFirst<Variant> && begun > 0) {
      --begun;
      ring.commit(position, bytes_of_rows);
    } else {
      track.stall([&] { ring.acquire(position); });
      ring.commit(position, bytes_of_rows + b.bytes());
      b.load(stage, full, part, k);
    }
    if constexpr (kRowScales) {
      if (boxes > 0) ptx::load_bytes(stage.row_scales, first_row_scale<Product>(cta, task, k), full, scale_bytes);
    }
    if constexpr (!kInTiles<A>) {
#pragma unroll
      for (int box = 0; box < Stage::A::kBoxes; ++box) {
        if (box >= boxes) break;
        a.load(p, task, part, k, box, [&](const CUtensorMap& map, auto... at) {
          ptx::load_box(stage.a.box(box), &map, full, a_policy, at...);
        });
      }
    } else {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        auto& lines = stage.a.panel(panel).lines;
        const int32_t x = k + panel * Stage::A::kLine;
        if (whole) {
          ptx::load_box(lines, &(p.*A::Tensor::kMap), full, a_policy, x, a.first);
          continue;
        }
#pragma unroll 1
        for (int32_t row = 0; row < rows_and_zeros; row += kFewRows) {
          const int32_t y = row < boxes * kFewRows ? a.first + row : kOutside;
          ptx::load_box(lines[row], &(p.*A::Tensor::kFewMap), full, a_policy, x, y);
        }
      }
    }
    position.advance();
  });
  return Product::Depth::steps(p, task) >= kStepsLeft;
}

// The 4 stages after the depth of h_gradient, which are not multiplied: gate and up of the tile, 64 columns each, from
// their ring or from what the forward pass has saved. Epilogue HGradients uses them. Of columns in turn both boxes have
// gate and up, of 32 columns each.
template <class Variant, class Track>
__device__ __forceinline__ void load_projections(const Cta<Variant>& cta, const typename GemmShape<Variant>::Ring& ring,
                                                 typename GemmShape<Variant>::Ring::Position& position,
                                                 const Task& task, uint64_t policy, const Track& track) {
  using Stage = typename GemmShape<Variant>::Stage;
  const BackwardParams& p = cta.params;
  const int32_t boxes = ceil_div(task.rows, kBoxWidth);
  const bool saved = (task.part & kSavedPart) != 0;
  const CUtensorMap& projections = saved ? p.saved_rows : p.read_projections;
  // Saved rows are not in a ring; this block's part of the tile begins as far from its start.
  constexpr int32_t kParts = Tiling::kBlocks;
  const int32_t first_saved_row = task.row_tile * p.schedule.tile.rows + task.ring_slot % kParts * Tiling::kRows;
  const int32_t first_row = saved ? first_saved_row : task.ring_slot * Tiling::kRows;
  const int32_t first_column = task.column_tile * Tiling::kColumns;
#pragma unroll 1
  for (int32_t column = first_column; column < first_column + Tiling::kColumns; column += kBoxWidth) {
    track.stall([&] { ring.acquire(position); });
    ring.commit(position, boxes * p.shape.projections * Stage::A::kBoxBytes);
    Stage& stage = ring.stage(position);
    uint64_t* full = ring.full(position);
    const ProjectionBoxes at(cta.interleaved(), column);
#pragma unroll
    for (int box = 0; box < Stage::A::kBoxes; ++box) {
      if (box >= boxes) break;
      const int32_t row = first_row + kBoxWidth * box;
      ptx::load_box(stage.a.box(box), &projections, full, policy, at.first_column, 0, row);
      if (p.gated) ptx::load_box(stage.b.box(box), &projections, full, policy, at.second_column, at.second_plane, row);
    }
    position.advance();
  }
}

}  // namespace jaxmoe
