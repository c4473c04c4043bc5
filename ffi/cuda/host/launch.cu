// See launch.h. How the kernels of variants/ are started, and what they are given.
#include "cuda/host/launch.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <utility>

#include "common/tiling.h"
#include "cuda/host/tensor_map.h"
#include "cuda/host/variants/variant.h"
#include "cuda/kernel/gemm/stage.cuh"
#include "cuda/kernel/roles.cuh"

namespace jaxmoe {
namespace {

// Null where none is compiled for that; call_checks.h refuses such calls.
const KernelVariant* variant_for(Pass pass, const Formats& formats, const Schedule& schedule) {
  static const std::array all = {forward_bf16(),         forward_f16(),         backward_bf16(),
                                 backward_f16(),         forward_e4m3_bf16(),   forward_e4m3_f16(),
                                 forward_e4m3_fast_bf16(), forward_e4m3_fast_f16(),
                                 forward_decoded_bf16(), forward_decoded_f16(), forward_decoded_e4m3_bf16(),
                                 backward_decoded_bf16(), backward_decoded_f16(), forward_packed_bf16(),
                                 forward_repacked_bf16(), forward_packed_e4m3_bf16(), forward_sums_bf16(),
                                 forward_sums_f16(),     forward_sums_e4m3_bf16(), dispatch_bf16(),
                                 dispatch_f16(),         dispatch_e4m3_bf16(),  dispatch_e4m3_f16(),
                                 combine_bf16(),         combine_f16(),         dispatch_matmul_bf16(),
                                 dispatch_matmul_f16(),  matmul_combine_bf16(), matmul_combine_f16()};
  const Decoding decoding = !formats.decodes()    ? Decoding::kNone
                            : schedule.decodes() ? Decoding::kAhead
                                                 : Decoding::kInRegisters;
  const auto is_it = [&](const KernelVariant& each) {
    return each.pass == pass && each.tokens == formats.tokens.element && each.wide == formats.answers.element &&
           each.decoding == decoding && each.accumulation == formats.accumulation &&
           each.sums_at_experts == schedule.sums_at_experts() &&
           (decoding == Decoding::kAhead || each.takes_repacked == (formats.weights.repacked != 0));
  };
  const auto found = std::ranges::find_if(all, is_it);
  return found == all.end() ? nullptr : &*found;
}

std::string no_variant_text(const Formats& formats, const Schedule& schedule) {
  return std::string("jaxmoe: no kernel is compiled for tokens in ") + info_of(formats.tokens.element).name +
         ", weights in " + info_of(formats.weights.element).name + (formats.weights.repacked != 0 ? " (repacked)" : "") +
         ", answers in " +
         info_of(formats.answers.element).name + ", weight_slots=" + std::to_string(schedule.weight_slots) +
         " and summed_tiles=" + std::to_string(schedule.summed_tiles) + ". Calls made by jaxmoe have others.";
}

// How a kernel is launched with a number of workers. Not cooperatively: that would wait until all blocks fit at once,
// and other kernels may hold multiprocessors for as long as they wait for peers that this launch holds up
// (kernel/crew.cuh).
struct LaunchShape {
  cudaLaunchAttribute cluster{};
  cudaLaunchConfig_t config{};

