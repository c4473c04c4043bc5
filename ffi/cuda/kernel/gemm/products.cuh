// What the kernels multiply, one line a product: A, rows x depth, times B, depth x columns. What roles do with a task
// follows from its line: the producer loads boxes of both tensors over the depth (load.cuh), the math warps multiply
// them as they lie (multiply.cuh), and an epilogue makes the sums into what others read (epilogues/).
#pragma once

#include <type_traits>

#include "common/scheduler.h"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/kernel/gemm/accumulate.cuh"
#include "cuda/kernel/gemm/operands.cuh"
#include "cuda/kernel/gemm/packed.cuh"
#include "cuda/kernel/gemm/packed_eight_bit.cuh"
#include "cuda/kernel/gemm/promoted.cuh"

namespace jaxmoe {

template <Gemm kGemm_, class A_, class B_, class Depth_, class Epilogue_, class Accumulate_ = Direct, class DeepB_ = B_>
struct Product {
  static constexpr Gemm kGemm = kGemm_;
  using A = A_;
  using B = B_;
  using Depth = Depth_;
  using Epilogue = Epilogue_;
  using Accumulate = Accumulate_;
  using DeepB = DeepB_;  // for two steps at a time (deep_stages.cuh)
};

// Columns of the table, for ProductTable::with().
template <class Product>
using AllOf = Product;
template <class Product>
using DepthOf = typename Product::Depth;
template <class Product>
using EpilogueOf = typename Product::Epilogue;
// All that the tensor cores have to know.
template <ptx::Major kA_, ptx::Major kB_, class Accumulate_>
struct Factors {
  static constexpr ptx::Major kA = kA_, kB = kB_;
  using Accumulate = Accumulate_;
};
template <class Product>
using FactorsOf = Factors<Product::A::kMajor, Product::B::kMajor, typename Product::Accumulate>;

// Lines in the order of Gemm.
template <class First, class... Rest>
struct ProductTable {
  static constexpr Gemm kFirst = First::kGemm;
  // What a warp has to know of scales: the same of all products of a table.
  using Scales = typename First::Accumulate::Scales;
  static_assert((std::is_same_v<Scales, typename Rest::Accumulate::Scales> && ...));
  template <template <class> class Column>
  using FirstOf = Column<First>;

