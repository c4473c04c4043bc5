// See launch.h. The kernels that are compiled: one for each pass and element type.
#include "cuda/host/launch.h"

#include "cuda/kernel/gemm/precision/sixteen_bit.cuh"
#include "cuda/kernel/kernel.cuh"

namespace jaxmoe {
namespace {

#ifdef JAXMOE_TIMELINE
constexpr bool kTimeline = true;
#else
constexpr bool kTimeline = false;
#endif

struct ForwardBf16 {
  using Precision = Bf16;
  using Params = ForwardParams;
  static constexpr Pass kPass = Pass::kForward;
  // Recording takes the math warps a few registers.
  static constexpr KernelConfig config{.registers = kTimeline ? RoleRegisters{88, 208} : RoleRegisters{},
                                       .timeline = kTimeline};
};
struct ForwardF16 : ForwardBf16 {
  using Precision = F16;
};
struct BackwardBf16 {
  using Precision = Bf16;
  using Params = BackwardParams;
  static constexpr Pass kPass = Pass::kBackward;
  static constexpr KernelConfig config{.timeline = kTimeline};
};
struct BackwardF16 : BackwardBf16 {
  using Precision = F16;
};

// Call body(Variant{}, kernel) for the variant of a pass and an element type.
template <class Body>
auto with_forward(ElementType type, Body body) {
  return type == ElementType::kBf16 ? body(ForwardBf16{}, moe_forward<ForwardBf16>)
                                    : body(ForwardF16{}, moe_forward<ForwardF16>);
}
template <class Body>
auto with_backward(ElementType type, Body body) {
  return type == ElementType::kBf16 ? body(BackwardBf16{}, moe_backward<BackwardBf16>)
                                    : body(BackwardF16{}, moe_backward<BackwardF16>);
}
template <class Body>
auto with_variant(Pass pass, ElementType type, Body body) {
  return pass == Pass::kBackward ? with_backward(type, body) : with_forward(type, body);
}

// How the kernel of a variant is launched with a number of workers. Not cooperatively: that would wait until all blocks
// fit at once, and other kernels may hold multiprocessors for as long as they wait for peers that this launch holds up
// (kernel/crew.cuh).
template <class Variant>
struct LaunchShape {
  cudaLaunchAttribute cluster{};
  cudaLaunchConfig_t config{};

  explicit LaunchShape(int32_t workers) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(Tiling::kBlocks), 1, 1};
    config.gridDim = dim3(workers * Tiling::kBlocks);
    config.blockDim = dim3(Roles::kThreads);
    config.dynamicSmemBytes = sizeof(KernelStorage<Variant>);
    config.attrs = &cluster;
    config.numAttrs = 1;
  }
  LaunchShape(const LaunchShape&) = delete;
  LaunchShape& operator=(const LaunchShape&) = delete;
};

std::string cuda_error(const char* what, cudaError_t status) {
  return status == cudaSuccess ? "" : std::string("jaxmoe: ") + what + ": " + cudaGetErrorString(status) + ".";
}

}  // namespace

std::string prepare_kernel(Pass pass, ElementType type, int32_t* workers) {
  return with_variant(pass, type, [&](auto variant, auto kernel) -> std::string {
    using Variant = decltype(variant);
    constexpr std::size_t kSharedBytes = sizeof(KernelStorage<Variant>);
    static_assert(kSharedBytes <= kMaxSharedBytes);
    // The attribute also loads the kernel, which later could wait for kernels of peers that wait for this one.
    cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    int clusters = 0;
    const LaunchShape<Variant> one(1);
    if (status == cudaSuccess) status = cudaOccupancyMaxActiveClusters(&clusters, kernel, &one.config);
    if (status != cudaSuccess) return cuda_error("the kernel could not be loaded", status);
    if (clusters < 1) {
      return "jaxmoe: " + std::to_string(Tiling::kBlocks) +
             " neighbouring blocks of the kernel do not fit on this device; each needs a multiprocessor with " +
             std::to_string(kSharedBytes) + " bytes of shared memory.";
    }
    *workers = clusters;
    return "";
  });
}

