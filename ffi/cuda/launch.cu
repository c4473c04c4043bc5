// See launch.h. The kernels that are compiled: one for each element type.
#include "cuda/launch.h"

#include "cuda/kernel/forward.cuh"
#include "cuda/kernel/precision/sixteen_bit.cuh"

namespace jaxmoe {
namespace {

#ifdef JAXMOE_TIMELINE
constexpr bool kTimeline = true;
#else
constexpr bool kTimeline = false;
#endif

struct ForwardBf16 {
  using Precision = Bf16;
  static constexpr KernelConfig config{.timeline = kTimeline};
};
struct ForwardF16 {
  using Precision = F16;
  static constexpr KernelConfig config = ForwardBf16::config;
};

// Calls body(Variant{}) for the variant of an element type.
template <class Body>
auto with_variant(ElementType type, Body body) {
  return type == ElementType::kBf16 ? body(ForwardBf16{}) : body(ForwardF16{});
}

std::string cuda_error(const char* what, cudaError_t status) {
  return status == cudaSuccess ? "" : std::string("jaxmoe_forward: ") + what + ": " + cudaGetErrorString(status) + ".";
}

}  // namespace

std::string prepare_forward(ElementType type, int32_t* workers) {
  return with_variant(type, [&](auto variant) -> std::string {
    using Variant = decltype(variant);
    constexpr std::size_t kSharedBytes = sizeof(ForwardStorage<Variant>);
    static_assert(kSharedBytes <= kMaxSharedBytes);
    int device = 0;
    int processors = 0;
    int blocks = 0;
    const auto kernel = moe_forward<Variant>;
    // The attribute also loads the kernel, which later could wait for kernels of peers that wait for this one.
    cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (status == cudaSuccess) status = cudaGetDevice(&device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (status == cudaSuccess) {
      status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, Variant::config.threads(), kSharedBytes);
    }
    if (status != cudaSuccess) return cuda_error("the kernel could not be loaded", status);
    if (blocks < 1) {
      return "jaxmoe_forward: a block of the kernel does not fit on a multiprocessor of this device; it needs " +
             std::to_string(kSharedBytes) + " bytes of shared memory.";
    }
    *workers = processors / Variant::config.cluster_size;
    return "";
  });
}

std::string make_tensor_maps(ForwardParams* params, ElementType type, const void* w_gate, const void* w_up,
                             const void* w_down) {
  return with_variant(type, [&](auto variant) -> std::string {
    constexpr KernelConfig config = decltype(variant)::config;
    ForwardParams& p = *params;
    const TileSizes tile = p.schedule.tile;
    const int32_t hidden_columns = p.gated ? config.tile_columns / 2 : config.tile_columns;
    if (tile.rows != config.tile_rows * config.cluster_size || tile.hidden_columns != hidden_columns ||
        tile.output_columns != config.tile_columns || p.schedule.narrow_rows > config.tile_rows) {
      return "jaxmoe_forward: the schedule's tiles are " + std::to_string(tile.rows) + " rows, " +
             std::to_string(tile.hidden_columns) + " columns of h, " + std::to_string(tile.output_columns) +
             " output columns; this kernel has " + std::to_string(config.tile_rows * config.cluster_size) + ", " +
             std::to_string(hidden_columns) + ", " + std::to_string(config.tile_columns) + ".";
    }
    // A lane of a warp for each row of a chunk, and for each slot of a token.
    constexpr int32_t kLanes = 32;
    const int32_t dispatchers = p.schedule.workers * config.cluster_size * kDispatchWarps;
    if (p.schedule.dispatchers != dispatchers || p.schedule.chunk_rows > kLanes || p.shape.top_k > kLanes) {
      return "jaxmoe_forward: " + std::to_string(p.schedule.dispatchers) + " dispatchers, " +
             std::to_string(p.schedule.chunk_rows) + " rows of a chunk, top_k " + std::to_string(p.shape.top_k) +
             "; this kernel has " + std::to_string(dispatchers) + " dispatchers and takes up to " +
             std::to_string(kLanes) + " of the others.";
    }
    const int64_t ring_rows = int64_t{p.schedule.ring_tiles} * tile.rows;
    const int64_t hidden = p.shape.hidden, intermediate = p.shape.intermediate, experts = p.shape.local_experts();
    const std::byte* arena = p.arenas[p.rank];
    const int32_t box = config.tile_depth, rows = config.tile_rows;
    constexpr int32_t few = GemmShape<decltype(variant)>::kFewRows;
    std::string error;
    const auto make = [&](CUtensorMap* map, const char* name, const void* base, std::initializer_list<int64_t> extents,
                          std::initializer_list<int32_t> boxes) {
      if (error.empty()) error = make_tensor_map(map, name, base, type, extents, boxes);
    };
    make(&p.rows, "rows", arena + p.layout.rows.offset, {hidden, ring_rows}, {box, rows});
    make(&p.few_rows, "rows", arena + p.layout.rows.offset, {hidden, ring_rows}, {box, few});
    make(&p.hidden, "hidden", arena + p.layout.hidden.offset, {intermediate, ring_rows}, {box, rows});
    make(&p.few_hidden, "hidden", arena + p.layout.hidden.offset, {intermediate, ring_rows}, {box, few});
    make(&p.w_gate, "w_gate", w_gate, {intermediate, hidden, experts}, {box, box, 1});
    make(&p.w_up, "w_up", p.gated ? w_up : w_gate, {intermediate, hidden, experts}, {box, box, 1});
    make(&p.w_down, "w_down", w_down, {hidden, intermediate, experts}, {box, box, 1});
    return error;
  });
}

int32_t timeline_blocks(const Schedule& schedule) {
  return kTimeline ? schedule.workers * ForwardBf16::config.cluster_size : 0;
}

cudaError_t launch_forward(const ForwardParams& params, ElementType type, cudaStream_t stream) {
  return with_variant(type, [&](auto variant) {
    using Variant = decltype(variant);
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeCooperative;
    attributes[0].val.cooperative = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {static_cast<unsigned>(Variant::config.cluster_size), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(params.schedule.workers * Variant::config.cluster_size);
    config.blockDim = dim3(Variant::config.threads());
    config.dynamicSmemBytes = sizeof(ForwardStorage<Variant>);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = Variant::config.cluster_size > 1 ? 2 : 1;
    return cudaLaunchKernelEx(&config, moe_forward<Variant>, params);
  });
}

}  // namespace jaxmoe