  // Returns body(value) of what a column has for the product of a task, a type. Neighbouring lines that have the same
  // share one call, so there is one copy of its code.
  template <template <class> class Column, class Body>
  static __device__ __forceinline__ auto with(Gemm gemm, const Body& body) {
    using Value = Column<First>;
    if constexpr ((std::is_same_v<Value, Column<Rest>> && ...)) {
      return body(Value{});
    } else {
      using Others = ProductTable<Rest...>;
      static_assert(First::kGemm < Others::kFirst);
      if constexpr (!std::is_same_v<Value, typename Others::template FirstOf<Column>>) {
        if (gemm <= First::kGemm) return body(Value{});
      }
      return Others::template with<Column>(gemm, body);
    }
  }
};

namespace epilogue {
struct H;                // activation: h, to its ring; gate and up, where a backward pass wants them
struct EightBitH;        // activation, rounding to 8 bits: h and its scales, to the ring
struct Answers;          // to the ranks that own the tokens
struct AcrossH;          // as H and Answers, of sums of which a thread has columns of several rows
struct AcrossEightBitH;  // the same as EightBitH
struct AcrossAnswers;
struct Projections;      // gate and up, to their ring
struct HGradients;       // with gate and up: their gradients and h, to the rings
struct TokenGradients;   // to the ranks that own the tokens, with the gradients of routing weights
struct ArrayRows;        // to the caller's array
struct WeightGradients;  // added up over segments, to the layer's results; with them those of biases
}  // namespace epilogue

// clang-format off
using GateUpWeights = OfExpert<&LaunchParams::w_gate_map, &LaunchParams::w_up_map>;
using DownWeights = OfExpert<&LaunchParams::w_down_map>;

namespace forward_pass {
using namespace epilogue;
using Tokens = TileRows<&ForwardParams::rows, &ForwardParams::few_rows>;
using Hs = TileRows<&ForwardParams::h, &ForwardParams::few_h>;
using DeepGateUpWeights = OfExpert<&ForwardParams::deep_w_gate_map, &ForwardParams::deep_w_up_map>;
using DeepDownWeights = OfExpert<&ForwardParams::deep_w_down_map>;
using Products = ProductTable<
    //      task                  A                         B                         depth           sums become
    Product<Gemm::kGateUp,        ByDepth<Tokens>,          InHalves<GateUpWeights>,  Hidden,         H>,
    Product<Gemm::kDown,          ByDepth<Hs>,              ByWidth<DownWeights>,     Intermediate,   Answers>>;
// Tokens, h and weights in 8 bits.
template <class Accumulate>
using EightBitProducts = ProductTable<
    //      task                  A                B                                               depth              sums
    Product<Gemm::kGateUp,        ByDepth<Tokens>, InHalves<GateUpWeights, ptx::Major::kDepth>,    HiddenByTwo,       EightBitH, Accumulate>,
    Product<Gemm::kDown,          ByDepth<Hs>,     ByDepth<DownWeights>,                           IntermediateByTwo, Answers,   Accumulate>>;
// Weights of fewer bits, decoded the way that 8-bit ones lie.
using DecodedProducts = ProductTable<
    //      task                  A                         B                                             depth           sums become
    Product<Gemm::kGateUp,        ByDepth<Tokens>,          InHalves<GateUpWeights, ptx::Major::kDepth>,  Hidden,         H>,
    Product<Gemm::kDown,          ByDepth<Hs>,              ByDepth<DownWeights>,                         Intermediate,   Answers>>;
// Weights in 4 bits, decoded in registers; tokens and h in 16 bits, or in 8.
template <class HOfSums, class Accumulate>
using PackedProducts = ProductTable<
    //      task                  A                B                                depth              sums
    Product<Gemm::kGateUp,        ByDepth<Tokens>, PackedInHalves<GateUpWeights>,   HiddenByTwo,       HOfSums,       Accumulate,
            PackedInHalves<DeepGateUpWeights>>,
    Product<Gemm::kDown,          ByDepth<Hs>,     PackedColumns<DownWeights>,      IntermediateByTwo, AcrossAnswers, Accumulate,
            PackedColumns<DeepDownWeights>>>;
}  // namespace forward_pass

namespace backward_pass {
using namespace epilogue;
using Tokens = RingRows<&BackwardParams::rows, 0>;
using OutputGradients = RingRows<&BackwardParams::rows, 1>;
using GateGradients = RingRows<&BackwardParams::projections, 0>;
using UpGradients = RingRows<&BackwardParams::projections, 1>;
using BothGradients = RingRows<&BackwardParams::projections, kPlaneOfPart>;  // of gate, of up
using WeightedHs = RingRows<&BackwardParams::h>;
using GateUpPlanes = OfExpert<&BackwardParams::w_gate_plane, &BackwardParams::w_up_plane>;
using Products = ProductTable<
    //      task                  A                         B                         depth           sums become
    Product<Gemm::kGateUp,        ByDepth<Tokens>,          InHalves<GateUpWeights>,  Hidden,         Projections>,
    Product<Gemm::kHGradient,     ByDepth<OutputGradients>, ByDepth<DownWeights>,     Hidden,         HGradients>,
    Product<Gemm::kTokenGradient, ByDepth<BothGradients>,   ByDepth<GateUpPlanes>,    EachProjection, TokenGradients>,
    Product<Gemm::kGateGradient,  ByWidth<Tokens>,          ByWidth<GateGradients>,   SegmentRows,    WeightGradients>,
    Product<Gemm::kUpGradient,    ByWidth<Tokens>,          ByWidth<UpGradients>,     SegmentRows,    WeightGradients>,
    Product<Gemm::kDownGradient,  ByWidth<WeightedHs>,      ByWidth<OutputGradients>, SegmentRows,    WeightGradients>>;
// Weights that are not differentiated, decoded the way that 8-bit ones lie.
using DecodedProducts = ProductTable<
    //      task                  A                         B                                             depth           sums become
    Product<Gemm::kGateUp,        ByDepth<Tokens>,          InHalves<GateUpWeights, ptx::Major::kDepth>,  Hidden,         Projections>,
    Product<Gemm::kHGradient,     ByDepth<OutputGradients>, ByWidth<DownWeights>,                         Hidden,         HGradients>,
    Product<Gemm::kTokenGradient, ByDepth<BothGradients>,   ByWidth<GateUpPlanes>,                        EachProjection, TokenGradients>>;
}  // namespace backward_pass

// Of one matrix, which the caller has.
namespace halves {
using namespace epilogue;
using Rows = TileRows<&MatmulParams::multiplied_rows, &MatmulParams::few_multiplied_rows>;
using Matrices = OfExpert<&MatmulParams::matrices_map>;
using FirstProduct = ProductTable<
    //      task                  A                         B                         depth           sums become
    Product<Gemm::kGateUp,        ByDepth<Rows>,            ByWidth<Matrices>,        Hidden,         ArrayRows>>;
using SecondProduct = ProductTable<
    //      task                  A                         B                         depth           sums become
    Product<Gemm::kDown,          ByDepth<Rows>,            ByWidth<Matrices>,        Intermediate,   Answers>>;
}  // namespace halves
// clang-format on

// Another number format has lines of its own, with other tensors or another Accumulate, and is chosen here.
template <class Precision>
using PromotedOf = Promoted<std::conditional_t<Precision::kDecodes, ScalesOfDecoded, ScalesOfProducts>>;
template <class Precision>
using AccumulateOf =
    std::conditional_t<Precision::kAccumulation == Accumulation::kFast, ScaledAtEnd, PromotedOf<Precision>>;
template <class Variant>
using PackedProductsOf =
    std::conditional_t<Variant::Precision::kTokens.is_scaled(),
                       forward_pass::PackedProducts<epilogue::AcrossEightBitH, EightBitFromPacked>,
                       forward_pass::PackedProducts<epilogue::AcrossH, FromPacked<WordOf<typename Variant::Precision>>>>;
template <class Variant>
using ForwardProductsOf =
    std::conditional_t<Variant::Precision::kPacked, PackedProductsOf<Variant>,
    std::conditional_t<Variant::Precision::kTokens.is_scaled(),
                       forward_pass::EightBitProducts<AccumulateOf<typename Variant::Precision>>,
    std::conditional_t<Variant::Precision::kDecodes, forward_pass::DecodedProducts, forward_pass::Products>>>;
template <class Variant>
using BackwardProductsOf =
    std::conditional_t<Variant::Precision::kDecodes, backward_pass::DecodedProducts, backward_pass::Products>;
template <class Variant>
using ProductsOf = std::conditional_t<
    Variant::kPass == Pass::kDispatchMatmul, halves::FirstProduct,
    std::conditional_t<Variant::kPass == Pass::kMatmulCombine, halves::SecondProduct,
                       std::conditional_t<Variant::kPass == Pass::kBackward, BackwardProductsOf<Variant>,
                                          ForwardProductsOf<Variant>>>>;

}  // namespace jaxmoe
