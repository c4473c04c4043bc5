// jaxmoe._cuda: handlers for CUDA devices of compute capability 9.0.
#include "common/extension.h"

#include <pybind11/stl.h>

#include "common/build_config.h"
#include "common/device_info.h"
#include "common/exchange_call.h"
#include "common/layer_call.h"
#include "cuda/host/failures.h"
#include "cuda/host/occupant.h"
#include "cuda/host/peer_access.h"
#include "cuda/host/programs.h"
#include "cuda/host/progress.h"
#include "cuda/host/timelines.h"
#include "xla/ffi/api/api.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxmoeDeviceInfoCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxmoeLayerInstantiateCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxmoeLayerPrepareCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxmoeLayerInitializeCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxmoeLayerCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxmoeExchangeInstantiateCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxmoeExchangePrepareCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxmoeExchangeInitializeCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxmoeExchangeCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxmoeFinishCuda);

namespace jaxmoe {

std::vector<Registration> registrations() {
  std::vector<Registration> all{{kDeviceInfoTarget, "execute", JaxmoeDeviceInfoCuda},
                                {kFinishTarget, "execute", JaxmoeFinishCuda}};
  for (const char* target : {kForwardTarget, kBackwardTarget}) {
    all.push_back({target, "instantiate", JaxmoeLayerInstantiateCuda});
    all.push_back({target, "prepare", JaxmoeLayerPrepareCuda});
    all.push_back({target, "initialize", JaxmoeLayerInitializeCuda});
    all.push_back({target, "execute", JaxmoeLayerCuda});
  }
  for (const char* target : {kDispatchTarget, kCombineTarget}) {
    all.push_back({target, "instantiate", JaxmoeExchangeInstantiateCuda});
    all.push_back({target, "prepare", JaxmoeExchangePrepareCuda});
    all.push_back({target, "initialize", JaxmoeExchangeInitializeCuda});
    all.push_back({target, "execute", JaxmoeExchangeCuda});
  }
  return all;
}

std::vector<StateType> state_types() { return {instruction_type()}; }

std::map<std::string, std::string> part_build_info() {
  return {{"cuda_toolkit", build_config::kNvccVersion},
          {"cuda_arch", build_config::kCudaArch},
          {"timeline", build_config::kTimeline},
          {"nvcc", build_config::kNvcc},
          {"nvcc_flags", build_config::kNvccFlags}};
}

std::vector<LaunchTimeline> timelines() { return arena_timelines(); }

// What Python asks about schedules and layouts is integer code that needs no GPU: _native, which is always built, has
// it.
void define_part(pybind11::module_& module) {
  namespace py = pybind11;
  // Without the interpreter's lock: they wait for a GPU, or for threads that do, and its work may wait for other threads
  // of Python.
  const py::call_guard<py::gil_scoped_release> unlocked;
  py::class_<Occupant>(module, "Occupant", "Holds multiprocessors of a GPU (cuda/host/occupant.h).")
      .def(py::init<int, int, double>(), py::arg("device"), py::arg("blocks"), py::arg("most_seconds"), unlocked)
      .def("release", &Occupant::release)
      .def("held_to_the_end", &Occupant::held_to_the_end, unlocked);
  module.def("visible_gpus", &visible_gpus, "GPUs of compute capability 9.0, as the CUDA runtime numbers them.");
  module.def("peer_access", &peer_access, pybind11::arg("gpu"), pybind11::arg("peer"),
             "Whether one GPU can reach the memory of another one.");
  module.def("know_devices", &know_devices, pybind11::arg("local"), pybind11::arg("several_processes"),
             "Ids of the devices of this process, and whether there are other processes.");
  module.def("failures", &failures, "What keeps the layers of this process from running again.", unlocked);
  py::class_<LaunchProgress>(module, "LaunchProgress", "How far the launches on one GPU are (cuda/host/progress.h).")
      .def_readonly("device", &LaunchProgress::device)
      .def_readonly("enqueued", &LaunchProgress::enqueued)
      .def_readonly("waiting", &LaunchProgress::waiting)
      .def_readonly("waiting_seconds", &LaunchProgress::waiting_seconds);
  module.def("progress", &launch_progress, "How far the launches of layers are on each GPU of this process.", unlocked);
  module.def("untold_failures", &untold_failures, "Of those, what no call has returned and nobody has asked for.", unlocked);
}

}  // namespace jaxmoe
