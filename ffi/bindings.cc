// The Python face of an extension module. Compiled once per module with JAXMOE_MODULE set to its name; what differs
// between the modules comes through common/extension.h.
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "common/build_config.h"
#include "common/device_info.h"
#include "common/extension.h"
#include "common/timeline.h"
#include "xla/ffi/api/c_api.h"

#if __has_include("xla/ffi/api/collectives_c_api.h")
#include "xla/ffi/api/collectives_c_api.h"
#endif

namespace py = pybind11;

namespace jaxmoe {
namespace {

template <class Struct, class Number>
struct Field {
  const char* name;
  Number Struct::*member;
};

// A structured array with these fields. Not PYBIND11_NUMPY_DTYPE: both modules would register the same struct, and they
// share pybind11's tables.
template <class Struct, class... Numbers>
py::array array_of(const std::vector<Struct>& values, Field<Struct, Numbers>... fields) {
  const Struct of{};
  const auto offset = [&](const auto& member) {
    return py::int_(reinterpret_cast<const char*>(&member) - reinterpret_cast<const char*>(&of));
  };
  py::list names, formats, offsets;
  (names.append(fields.name), ...);
  (formats.append(py::dtype::of<Numbers>()), ...);
  (offsets.append(offset(of.*(fields.member))), ...);
  const auto size = static_cast<py::ssize_t>(sizeof(Struct));
  return py::array(py::dtype(names, formats, offsets, size), {static_cast<py::ssize_t>(values.size())}, {size},
                   values.data());
}

py::array events_of(const LaunchTimeline& launch) {
  using Row = TimelineRow;
  return array_of(launch.rows, Field{"block", &Row::block}, Field{"role", &Row::role}, Field{"nth", &Row::nth},
                  Field{"kind", &Row::kind}, Field{"expert", &Row::expert}, Field{"row_tile", &Row::row_tile},
                  Field{"part", &Row::part}, Field{"stalled", &Row::stalled}, Field{"begin", &Row::begin},
                  Field{"end", &Row::end});
}

py::array clocks_of(const LaunchTimeline& launch) {
  using Clock = TimelineClock;
  return array_of(launch.clocks, Field{"sm", &Clock::sm}, Field{"dropped", &Clock::dropped},
                  Field{"begin_ticks", &Clock::begin_ticks}, Field{"begin_ns", &Clock::begin_ns},
                  Field{"end_ticks", &Clock::end_ticks}, Field{"end_ns", &Clock::end_ns});
}

std::string version_text(int major, int minor) { return std::to_string(major) + "." + std::to_string(minor); }

std::string compiler_text() {
#if defined(__clang__)
  return "Clang " __clang_version__;
#elif defined(__GNUC__)
  return "GCC " __VERSION__;
#else
  return "unknown";
#endif
}

// {target: {stage: capsule}}, as jax.ffi.register_ffi_target takes it.
py::dict registrations_dict() {
  py::dict targets;
  for (const Registration& entry : registrations()) {
    py::str target(entry.target);
    if (!targets.contains(target)) targets[target] = py::dict();
    // XLA accepts only capsules of this name.
    targets[target][py::str(entry.handler_stage)] =
        py::capsule(reinterpret_cast<void*>(entry.handler), "xla._CUSTOM_CALL_TARGET");
  }
  return targets;
}

// {name: {"type_id": capsule, "type_info": capsule}}, as jax.ffi.register_ffi_type takes it.
py::dict state_types_dict() {
  py::dict types;
  for (const StateType& type : state_types()) {
    py::dict entry;
    entry["type_id"] = py::capsule(static_cast<void*>(type.id));
    entry["type_info"] = py::capsule(static_cast<const void*>(type.info));
    types[py::str(type.name)] = entry;
  }
  return types;
}

std::map<std::string, std::string> build_info() {
  std::map<std::string, std::string> info = part_build_info();
  info["compiler"] = compiler_text();
  info["cpp_standard"] = std::to_string(__cplusplus);
  info["version"] = build_config::kVersion;
  info["jaxlib"] = build_config::kJaxlibVersion;
  info["ffi_api"] = version_text(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
#ifdef XLA_FFI_Extension_Collectives
  info["collectives_api"] =
      version_text(XLA_FFI_Extension_Collectives_MajorVersion, XLA_FFI_Extension_Collectives_MinorVersion);
#else
  info["collectives_api"] = "";
#endif
  return info;
}

void define_timeline(py::module_& module) {
  py::class_<LaunchTimeline>(module, "LaunchTimeline", py::module_local(),
                             "What one rank did when in one launch (common/timeline.h).")
      .def_readonly("device", &LaunchTimeline::device)
      .def_readonly("ranks", &LaunchTimeline::ranks)
      .def_readonly("rank", &LaunchTimeline::rank)
      .def_readonly("launch", &LaunchTimeline::launch)
      .def_readonly("backward", &LaunchTimeline::backward)
      .def_property_readonly("clocks", &clocks_of)
      .def_property_readonly("events", &events_of);
  module.def("timelines", &timelines, py::call_guard<py::gil_scoped_release>(),
             "The last launch of every rank that was recorded.");
  module.def("timeline_bytes", &timeline_bytes, py::arg("blocks"), "Size of the buffer that a GPU records into.");
  module.def(
      "decode_timeline",
      [](const py::bytes& buffer, int32_t blocks) {
        const std::string_view bytes = buffer;
        if (blocks < 0 || static_cast<int64_t>(bytes.size()) != timeline_bytes(blocks)) {
          throw py::value_error("decode_timeline: " + std::to_string(bytes.size()) + " bytes are no buffer of " +
                                std::to_string(blocks) + " blocks.");
        }
        return decode_timeline(reinterpret_cast<const std::byte*>(bytes.data()), blocks);
      },
      py::arg("buffer"), py::arg("blocks"), "What lies in such a buffer after a launch.");
  py::list kinds;
  for (const EventKindInfo& kind : kEventKinds) kinds.append(py::make_tuple(kind.name, kind.waits));
  module.attr("timeline_kinds") = py::tuple(kinds);
  py::list roles;
  for (const char* role : kTrackRoleNames) roles.append(py::str(role));
  module.attr("timeline_roles") = py::tuple(roles);
}

py::tuple device_info_fields() {
  py::tuple names(kDeviceInfoFields.size());
  for (size_t i = 0; i < kDeviceInfoFields.size(); ++i) {
    names[i] = py::str(kDeviceInfoFields[i].data(), kDeviceInfoFields[i].size());
  }
  return names;
}

}  // namespace
}  // namespace jaxmoe

PYBIND11_MODULE(JAXMOE_MODULE, module) {
  module.def("registrations", &jaxmoe::registrations_dict, "FFI handlers: {target: {stage: capsule}}.");
  module.def("state_types", &jaxmoe::state_types_dict, "Types kept between stages: {name: {fact: capsule}}.");
  module.def("build_info", &jaxmoe::build_info, "How this module was compiled: {fact: text}.");
  module.def("device_info_fields", &jaxmoe::device_info_fields, "Names of the words that jaxmoe_device_info writes.");
  jaxmoe::define_timeline(module);
  jaxmoe::define_part(module);
}