  LaunchShape(const KernelVariant& variant, int32_t workers, cudaStream_t stream = nullptr) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(Tiling::kBlocks), 1, 1};
    config.gridDim = dim3(workers * Tiling::kBlocks);
    config.blockDim = dim3(Roles::kThreads);
    config.dynamicSmemBytes = variant.shared_bytes;
    config.stream = stream;
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

const void* kernel_of(Pass pass, const Formats& formats, const Schedule& schedule) {
  const KernelVariant* const variant = variant_for(pass, formats, schedule);
  return variant == nullptr ? nullptr : variant->kernel;
}

std::string prepare_kernel(Pass pass, const Formats& formats, const Schedule& schedule, int32_t* workers) {
  const KernelVariant* const found = variant_for(pass, formats, schedule);
  if (found == nullptr) return no_variant_text(formats, schedule);
  const KernelVariant& variant = *found;
  // The attribute also loads the kernel, which later could wait for kernels of peers that wait for this one.
  cudaError_t status = cudaFuncSetAttribute(variant.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(variant.shared_bytes));
  int clusters = 0;
  const LaunchShape one(variant, 1);
  if (status == cudaSuccess) status = cudaOccupancyMaxActiveClusters(&clusters, variant.kernel, &one.config);
  if (status != cudaSuccess) return cuda_error("the kernel could not be loaded", status);
  if (clusters < 1) {
    return "jaxmoe: " + std::to_string(Tiling::kBlocks) +
           " neighbouring blocks of the kernel do not fit on this device; each needs a multiprocessor with " +
           std::to_string(variant.shared_bytes) + " bytes of shared memory.";
  }
  *workers = clusters;
  return "";
}

namespace {

// Makes tensor maps one after the other, until one fails.
class MapMaker {
 public:
  void make(CUtensorMap* map, const char* name, const Format& format, const void* base,
            std::initializer_list<int64_t> extents, std::initializer_list<int32_t> box, int64_t pitch = 0,
            int32_t swizzle_bytes = 128, Fetched fetched = Fetched::kLine) {
    if (!error_.empty()) return;
    error_ = make_tensor_map(map, name, base, format.element, extents, box, pitch, swizzle_bytes, fetched);
  }
  const std::string& error() const { return error_; }

 private:
  std::string error_;
};

// Elements of a line of a box, whose number of lines is kBoxWidth or that of the rows.
int32_t line_of(const Format& format) {
  return 8 * OperandTile<std::byte, kBoxWidth>::kLineBytes / info_of(format.element).bits;
}

// What is wrong with a schedule for the kernels as they are compiled; empty where nothing is.
std::string tiles_error(const RankParams& p, bool gated) {
  const TileSizes tile = p.schedule.tile, own = kernel_tiles(gated);
  if (tile.rows != own.rows || tile.h_columns != own.h_columns || tile.columns != own.columns ||
      p.schedule.narrow_rows > Tiling::kRows) {
    return "jaxmoe: the schedule's tiles are " + std::to_string(tile.rows) + " rows, " +
           std::to_string(tile.h_columns) + " columns of h, " + std::to_string(tile.columns) +
           " output columns; this kernel has " + std::to_string(own.rows) + ", " + std::to_string(own.h_columns) +
           ", " + std::to_string(own.columns) + ".";
  }
  // A lane of a warp for each row of a chunk, and for each slot of a token.
  constexpr int32_t kLanes = 32;
  const int32_t dispatchers = p.schedule.workers * granularity_of_gpu(gated).dispatchers_per_worker;
  if (p.schedule.dispatchers != dispatchers || p.schedule.chunk_rows > kLanes || p.shape.top_k > kLanes) {
    return "jaxmoe: " + std::to_string(p.schedule.dispatchers) + " dispatchers, " +
           std::to_string(p.schedule.chunk_rows) + " rows of a chunk, top_k " + std::to_string(p.shape.top_k) +
           "; this kernel has " + std::to_string(dispatchers) + " dispatchers and takes up to " +
           std::to_string(kLanes) + " of the others.";
  }
  const int64_t unit_tiles = at_most(int64_t{p.schedule.unit_tiles}, max_row_tiles(p.shape, tile));
  const int64_t columns = std::max(h_tiles(p.shape, tile), answer_tiles(p.shape, tile));
  if (unit_tiles * columns >= kMostOfSmallQuotient) {
    return "jaxmoe: units of " + std::to_string(unit_tiles) + " row tiles, of " + std::to_string(columns) +
           " column tiles each; this kernel takes fewer than " + std::to_string(kMostOfSmallQuotient) +
           " tiles of a unit. Pass a plan with fewer unit_tiles.";
  }
  return "";
}

int64_t ring_rows_of(const LaunchParams& p) { return int64_t{p.schedule.ring_tiles} * p.schedule.tile.rows; }

// Makes maps of weight matrices of all experts, one after the other.
class WeightMaps {
 public:
  WeightMaps(MapMaker& maker, const LaunchParams& p, const Formats& formats)
      : maker_(maker), p_(p), formats_(formats), format_(p.schedule.decodes() ? formats.tokens : formats.weights) {}