namespace {

// Makes tensor maps one after the other, until one fails.
class MapMaker {
 public:
  explicit MapMaker(ElementType type) : type_(type) {}

  void make(CUtensorMap* map, const char* name, const void* base, std::initializer_list<int64_t> extents,
            std::initializer_list<int32_t> box) {
    if (error_.empty()) error_ = make_tensor_map(map, name, base, type_, extents, box);
  }
  const std::string& error() const { return error_; }

 private:
  const ElementType type_;
  std::string error_;
};

constexpr int32_t kBox = Tiling::kDepth;
static_assert(kBox == kBoxWidth);

// What is wrong with a schedule for the kernels as they are compiled; empty where nothing is.
std::string schedule_error(const LaunchParams& p) {
  const TileSizes tile = p.schedule.tile, own = kernel_tiles(p.gated);
  if (tile.rows != own.rows || tile.h_columns != own.h_columns || tile.columns != own.columns ||
      p.schedule.narrow_rows > Tiling::kRows) {
    return "jaxmoe: the schedule's tiles are " + std::to_string(tile.rows) + " rows, " +
           std::to_string(tile.h_columns) + " columns of h, " + std::to_string(tile.columns) +
           " output columns; this kernel has " + std::to_string(own.rows) + ", " + std::to_string(own.h_columns) +
           ", " + std::to_string(own.columns) + ".";
  }
  // A lane of a warp for each row of a chunk, and for each slot of a token.
  constexpr int32_t kLanes = 32;
  const int32_t dispatchers = p.schedule.workers * Tiling::kBlocks * Roles::kDispatchWarps;
  if (p.schedule.dispatchers != dispatchers || p.schedule.chunk_rows > kLanes || p.shape.top_k > kLanes) {
    return "jaxmoe: " + std::to_string(p.schedule.dispatchers) + " dispatchers, " +
           std::to_string(p.schedule.chunk_rows) + " rows of a chunk, top_k " + std::to_string(p.shape.top_k) +
           "; this kernel has " + std::to_string(dispatchers) + " dispatchers and takes up to " +
           std::to_string(kLanes) + " of the others.";
  }
  return "";
}

int64_t ring_rows_of(const LaunchParams& p) { return int64_t{p.schedule.ring_tiles} * p.schedule.tile.rows; }

void make_weight_maps(MapMaker& maker, LaunchParams& p, const Weights& weights) {
  const int64_t hidden = p.shape.hidden, intermediate = p.shape.intermediate, experts = p.shape.local_experts();
  maker.make(&p.w_gate, "w_gate", weights.gate, {intermediate, hidden, experts}, {kBox, kBox, 1});
  maker.make(&p.w_up, "w_up", p.gated ? weights.up : weights.gate, {intermediate, hidden, experts}, {kBox, kBox, 1});
  maker.make(&p.w_down, "w_down", weights.down, {hidden, intermediate, experts}, {kBox, kBox, 1});
}

// Result number `n`; those that are not there have no elements.
void set_result(LaunchParams& p, int n, void* data, int64_t elements, int64_t itemsize) {
  p.results[n] = {data, data == nullptr ? 0 : elements * itemsize};
}

constexpr int64_t kItemsize = sizeof(uint16_t);  // of both element types

void list_results(ForwardParams& p) {
  const int64_t saved_rows = int64_t{p.schedule.saved_tiles} * p.schedule.tile.rows;
  set_result(p, 0, p.y, int64_t{p.shape.tokens} * p.shape.hidden, kItemsize);
  set_result(p, 1, p.saved, saved_rows * p.shape.projections * p.shape.intermediate, kItemsize);
}

void list_results(BackwardParams& p) {
  const int64_t gradient_itemsize = p.float_gradients ? sizeof(float) : kItemsize;
  const int64_t experts = p.shape.local_experts();
  const int64_t matrices = experts * p.shape.hidden * p.shape.intermediate;
  set_result(p, 0, p.dx, int64_t{p.shape.tokens} * p.shape.hidden, kItemsize);
  set_result(p, 1, p.dtopk_weights, p.shape.slots(), sizeof(float));
  set_result(p, 2, p.dw_gate, matrices, gradient_itemsize);
  set_result(p, 3, p.dw_up, matrices, gradient_itemsize);
  set_result(p, 4, p.dw_down, matrices, gradient_itemsize);
  set_result(p, 5, p.db_gate, experts * p.shape.intermediate, gradient_itemsize);
  set_result(p, 6, p.db_up, experts * p.shape.intermediate, gradient_itemsize);
  set_result(p, 7, p.db_down, experts * p.shape.hidden, gradient_itemsize);
}

}  // namespace

