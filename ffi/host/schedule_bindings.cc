// The submodule `schedule` of jaxmoe._native: the integer code of common/ as Python sees it, for property tests and for
// plans. jaxmoe/native.py is the only way in. What is said of memory is in layout_bindings.cc.
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "common/block_part.h"
#include "common/chunks.h"
#include "common/extension.h"
#include "common/exchange.h"
#include "common/layer_arrays.h"
#include "common/protocol.h"
#include "common/scheduler.h"
#include "common/shape.h"
#include "common/tiling.h"
#include "host/argument_checks.h"
#include "host/executor_bindings.h"
#include "host/layout_bindings.h"
#include "host/masked_experts.h"
#include "host/struct_bindings.h"

namespace py = pybind11;

namespace jaxmoe {
namespace {

void define_names(py::module_& module) {
  py::enum_<Gemm> gemms(module, "Gemm");
  for (int32_t i = 0; i < static_cast<int32_t>(Gemm::kCount); ++i) gemms.value(kGemmNames[i], static_cast<Gemm>(i));
  py::enum_<Signal> signals(module, "Signal", "Signals under the names that messages use.");
  for (int32_t i = 0; i < kNumSignals; ++i) signals.value(kSignalNames[i], static_cast<Signal>(i));
  py::enum_<Site> sites(module, "Site", "Where in the code a wait stands.");
  for (int32_t i = 0; i < static_cast<int32_t>(Site::kCount); ++i) sites.value(kSiteNames[i], static_cast<Site>(i));
  module.attr("ARRAY_NAMES") = std::vector<std::string>(std::begin(kArrayNames), std::end(kArrayNames));
  module.attr("EXCHANGE_ARRAY_NAMES") =
      std::vector<std::string>(std::begin(kExchangeArrayNames), std::end(kExchangeArrayNames));
  module.def("quotient", [](uint32_t number, uint32_t divisor) { return Quotient(divisor).of(number); },
             py::arg("number"), py::arg("divisor"), "As Quotient finds it.");
  module.def("is_per_tile", &is_per_tile, py::arg("signal"));
  module.def("is_from_peers", &is_from_peers, py::arg("signal"));
}

Granularity granularity(const std::string& platform, bool gated, bool scaled) {
  require(platform == "cpu" || platform == "gpu", "platform=" + platform + ". It needs to be cpu or gpu.");
  return platform == "gpu" ? granularity_of_gpu(gated) : granularity_of_cpu(gated, scaled);
}

Schedule schedule_for(const Shape& shape, const std::string& platform, const py::object& plan, int32_t saved_tiles,
                      bool scaled, int32_t weight_slots, bool frozen, int32_t summed_tiles) {
  const auto chosen = [&](const char* name) { return py::int_(plan.attr(name)).cast<int32_t>(); };
  Schedule schedule{};
  schedule.unit_tiles = chosen("unit_tiles");
  schedule.lag_units = chosen("lag_units");
  schedule.ring_tiles = chosen("ring_tiles");
  schedule.chunk_rows = chosen("chunk_rows");
  schedule.keep_tokens = chosen("keep_tokens");
  schedule.segment_tiles = chosen("segment_tiles");
  schedule.saved_tiles = saved_tiles;
  schedule.weight_slots = weight_slots;
  schedule.frozen = frozen ? 1 : 0;
  schedule.share_columns = chosen("share_columns");
  schedule.summed_tiles = summed_tiles;
  return complete(schedule, shape, granularity(platform, shape.projections > 1, scaled));
}

void define_structs(py::module_& module) {
  define_struct(module, "Shape", "Sizes of one layer as one rank sees them.", Field{"ranks", &Shape::ranks},
                Field{"tokens", &Shape::tokens}, Field{"hidden", &Shape::hidden},
                Field{"intermediate", &Shape::intermediate}, Field{"num_experts", &Shape::num_experts},
                Field{"top_k", &Shape::top_k}, Field{"projections", &Shape::projections, 2})
      .def_property_readonly("local_experts", &Shape::local_experts)
      .def_property_readonly("slots", &Shape::slots)
      .def_property_readonly("max_rows", &Shape::max_rows);
  define_struct(module, "TileSizes", "What one task computes.", Field{"rows", &TileSizes::rows},
                Field{"h_columns", &TileSizes::h_columns},
                Field{"columns", &TileSizes::columns});
  define_struct(module, "Granularity", "Into what pieces the work of a platform is cut.",
                Field{"tile", &Granularity::tile}, Field{"workers", &Granularity::workers},
                Field{"dispatchers_per_worker", &Granularity::dispatchers_per_worker});
  module.def(
      "exchange_schedule",
      [](const std::string& platform, int32_t multiprocessors) {
        const Granularity pieces = granularity(platform, false, false);
        const int32_t asked_for = platform == "gpu" ? multiprocessors / Tiling::kBlocks : 0;
        return exchange_schedule(pieces, asked_for > 0 ? asked_for : pieces.workers);
      },
      py::arg("platform"), py::arg("multiprocessors") = 0,
      "Of a dispatch or a combine on its own, on so many multiprocessors of a GPU; 0: on all. A CPU has none.");
  module.def("granularity", &granularity, py::arg("platform"), py::arg("gated"), py::arg("scaled") = false,
             "The pieces of a platform. Gate and up of a column share an accumulator: half the columns where gated. "
             "Columns of h that share a scale share a tile.");
  module.def("schedule_for", &schedule_for, py::arg("shape"), py::arg("platform"), py::arg("plan"),
             py::arg("saved_tiles") = 0, py::arg("scaled") = false, py::arg("weight_slots") = 0,
             py::arg("frozen") = false, py::arg("summed_tiles") = 0,
             "The schedule of a plan, an object that has the attributes of jaxmoe.KernelPlan, for a shape.");
  module.attr("FIRST_HALF") = kFirstHalf;
  module.attr("SECOND_HALF") = kSecondHalf;
  module.def("half_of", &half_of, py::arg("schedule"), py::arg("half"),
             "The schedule of one half of a layer, FIRST_HALF or SECOND_HALF, that has such a schedule.");
  define_struct(module, "Schedule", "How the work of a rank is ordered.", Field{"tile", &Schedule::tile},
                Field{"unit_tiles", &Schedule::unit_tiles}, Field{"lag_units", &Schedule::lag_units},
                Field{"ring_tiles", &Schedule::ring_tiles}, Field{"workers", &Schedule::workers},
                Field{"chunk_rows", &Schedule::chunk_rows}, Field{"dispatchers", &Schedule::dispatchers},
                Field{"narrow_rows", &Schedule::narrow_rows}, Field{"keep_tokens", &Schedule::keep_tokens},
                Field{"segment_tiles", &Schedule::segment_tiles, 0},
                Field{"saved_tiles", &Schedule::saved_tiles, 0}, Field{"weight_slots", &Schedule::weight_slots, 0},
                Field{"half", &Schedule::half, 0}, Field{"frozen", &Schedule::frozen, 0},
                Field{"share_columns", &Schedule::share_columns, 0},
                Field{"summed_tiles", &Schedule::summed_tiles, 0})
      .def_property_readonly("numbers", [](const Schedule& schedule) { return numbers_of(schedule); })
      .def_property_readonly("backward", &Schedule::backward)
      .def_property_readonly("has_weight_gradients", &Schedule::has_weight_gradients)
      .def_property_readonly("row_multiple", &Schedule::row_multiple)
      .def_property_readonly("min_ring_tiles", &Schedule::min_ring_tiles)
      .def_property_readonly("min_weight_slots", &Schedule::min_weight_slots);
  define_struct(module, "Unit", "Row tiles of one expert that are worked on together.", Field{"expert", &Unit::expert},
                Field{"first_tile", &Unit::first_tile}, Field{"tiles", &Unit::tiles},
                Field{"tile_of_expert", &Unit::tile_of_expert}, Field{"rows_of_expert", &Unit::rows_of_expert},
                Field{"nth", &Unit::nth})
      .def("rows_of_tile", &Unit::rows_of_tile, py::arg("tile"), py::arg("tile_rows"));
  define_struct(module, "Task", "One output tile of one GEMM, or two of a narrow row tile.", Field{"gemm", &Task::gemm},
                Field{"expert", &Task::expert}, Field{"row_tile", &Task::row_tile},
                Field{"ring_slot", &Task::ring_slot}, Field{"rows", &Task::rows},
                Field{"column_tile", &Task::column_tile}, Field{"column_tiles", &Task::column_tiles},
                Field{"weight_row_tile", &Task::weight_row_tile, -1}, Field{"part", &Task::part, 0},
                Field{"sums_tile", &Task::sums_tile, -1});
  define_struct(module, "Segment", "Row tiles of one expert whose weight gradients are summed at once.",
                Field{"expert", &Segment::expert}, Field{"first_tile", &Segment::first_tile},
                Field{"tiles", &Segment::tiles}, Field{"tile_of_expert", &Segment::tile_of_expert},
                Field{"rows_of_expert", &Segment::rows_of_expert}, Field{"nth", &Segment::nth},
                Field{"part", &Segment::part},
                Field{"sums_tile", &Segment::sums_tile});
  define_struct(module, "DecodedExpert", "An expert whose weights lie in the ring of decoded ones.",
                Field{"expert", &DecodedExpert::expert}, Field{"nth", &DecodedExpert::nth},
                Field{"first_tile", &DecodedExpert::first_tile}, Field{"tiles", &DecodedExpert::tiles})
      .def("weight_slot", &DecodedExpert::weight_slot, py::arg("schedule"));
  define_struct(module, "Chunk", "Rows that one dispatcher pulls at a time.", Field{"expert", &Chunk::expert},
                Field{"row_tile", &Chunk::row_tile}, Field{"ring_slot", &Chunk::ring_slot},
                Field{"first_row", &Chunk::first_row}, Field{"tile_row", &Chunk::tile_row},
                Field{"rows", &Chunk::rows});
  define_struct(module, "RowSource", "The position-th slot of rank `source` among those that name the expert.",
                Field{"source", &RowSource::source}, Field{"position", &RowSource::position});
  define_struct(module, "Wait", "A word that must reach `target`.", Field{"signal", &Wait::signal},
                Field{"index", &Wait::index}, Field{"target", &Wait::target});
  define_struct(module, "Release", "What is added to a word.", Field{"signal", &Release::signal},
                Field{"index", &Release::index}, Field{"amount", &Release::amount});
  define_struct(module, "WaitFailure", "A wait that was given up.", Field{"rank", &WaitFailure::rank},
                Field{"worker", &WaitFailure::worker}, Field{"site", &WaitFailure::site},
                Field{"wait", &WaitFailure::wait}, Field{"seen", &WaitFailure::seen});
}

// --- units.h, scheduler.h, block_part.h, chunks.h -------------------------------------------------------------------

template <class Item, class Walk>
std::vector<Item> all_of(Walk walk) {
  std::vector<Item> items;
  for (Item item; walk.next(item);) items.push_back(item);
  return items;
}

std::vector<Unit> units(const Schedule& schedule, const Rows& rows_per_expert) {
  check(schedule);
  check(rows_per_expert);
  return all_of<Unit>(UnitWalk(schedule, rows_per_expert.data(), static_cast<int32_t>(rows_per_expert.size())));
}

std::vector<Task> tasks(const Shape& shape, const Schedule& schedule, const Rows& rows_per_expert, int32_t worker,
                        bool walks) {
  check(shape, schedule, rows_per_expert);
  require_range("worker", worker, 0, schedule.workers);
  std::vector<Task> items;
  // Dealt in turn. In a launch a worker takes the next task when it is free.
  const auto take_all = [&](auto walk) {
    Task item;
    for (int32_t number = worker; walk.seek(number, item); number += schedule.workers) items.push_back(item);
  };
  if (schedule.backward()) {
    take_all(TaskWalk<Pass::kBackward>(shape, schedule, rows_per_expert.data()));
  } else if (schedule.is_first_half()) {
    take_all(TaskWalk<Pass::kDispatchMatmul>(shape, schedule, rows_per_expert.data()));
  } else if (schedule.is_second_half()) {
    take_all(TaskWalk<Pass::kMatmulCombine>(shape, schedule, rows_per_expert.data()));
  } else {
    const MaskedExperts masked(schedule, rows_per_expert.data(), shape.local_experts());
    take_all(TaskWalk<Pass::kForward>(shape, schedule, rows_per_expert.data(), walks ? NarrowExperts() : masked.narrow()));
  }
  return items;
}

std::vector<Segment> segments(const Schedule& schedule, const Rows& rows_per_expert) {
  check(schedule);
  check(rows_per_expert);
  return all_of<Segment>(SegmentWalk(schedule, rows_per_expert.data(), static_cast<int32_t>(rows_per_expert.size())));
}

std::vector<DecodedExpert> decoded_experts(const Schedule& schedule, const Rows& rows_per_expert) {
  check(schedule);
  check(rows_per_expert);
  std::vector<DecodedExpert> experts;
  for (DecodedExpert next; next.advance(schedule, rows_per_expert.data(), static_cast<int32_t>(rows_per_expert.size()));) {
    experts.push_back(next);
  }
  return experts;
}

// `passes`: the experts before the first chunk are taken off the way, as a dispatch warp does that counts many at once.
std::vector<Chunk> chunks(const Shape& shape, const Schedule& schedule, const Rows& rows_per_expert, int32_t dispatcher,
                          bool passes) {
  check(shape, schedule, rows_per_expert);
  require_range("dispatcher", dispatcher, 0, schedule.dispatchers);
  ChunkWalk walk(shape, schedule, rows_per_expert.data(), dispatcher);
  while (passes && walk.first_expert() < shape.local_experts()) {
    const ChunkWalk::Parts parts = walk.parts_of(walk.first_expert());
    if (parts.chunks > walk.chunks_ahead()) break;
    walk.pass_experts(1, parts);
  }
  return all_of<Chunk>(walk);
}

// None where the expert has no such row.
std::optional<RowSource> source_of_row_in(const Rows& counts, int32_t row, int32_t first_source, int32_t stride) {
  for (int32_t count : counts) require_at_least("counts", count, 0);
  require_at_least("row", row, 0);
  require_at_least("stride", stride, 1);
  const int32_t ranks = ceil_div(static_cast<int32_t>(counts.size()), stride);
  require_range("first_source", first_source, 0, ranks);
  const RowSource from = source_of_row(counts.data(), stride, ranks, first_source, row);
  if (from.source < 0) return std::nullopt;
  return from;
}

// The instance of part_of_block() that the flags name.
Task part_of_block_with(const Schedule& schedule, int32_t hidden, const Task& task, int32_t rank, bool shares_columns,
                        bool exchanges, bool ring) {
  check(schedule);
  require(schedule.tile.rows == Tiling::kBlocks * Tiling::kRows,
          "tile.rows=" + std::to_string(schedule.tile.rows) + ". It needs to be " +
              std::to_string(Tiling::kBlocks * Tiling::kRows) + ", the rows of a GPU's tiles.");
  require_at_least("hidden", hidden, 1);
  require(!is_weight_gradient(task.gemm), std::string("gemm=") + kGemmNames[static_cast<int32_t>(task.gemm)] +
                                              ". It needs to be one whose tiles have rows of an expert.");
  require_range("rank", rank, 0, Tiling::kBlocks);
  using PartOfBlock = Task (*)(const Schedule&, int32_t, Task, int32_t);
  constexpr PartOfBlock kInstances[2][2][2] = {
      {{&part_of_block<false, false, false>, &part_of_block<false, false, true>},
       {&part_of_block<false, true, false>, &part_of_block<false, true, true>}},
      {{&part_of_block<true, false, false>, &part_of_block<true, false, true>},
       {&part_of_block<true, true, false>, &part_of_block<true, true, true>}}};
  return kInstances[shares_columns][exchanges][ring](schedule, hidden, task, rank);
}

void define_scheduler(py::module_& module) {
  module.def(
      "mark_experts_without_rows",
      [](Rows rows_per_expert) {
        check(rows_per_expert);
        mark_experts_without_rows(rows_per_expert.data(), static_cast<int32_t>(rows_per_expert.size()));
        return rows_per_expert;
      },
      py::arg("rows_per_expert"), "The same rows as walks pass them faster: what is less than zero is no rows.");
  module.def("segments", &segments, py::arg("schedule"), py::arg("rows_per_expert"), "The segments, in order.");
  module.def("units", &units, py::arg("schedule"), py::arg("rows_per_expert"), "The units of a rank, in order.");
  module.def("tasks", &tasks, py::arg("shape"), py::arg("schedule"), py::arg("rows_per_expert"), py::arg("worker"),
             py::arg("walks") = false,
             "The tasks of one worker, in stream order. walks: also where they would follow from their numbers.");
  module.attr("BLOCKS") = Tiling::kBlocks;
  module.attr("SAVED_PART") = kSavedPart;
  module.attr("SHARED_COLUMNS") = kSharedColumns;
  module.attr("ROW_HALVES") = kRowHalves;
  module.attr("OWN_COLUMNS") = kOwnColumns;
  module.def("part_of_block", &part_of_block_with, py::arg("schedule"), py::arg("hidden"), py::arg("task"),
             py::arg("rank"), py::arg("shares_columns") = false, py::arg("exchanges") = false, py::arg("ring") = true,
             "What block `rank` of a GPU's worker computes of a task that is not one of weight gradients.");
  module.def("decoded_experts", &decoded_experts, py::arg("schedule"), py::arg("rows_per_expert"),
             "The experts that have rows, in the order in which their weights are decoded.");
  module.def("chunks", &chunks, py::arg("shape"), py::arg("schedule"), py::arg("rows_per_expert"),
             py::arg("dispatcher"), py::arg("passes") = false, "The chunks of one dispatcher, in stream order.");
  module.def("source_of_row", &source_of_row_in, py::arg("counts"), py::arg("row"), py::arg("first_source") = 0,
             py::arg("stride") = 1, "Where a row of a local expert comes from; None where it has no such row.");
}

// --- protocol.h ------------------------------------------------------------------------------------------------------

// None where there is nothing to wait for.
std::optional<Wait> wait_before_chunk(const Shape& shape, const Schedule& schedule, const Chunk& chunk) {
  check(shape, schedule);
  const Wait wait = wait_before(shape, schedule, chunk);
  if (wait.index < 0) return std::nullopt;
  return wait;
}

void define_protocol(py::module_& module) {
  module.def("wait_before", &wait_before_chunk, py::arg("shape"), py::arg("schedule"), py::arg("chunk"),
             "The wait before a chunk; None where there is nothing to wait for.");
  module.def(
      "waits_before",
      [](const Shape& shape, const Schedule& schedule, const Task& task) {
        check(shape, schedule);
        std::vector<Wait> waits;
        for (int32_t nth = 0; nth < num_waits(schedule, task); ++nth) {
          const Wait wait = wait_before(shape, schedule, task, nth);
          if (wait.index >= 0) waits.push_back(wait);
        }
        return waits;
      },
      py::arg("shape"), py::arg("schedule"), py::arg("task"), "All waits before a task.");
  module.def(
      "wait_for_weight_gradients",
      [](const Shape& shape, const Schedule& schedule, const Segment& segment) {
        check(shape, schedule);
        return wait_for_weight_gradients(shape, schedule, segment.first_tile);
      },
      py::arg("shape"), py::arg("schedule"), py::arg("segment"),
      "The second wait of a backward pass before a chunk whose ring slot that segment had.");
  module.def("wait_for_answers", [](const Shape& shape, const Schedule& schedule, int32_t row_tile) {
    check(shape, schedule);
    return wait_for_answers(shape, schedule, row_tile);
  }, py::arg("shape"), py::arg("schedule"), py::arg("row_tile"), "All tasks of a row tile are done.");
  module.def("wait_before", [](const DecodedExpert& weights, int32_t dispatchers) {
    return wait_before(weights, dispatchers);
  }, py::arg("weights"), py::arg("dispatchers"), "The wait for weights before every task that multiplies them.");
  module.def("release_after", [](const DecodedExpert& weights) { return release_after(weights); }, py::arg("weights"));
  module.def("release_after", [](const Chunk& chunk) { return release_after(chunk); }, py::arg("chunk"));
  module.def("release_after", [](const Task& task) { return release_after(task); }, py::arg("task"));
  module.def("has_reached", &has_reached, py::arg("seen"), py::arg("target"));
  module.def("describe", &describe, py::arg("failure"), py::arg("seconds"), py::arg("worker_name"));
}

}  // namespace

void define_part(py::module_& module) {
  py::module_ schedule = module.def_submodule("schedule", "The order, the signals and the memory of one rank's work.");
  define_names(schedule);
  define_structs(schedule);
  define_scheduler(schedule);
  define_protocol(schedule);
  define_layout(schedule);
  define_executor(module);
}

}  // namespace jaxmoe