  // Of rows of so many columns, `pitch` elements apart where they are parts of longer ones. `matrices` are those of gate
  // (0), up (1) or down (projections) as the caller has them; what is multiplied is these, or the ring of decoded ones.
  // deep: two steps of packed ones to a line.
  void make(CUtensorMap* map, const char* name, int32_t which, const void* matrices, int64_t rows, int64_t columns,
            int64_t pitch = 0, bool deep = false) {
    const bool decodes = p_.schedule.decodes();
    if (decodes) {
      const std::byte* const ring = p_.arenas[p_.rank] + p_.layout.decoded_weights.offset;
      matrices = ring + which * decoded_bytes(p_.shape, p_.schedule, formats_);
    }
    using Packed = PackedTile<Tiling::kColumns>;
    const int32_t line = deep       ? DeepPackedTile<Tiling::kColumns>::kLine
                         : packed() ? Packed::kLine
                                    : line_of(format_);
    const int32_t box_columns = packed() ? Packed::kBoxColumns : kBoxWidth;
    // Those with scales lie the other way round.
    if (formats_.weights.is_scaled()) std::swap(rows, columns);
    const int64_t experts = decodes ? p_.schedule.weight_slots : p_.shape.local_experts();
    // PackedTile says why.
    const int32_t swizzle_bytes = !packed() || deep                              ? 128
                                  : formats_.tokens.element == Element::kE4M3 ? Packed::kLineBytes
                                                                              : 0;
    maker_.make(map, name, format_, matrices, {columns, rows, experts}, {line, box_columns, 1}, pitch, swizzle_bytes,
                fetched());
  }

  // Not the neighbour of a line where another box of the same step asks for that in the same moment, as in 16 bits. In
  // 8 bits it is read by the step that follows, which pays where an expert has the rows of one warpgroup, if routing is uniform
  // (docs/performance/forward.md, "What is in it because it was tried"). Of packed weights a deep stage has whole lines; with
  // the neighbours too layers were slower (docs/performance/four_bits.md).
  Fetched fetched() const {
    const bool few_rows = p_.shape.slots() <= int64_t{Roles::kWarpgroupRows} * p_.shape.local_experts();
    const bool in_8_bits = format_.element == Element::kE4M3 && !p_.schedule.decodes();
    return in_8_bits && few_rows ? Fetched::kTwoLines : Fetched::kLine;
  }

  // Whether weights stay packed until they are multiplied.
  bool packed() const { return format_.element == Element::kE2M1; }

  // Gate and up, each as an array of its own, whether or not it is one.
  void make_planes(CUtensorMap* gate, CUtensorMap* up, bool deep = false) {
    const int64_t hidden = p_.shape.hidden, intermediate = p_.shape.intermediate;
    const int64_t pitch = p_.gate_up_pitch(p_.shape.intermediate);
    make(gate, "w_gate", 0, p_.w_gate, hidden, intermediate, p_.fused() ? pitch : 0, deep);
    make(up, "w_up", p_.gated, p_.gated ? p_.w_up : p_.w_gate, hidden, intermediate, p_.fused() ? pitch : 0, deep);
  }

