#include "host/layout_bindings.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include <pybind11/stl.h>

#include "common/formats.h"
#include "common/layout.h"
#include "common/protocol.h"
#include "common/shape.h"
#include "host/argument_checks.h"
#include "host/struct_bindings.h"

namespace py = pybind11;

namespace jaxmoe {
namespace {

using NamedRegion = std::pair<const char*, Region ArenaLayout::*>;
constexpr NamedRegion kHeadRegions[] = {{"control", &ArenaLayout::control},
                                        {"flags", &ArenaLayout::flags},
                                        {"counters", &ArenaLayout::counters},
                                        {"rows_from", &ArenaLayout::rows_from},
                                        {"source_slots", &ArenaLayout::source_slots}};
constexpr NamedRegion kBodyRegions[] = {{"tokens", &ArenaLayout::tokens},
                                        {"answers", &ArenaLayout::answers},
                                        {"summed_slots", &ArenaLayout::summed_slots},
                                        {"routing_weights", &ArenaLayout::routing_weights},
                                        {"routing_weight_gradients", &ArenaLayout::routing_weight_gradients},
                                        {"slot_rows", &ArenaLayout::slot_rows},
                                        {"histograms", &ArenaLayout::histograms},
                                        {"kept_tokens", &ArenaLayout::kept_tokens},
                                        {"kept_states", &ArenaLayout::kept_states},
                                        {"answer_places", &ArenaLayout::answer_places},
                                        {"answer_weights", &ArenaLayout::answer_weights},
                                        {"wanted_experts", &ArenaLayout::wanted_experts},
                                        {"row_targets", &ArenaLayout::row_targets},
                                        {"rows", &ArenaLayout::rows},
                                        {"h", &ArenaLayout::h},
                                        {"row_routing_weights", &ArenaLayout::row_routing_weights},
                                        {"row_products", &ArenaLayout::row_products},
                                        {"projections", &ArenaLayout::projections},
                                        {"weight_sums", &ArenaLayout::weight_sums},
                                        {"decoded_weights", &ArenaLayout::decoded_weights},
                                        {"decoded_scales", &ArenaLayout::decoded_scales}};

template <size_t kSize>
py::dict regions_of(const ArenaLayout& layout, const NamedRegion (&named)[kSize]) {
  py::dict regions;
  for (const auto& [name, member] : named) {
    const Region& region = layout.*member;
    regions[name] = py::make_tuple(region.offset, region.bytes);
  }
  return regions;
}

void check_sizes(const Shape& shape, const Schedule& schedule) {
  check(shape);
  check(schedule, 0);
}

void check(const Shape& shape, const Schedule& schedule, const HeadCapacity& head) {
  check_sizes(shape, schedule);
  check(head);
  require(head.holds(needed_head(shape, schedule)),
          "the head is too small for the shape. It needs to hold needed_head().");
}

ArenaLayout layout_for(const Shape& shape, const Schedule& schedule, const Formats& formats, const HeadCapacity& head) {
  check(shape, schedule, head);
  return layout_of(shape, schedule, formats, head);
}

uint64_t agreement_for(const Shape& shape, const Schedule& schedule, const Formats& formats, const HeadCapacity& head) {
  check(shape, schedule, head);
  return agreement_of(shape, schedule, formats, head);
}

Element element_named(const std::string& name) {
  for (int32_t i = 0; i < kNumElements; ++i) {
    if (name == kElements[i].name) return static_cast<Element>(i);
  }
  require(false, "element " + name + " is none that layers have.");
  return {};
}

Format format_of(const std::string& element, int32_t scale_rows, int32_t scale_columns, const std::string& scale,
                 int32_t group_columns, const std::string& group_scale) {
  require((scale_rows > 0) == (scale_columns > 0) && scale_rows >= 0 && scale_columns >= 0,
          "scale_rows=" + std::to_string(scale_rows) + " and scale_columns=" + std::to_string(scale_columns) +
              ". Both need to be positive, or both 0.");
  require_at_least("group_columns", group_columns, 0);
  return {element_named(element), scale_rows, scale_columns, element_named(scale), group_columns,
          element_named(group_scale)};
}

void define_formats(py::module_& module) {
  const auto name_of = [](Element Format::* element) {
    return [element](const Format& format) { return info_of(format.*element).name; };
  };
  py::class_<Format>(module, "Format", "What the elements of an array are; elements go by NumPy's names.")
      .def(py::init(&format_of), py::arg("element"), py::arg("scale_rows") = 0, py::arg("scale_columns") = 0,
           py::arg("scale") = "float32", py::arg("group_columns") = 0, py::arg("group_scale") = "float32")
      .def_property_readonly("element", name_of(&Format::element))
      .def_readonly("scale_rows", &Format::scale_rows)
      .def_readonly("scale_columns", &Format::scale_columns)
      .def_property_readonly("scale", name_of(&Format::scale))
      .def_readonly("group_columns", &Format::group_columns)
      .def_property_readonly("group_scale", name_of(&Format::group_scale))
      .def("row_bytes", &Format::row_bytes, py::arg("columns"))
      .def("scale_bytes", &Format::scale_bytes, py::arg("rows"), py::arg("columns"))
      .def("bytes", &Format::bytes, py::arg("rows"), py::arg("columns"));
  define_struct(module, "Formats", "The formats of a layer's arrays.", Field{"tokens", &Formats::tokens},
                Field{"h", &Formats::h}, Field{"answers", &Formats::answers}, Field{"weights", &Formats::weights},
                Field{"sums", &Formats::sums})
      .def_static("of", [](const std::string& element) { return Formats::of(element_named(element)); },
                  py::arg("element"), "All in one type but for the sums, which have at least 32 bits.");
}

int64_t word_offset(const ArenaLayout& layout, const HeadCapacity& head, uint32_t launch_number, Signal signal,
                    int32_t index) {
  require_range("index", index, 0, is_from_peers(signal) ? head.ranks : is_per_tile(signal) ? head.row_tiles : 1);
  return word_of(layout, head, launch_number, signal, index);
}

int64_t rows_from_offset(const ArenaLayout& layout, const HeadCapacity& head, uint32_t launch_number, int32_t source) {
  require_range("source", source, 0, head.ranks);
  return rows_from_source(layout, head, launch_number, source);
}

int64_t slots_from_offset(const ArenaLayout& layout, const HeadCapacity& head, int32_t source) {
  require_range("source", source, 0, head.ranks);
  return slots_from_source(layout, head, source);
}

}  // namespace

void define_layout(py::module_& module) {
  define_formats(module);
  define_struct(module, "HeadCapacity", "What the head of an arena has room for.", Field{"ranks", &HeadCapacity::ranks},
                Field{"local_experts", &HeadCapacity::local_experts}, Field{"row_tiles", &HeadCapacity::row_tiles},
                Field{"slots", &HeadCapacity::slots})
      .def("holds", &HeadCapacity::holds, py::arg("other"));
  py::class_<ArenaLayout>(module, "ArenaLayout", "Where everything lies; head and body are {region: (offset, bytes)}.")
      .def_readonly("head_bytes", &ArenaLayout::head_bytes)
      .def_readonly("bytes", &ArenaLayout::bytes)
      .def_property_readonly("head", [](const ArenaLayout& layout) { return regions_of(layout, kHeadRegions); })
      .def_property_readonly("body", [](const ArenaLayout& layout) { return regions_of(layout, kBodyRegions); });

  const auto counted = [&module](const char* name, auto count) {
    module.def(
        name,
        [count](const Shape& shape, const Schedule& schedule) {
          check_sizes(shape, schedule);
          return count(shape, schedule);
        },
        py::arg("shape"), py::arg("schedule"));
  };
  counted("max_row_tiles", [](const Shape& shape, const Schedule& s) { return max_row_tiles(shape, s.tile); });
  counted("h_tiles", [](const Shape& shape, const Schedule& s) { return h_tiles(shape, s.tile); });
  counted("answer_tiles", [](const Shape& shape, const Schedule& s) { return answer_tiles(shape, s.tile); });
  counted("gradient_tiles", [](const Shape& shape, const Schedule& s) { return gradient_tiles(shape, s.tile); });
  counted("weight_tasks", [](const Shape& shape, const Schedule& s) { return weight_tasks(shape, s.tile); });
  counted("most_sorters", [](const Shape& shape, const Schedule&) { return most_sorters(shape); });
  counted("num_sorters", [](const Shape& shape, const Schedule& schedule) { return num_sorters(shape, schedule); });
  counted("needed_head", needed_head);

  module.def("layout_of", &layout_for, py::arg("shape"), py::arg("schedule"), py::arg("formats"),
             py::arg("head"));
  module.def("agreement_of", &agreement_for, py::arg("shape"), py::arg("schedule"), py::arg("formats"),
             py::arg("head"), "A hash of all that the ranks of a group must have the same.");
  module.def("counter_words", &counter_words, py::arg("head"), "Words in one bank of counters.");
  module.def("word_of", &word_offset, py::arg("layout"), py::arg("head"), py::arg("launch_number"), py::arg("signal"),
             py::arg("index"), "Byte offset of a signal's word.");
  module.def("rows_from_source", &rows_from_offset, py::arg("layout"), py::arg("head"), py::arg("launch_number"),
             py::arg("source"), "Byte offset of the sums of rows that a source wrote.");
  module.def("slots_from_source", &slots_from_offset, py::arg("layout"), py::arg("head"), py::arg("source"),
             "Byte offset of the slot list that a source wrote.");
  module.def(
      "pack_row_target",
      [](int32_t source, int32_t slot) {
        require_range("source", source, 0, kMaxRanks);
        require_range("slot", slot, 0, kMaxSlots);
        return RowTarget::of(source, slot).packed;
      },
      py::arg("source"), py::arg("slot"));
  module.def(
      "unpack_row_target",
      [](uint32_t packed) {
        const RowTarget target{packed};
        return py::make_tuple(target.source(), target.slot());
      },
      py::arg("packed"), "(source, slot)");
  module.def(
      "kept_index",
      [](const Shape& shape, int32_t rank, int32_t source, int32_t token) {
        check(shape);
        require_range("rank", rank, 0, shape.ranks);
        require_range("source", source, 0, shape.ranks);
        require_range("token", token, 0, shape.tokens);
        require(source != rank, "source=" + std::to_string(source) + " is the rank itself. It keeps tokens of others.");
        return kept_index(shape, rank, source, token);
      },
      py::arg("shape"), py::arg("rank"), py::arg("source"), py::arg("token"));
  module.def(
      "waiting_answer",
      [](const Shape& shape, const Schedule& schedule, int32_t row_tile, int32_t tile_row) {
        check_sizes(shape, schedule);
        require_range("row_tile", row_tile, 0, schedule.summed_tiles);
        require_range("tile_row", tile_row, 0, schedule.tile.rows);
        return waiting_answer(shape, schedule, row_tile, tile_row);
      },
      py::arg("shape"), py::arg("schedule"), py::arg("row_tile"), py::arg("tile_row"),
      "The row of answers where one waits to be added up at experts.");
  module.def(
      "sum_row",
      [](const Shape& shape, const Schedule& schedule, int32_t rank, int32_t token) {
        check_sizes(shape, schedule);
        require_at_least("summed_tiles", schedule.summed_tiles, 1);
        require_range("rank", rank, 0, shape.ranks);
        require_range("token", token, 0, shape.tokens);
        return sum_row(shape, schedule, rank, token);
      },
      py::arg("shape"), py::arg("schedule"), py::arg("rank"), py::arg("token"),
      "The row of answers with the sum that a rank has made for a token.");
  module.attr("region_alignment") = kRegionAlignment;
  module.attr("flag_bytes") = kFlagBytes;
  module.attr("max_slots") = kMaxSlots;
  module.attr("max_ranks") = kMaxRanks;
  module.attr("max_local_experts") = kMaxLocalExperts;
  module.attr("max_local_experts_ahead") = kMaxLocalExpertsAhead;
  module.attr("max_experts") = kMaxExperts;
}

}  // namespace jaxmoe