std::string complete_params(ForwardParams* params, ElementType type, const Weights& weights) {
  ForwardParams& p = *params;
  if (const std::string error = schedule_error(p); !error.empty()) return error;
  list_results(p);
  const int64_t ring_rows = ring_rows_of(p);
  const int64_t hidden = p.shape.hidden, intermediate = p.shape.intermediate;
  const std::byte* arena = p.arenas[p.rank];
  constexpr int32_t rows = Tiling::kRows;
  constexpr int32_t few = kFewRows;
  MapMaker maker(type);
  maker.make(&p.rows, "rows", arena + p.layout.rows.offset, {hidden, ring_rows}, {kBox, rows});
  maker.make(&p.few_rows, "rows", arena + p.layout.rows.offset, {hidden, ring_rows}, {kBox, few});
  maker.make(&p.h, "h", arena + p.layout.h.offset, {intermediate, ring_rows}, {kBox, rows});
  maker.make(&p.few_h, "h", arena + p.layout.h.offset, {intermediate, ring_rows}, {kBox, few});
  make_weight_maps(maker, p, weights);
  return maker.error();
}

std::string complete_params(BackwardParams* params, ElementType type, const Weights& weights) {
  BackwardParams& p = *params;
  if (const std::string error = schedule_error(p); !error.empty()) return error;
  list_results(p);
  const int64_t ring_rows = ring_rows_of(p);
  const int64_t hidden = p.shape.hidden, intermediate = p.shape.intermediate, projections = p.shape.projections;
  const std::byte* arena = p.arenas[p.rank];
  constexpr int32_t few = Roles::kWarpRows;
  MapMaker maker(type);
  maker.make(&p.rows, "rows", arena + p.layout.rows.offset, {hidden, 2, ring_rows}, {kBox, 1, kBox});
  const std::byte* of_projections = arena + p.layout.projections.offset;
  maker.make(&p.projections, "projections", of_projections, {intermediate, projections, ring_rows}, {kBox, 1, kBox});
  if (p.saved != nullptr) {
    const int64_t saved_rows = int64_t{p.schedule.saved_tiles} * p.schedule.tile.rows;
    maker.make(&p.saved_rows, "saved", p.saved, {intermediate, projections, saved_rows}, {kBox, 1, kBox});
  }
  maker.make(&p.few_projections, "projections", of_projections, {intermediate, projections, ring_rows},
             {kBox, 1, few});
  const std::byte* of_h = arena + p.layout.h.offset;
  maker.make(&p.h, "h", of_h, {intermediate, ring_rows}, {kBox, kBox});
  maker.make(&p.few_h, "h", of_h, {intermediate, ring_rows}, {kBox, few});
  make_weight_maps(maker, p, weights);
  return maker.error();
}

int32_t timeline_blocks(const Schedule& schedule) {
  return kTimeline ? schedule.workers * Tiling::kBlocks : 0;
}

namespace {

template <class Variant, class Kernel>
cudaError_t launch(Kernel kernel, const typename Variant::Params& params, cudaStream_t stream) {
  LaunchShape<Variant> shape(params.schedule.workers);
  shape.config.stream = stream;
  return cudaLaunchKernelEx(&shape.config, kernel, params);
}

}  // namespace

cudaError_t launch_kernel(const ForwardParams& params, ElementType type, cudaStream_t stream) {
  return with_forward(type, [&](auto variant, auto kernel) {
    return launch<decltype(variant)>(kernel, params, stream);
  });
}

cudaError_t launch_kernel(const BackwardParams& params, ElementType type, cudaStream_t stream) {
  return with_backward(type, [&](auto variant, auto kernel) {
    return launch<decltype(variant)>(kernel, params, stream);
  });
}

}  // namespace jaxmoe