 private:
  MapMaker& maker_;
  const LaunchParams& p_;
  const Formats& formats_;
  const Format format_;
};

void make_weight_maps(MapMaker& maker, LaunchParams& p, const Formats& formats) {
  const int64_t hidden = p.shape.hidden, intermediate = p.shape.intermediate;
  WeightMaps maps(maker, p, formats);
  if (p.interleaved()) {
    maps.make(&p.w_gate_map, "w_gate_up", 0, p.w_gate, hidden, 2 * intermediate);
    p.w_up_map = p.w_gate_map;
  } else {
    maps.make_planes(&p.w_gate_map, &p.w_up_map);
  }
  maps.make(&p.w_down_map, "w_down", p.shape.projections, p.w_down, intermediate, hidden);
}

// Result number `n`, of so many bytes where it is there.
template <class Params>
void set_result(Params& p, int n, void* data, int64_t bytes) {
  p.results[n] = {data, data == nullptr ? 0 : bytes};
}

int64_t saved_rows_of(const LaunchParams& p) {
  return int64_t{p.schedule.saved_tiles} * p.schedule.tile.rows * p.shape.projections;
}

std::string complete(ForwardParams& p, const Formats& formats) {
  set_result(p, 0, p.y, formats.answers.bytes(p.shape.tokens, p.shape.hidden));
  set_result(p, 1, p.gate_up, formats.h.bytes(saved_rows_of(p), p.shape.intermediate));
  const int64_t ring_rows = ring_rows_of(p);
  const int64_t hidden = p.shape.hidden, intermediate = p.shape.intermediate;
  const std::byte* arena = p.arenas[p.rank];
  constexpr int32_t rows = Tiling::kRows;
  constexpr int32_t few = kFewRows;
  MapMaker maker;
  const std::byte* of_rows = arena + p.layout.rows.offset;
  const std::byte* of_h = arena + p.layout.h.offset;
  maker.make(&p.rows, "rows", formats.tokens, of_rows, {hidden, ring_rows}, {line_of(formats.tokens), rows});
  maker.make(&p.few_rows, "rows", formats.tokens, of_rows, {hidden, ring_rows}, {line_of(formats.tokens), few});
  maker.make(&p.h, "h", formats.h, of_h, {intermediate, ring_rows}, {line_of(formats.h), rows});
  maker.make(&p.few_h, "h", formats.h, of_h, {intermediate, ring_rows}, {line_of(formats.h), few});
  make_weight_maps(maker, p, formats);
  if (WeightMaps maps(maker, p, formats); maps.packed()) {
    maps.make_planes(&p.deep_w_gate_map, &p.deep_w_up_map, true);
    maps.make(&p.deep_w_down_map, "w_down", p.shape.projections, p.w_down, intermediate, hidden, 0, true);
  }
  return maker.error();
}

void list_results(BackwardParams& p, const Formats& formats) {
  const Format& gradients = p.wide_gradients ? formats.sums : formats.weights;
  const int64_t experts = p.shape.local_experts(), hidden = p.shape.hidden, intermediate = p.shape.intermediate;
  set_result(p, 0, p.dx, formats.answers.bytes(p.shape.tokens, hidden));
  set_result(p, 1, p.dtopk_weights, formats.sums.bytes(1, p.shape.slots()));
  // Of both where they are one array: then up's is part of gate's.
  const int64_t width = p.gate_up_pitch(p.shape.intermediate);
  set_result(p, 2, p.dw_gate, gradients.bytes(experts * hidden, width));
  set_result(p, 3, p.fused() ? nullptr : p.dw_up, gradients.bytes(experts * hidden, width));
  set_result(p, 4, p.dw_down, gradients.bytes(experts * intermediate, hidden));
  set_result(p, 5, p.db_gate, gradients.bytes(experts, width));
  set_result(p, 6, p.fused() ? nullptr : p.db_up, gradients.bytes(experts, width));
  set_result(p, 7, p.db_down, gradients.bytes(experts, hidden));
}

std::string complete(BackwardParams& p, const Formats& formats) {
  list_results(p, formats);
  const int64_t ring_rows = ring_rows_of(p);
  const int64_t hidden = p.shape.hidden, intermediate = p.shape.intermediate, projections = p.shape.projections;
  const std::byte* arena = p.arenas[p.rank];
  constexpr int32_t few = Roles::kWarpRows, kBox = kBoxWidth;
  static_assert(kBox == Tiling::kDepth);
  MapMaker maker;
  maker.make(&p.rows, "rows", formats.tokens, arena + p.layout.rows.offset, {hidden, 2, ring_rows}, {kBox, 1, kBox});
  const std::byte* of_projections = arena + p.layout.projections.offset;
  maker.make(&p.projections, "projections", formats.h, of_projections, {intermediate, projections, ring_rows},
             {kBox, 1, kBox});
  // As h_gradient has them: plane by plane, or columns in turn as one plane.
  const int64_t planes = p.interleaved() ? 1 : projections, width = intermediate * projections / planes;
  maker.make(&p.read_projections, "projections", formats.h, of_projections, {width, planes, ring_rows},
             {kBox, 1, kBox});
  if (p.gate_up != nullptr) {
    maker.make(&p.saved_rows, "gate_up", formats.h, p.gate_up, {width, planes, saved_rows_of(p) / projections},
               {kBox, 1, kBox});
  }
  maker.make(&p.few_projections, "projections", formats.h, of_projections, {width, planes, ring_rows},
             {kBox, 1, few});
  const std::byte* of_h = arena + p.layout.h.offset;
  maker.make(&p.h, "h", formats.h, of_h, {intermediate, ring_rows}, {kBox, kBox});
  maker.make(&p.few_h, "h", formats.h, of_h, {intermediate, ring_rows}, {kBox, few});
  make_weight_maps(maker, p, formats);
  WeightMaps(maker, p, formats).make_planes(&p.w_gate_plane, &p.w_up_plane);
  return maker.error();
}

std::string complete_layer(LaunchParams& p, const LayerArrays<void, float>& arrays, const Formats& formats,
                           std::byte* timeline) {
  static_cast<LayerArrays<void, float>&>(p) = arrays;
  p.gated = p.shape.projections > 1;
  p.weight_scale_rows = formats.weights.scale_rows;
  p.weight_group_columns = formats.weights.group_columns;
  p.weights_repacked = formats.weights.repacked != 0;
  p.timeline = timeline;
  return tiles_error(p, p.gated);
}

// `width` is that of the rows that arrive.
template <class Params>
void complete_exchange(Params& p, const ExchangeRoom& of_call, const Formats& formats, int64_t width) {
  static_cast<ExchangeArrays<float>&>(p) = of_call.arrays;
  p.room = of_call.room;
  p.timeline = nullptr;
  const int64_t rows = p.room.rows, hidden = p.shape.hidden, slots = p.shape.slots(), local = p.shape.local_experts();
  constexpr int64_t kWord = sizeof(int32_t);
  // Rows in 8 bits and their scales are two arrays; in the arena the scales lie behind the elements.
  const int64_t scale_bytes = formats.tokens.scale_bytes(rows, width);
  set_result(p, 0, p.rows, formats.tokens.bytes(rows, width) - scale_bytes);
  set_result(p, 1, p.scales, scale_bytes);
  set_result(p, 2, p.made_row_sources, rows * kWord);
  set_result(p, 3, p.made_slot_rows, slots * kWord);
  set_result(p, 4, p.rows_per_expert, local * kWord);
  set_result(p, 5, p.dropped_rows, local * kWord);
  set_result(p, 6, p.weight_gradients, slots * kWord);
  set_result(p, 7, p.y, formats.answers.bytes(p.shape.tokens, hidden));
}

std::string complete(MatmulParams& p, const ExchangeRoom& of_call, const Formats& formats) {
  complete_exchange(p, of_call, formats, p.shape.intermediate);
  if (std::string error = tiles_error(p, false); !error.empty()) return error;
  const int64_t local = p.shape.local_experts(), hidden = p.shape.hidden, width = p.shape.intermediate;
  const int64_t ring_rows = int64_t{p.schedule.ring_tiles} * p.schedule.tile.rows;
  const bool first = p.schedule.is_first_half();
  const void* const rows = first ? p.arenas[p.rank] + p.layout.rows.offset : p.outputs;
  const int64_t depth = first ? hidden : width, count = first ? ring_rows : p.room.rows;
  constexpr int32_t kBox = kBoxWidth, kRows = Tiling::kRows, kFew = kFewRows;
  MapMaker maker;
  maker.make(&p.multiplied_rows, "rows", formats.tokens, rows, {depth, count}, {kBox, kRows});
  maker.make(&p.few_multiplied_rows, "rows", formats.tokens, rows, {depth, count}, {kBox, kFew});
  maker.make(&p.matrices_map, "matrices", formats.tokens, p.matrices, {first ? width : hidden, depth, local},
             {kBox, kBox, 1});
  return maker.error();
}

}  // namespace

std::string make_launch(const RankParams& rank, Pass pass, const Formats& formats, const LaunchArrays& arrays,
                        std::byte* timeline, ReadyLaunch* launch) {
  launch->pass = pass;
  launch->formats = formats;
  if (const auto* of_call = std::get_if<ExchangeRoom>(&arrays)) {
    if (of_call->arrays.matrices != nullptr) {
      auto& p = launch->params.emplace<MatmulParams>();
      static_cast<RankParams&>(p) = rank;
      return complete(p, *of_call, formats);
    }
    auto& p = launch->params.emplace<ExchangeParams>();
    static_cast<RankParams&>(p) = rank;
    complete_exchange(p, *of_call, formats, p.shape.hidden);
    p.beside = of_call->beside;
    return "";
  }
  const auto layer = [&](auto& p) {
    static_cast<RankParams&>(p) = rank;
    const auto& of_call = std::get<LayerArrays<void, float>>(arrays);
    std::string error = complete_layer(p, of_call, formats, timeline);
    const KernelVariant* const found = variant_for(pass, formats, p.schedule);
    if (found == nullptr) return no_variant_text(formats, p.schedule);
    const KernelVariant& variant = *found;
    if (error.empty() && p.shape.local_experts() > variant.most_local_experts) {
      error = "jaxmoe: the kernel of this precision has room for " + std::to_string(variant.most_local_experts) +
              " experts per rank" + (kTimeline ? " in a build that records timelines (JAXMOE_TIMELINE=on)" : "") +
              ", not for " + std::to_string(p.shape.local_experts()) + ". Take more ranks.";
    }
    if (error.empty() && p.interleaved() && variant.records_timeline && pass == Pass::kForward) {
      error = "jaxmoe: this build records timelines (JAXMOE_TIMELINE=on), and its forward kernel takes no columns of "
              "gate and up in turn. Pass experts.split(), or take a build without.";
    }
    return error.empty() ? complete(p, formats) : error;
  };
  return pass == Pass::kBackward ? layer(launch->params.emplace<BackwardParams>())
                                 : layer(launch->params.emplace<ForwardParams>());
}

int32_t timeline_blocks(const LaunchSizes& sizes) {
  const auto& [shape, schedule, formats, pass] = sizes;
  const KernelVariant* const variant = variant_for(pass, formats, schedule);
  return variant != nullptr && variant->records_timeline ? schedule.workers * Tiling::kBlocks : 0;
}

cudaError_t enqueue(const ReadyLaunch& ready, cudaStream_t stream) {
  return std::visit(
      [&](const auto& params) {
        const KernelVariant* const variant = variant_for(ready.pass, ready.formats, params.schedule);
        if (variant == nullptr) return cudaErrorInvalidDeviceFunction;
        const LaunchShape shape(*variant, params.schedule.workers, stream);
        void* arguments[] = {const_cast<void*>(static_cast<const void*>(&params))};
        return cudaLaunchKernelExC(&shape.config, variant->kernel, arguments);
      },
      ready.params);
}

}  // namespace jaxmoe
