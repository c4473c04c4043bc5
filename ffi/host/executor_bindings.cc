// The submodule `executor` of jaxmoe._native: layers back to back on the host executor, without XLA between them, for
// the tests in tests/host/test_executor.py. Ranks are threads that never wait for each other between layers, so that a
// rank may be one launch ahead, and tests can make signals late, missing or ignored.
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "host/executor.h"
#include "host/executor_bindings.h"
#include "host/group.h"
#include "host/timeline.h"

namespace py = pybind11;

namespace jaxmoe {
namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

void need(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument("run_layers: " + what + ".");
}

// Returns y [launches, ranks, tokens, hidden].
Array<float> run_layers(const Shape& shape, const Schedule& schedule, const Array<float>& x, const Array<int32_t>& ids,
                        const Array<float>& weights, const Array<float>& w_gate, const Array<float>& w_up,
                        const Array<float>& w_down, const host::Disturbance& disturbance, double timeout_seconds) {
  need(x.ndim() == 4 && ids.ndim() == 4 && weights.ndim() == 4 && w_gate.ndim() == 3 && w_down.ndim() == 3,
       "x, ids and weights must be [launches, ranks, tokens, ...], weights of experts [experts, ..., ...]");
  const int64_t launches = x.shape(0);
  const int64_t experts = shape.num_experts, matrix = int64_t{shape.hidden} * shape.intermediate;
  need(x.size() == launches * shape.ranks * shape.tokens * shape.hidden, "x does not have the shape's size");
  need(ids.size() == launches * shape.ranks * shape.slots() && weights.size() == ids.size(),
       "ids or weights do not have the shape's size");
  need(w_gate.size() == experts * matrix && w_up.size() == w_gate.size() && w_down.size() == w_gate.size(),
       "weights of experts do not have the shape's size");
  need(schedule.workers > 0 && schedule.dispatchers % schedule.workers == 0,
       "dispatchers must be a multiple of workers");

  Array<float> y(std::vector<py::ssize_t>{launches, shape.ranks, shape.tokens, shape.hidden});
  const HeadCapacity head = needed_head(shape, schedule);
  const host::Arenas arenas(head, layout_of(shape, schedule, head, sizeof(float)).bytes);
  std::atomic<bool> given_up = false;
  const host::Launch launch{.shape = shape,
                            .schedule = schedule,
                            .head = head,
                            .dispatchers_per_worker = schedule.dispatchers / schedule.workers,
                            .activation = {},
                            .arenas = arenas.of_ranks(),
                            .timeout_seconds = timeout_seconds,
                            .given_up = &given_up,
                            .disturbance = disturbance};
  const auto run = [&, x = x.data(), ids = ids.data(), weights = weights.data(), w_gate = w_gate.data(),
                    w_up = w_up.data(), w_down = w_down.data(), y = y.mutable_data()](int32_t rank) -> std::string {
    const int64_t first_weight = int64_t{rank} * shape.local_experts() * matrix;
    for (int64_t i = 0; i < launches; ++i) {
      const int64_t nth = i * shape.ranks + rank;
      const host::LayerArrays<host::F32> arrays{.x = x + nth * shape.tokens * shape.hidden,
                                                .topk_ids = ids + nth * shape.slots(),
                                                .topk_weights = weights + nth * shape.slots(),
                                                .w_gate = w_gate + first_weight,
                                                .w_up = w_up + first_weight,
                                                .w_down = w_down + first_weight,
                                                .b_gate = nullptr,
                                                .b_up = nullptr,
                                                .b_down = nullptr,
                                                .y = y + nth * shape.tokens * shape.hidden};
      LaunchTimeline timeline;
      const bool recorded = host::timeline_is_on;
      const std::string failure = host::run_rank<host::F32>(launch, rank, arrays, recorded ? &timeline : nullptr);
      if (!failure.empty()) return failure;
      if (recorded) host::keep_timeline(std::move(timeline));
    }
    return "";
  };
  std::vector<std::string> failures(shape.ranks);
  {
    const py::gil_scoped_release unlocked;
    std::vector<std::thread> ranks;
    for (int32_t rank = 0; rank < shape.ranks; ++rank) {
      ranks.emplace_back([&, rank] { failures[rank] = run(rank); });
    }
    for (std::thread& thread : ranks) thread.join();
  }
  std::string text;
  for (const std::string& failure : failures) text += (text.empty() || failure.empty() ? "" : "\n") + failure;
  if (!text.empty()) throw std::runtime_error(text);
  return y;
}

}  // namespace

void define_executor(py::module_& module) {
  py::module_ executor = module.def_submodule("executor", "Layers back to back on the host executor, for tests.");
  py::class_<host::Disturbance>(executor, "Disturbance", "What a test makes go wrong; see host/executor.h.")
      .def(py::init([](uint64_t delay_seed, int32_t most_delay_us, int32_t rank, std::optional<Signal> dropped_signal,
                       int32_t dropped_index, std::optional<Site> skipped_site) {
             return host::Disturbance{
                 delay_seed, most_delay_us, rank, dropped_signal ? static_cast<int32_t>(*dropped_signal) : -1,
                 dropped_index, skipped_site ? static_cast<int32_t>(*skipped_site) : -1};
           }),
           py::kw_only(), py::arg("delay_seed") = 0, py::arg("most_delay_us") = 0, py::arg("rank") = -1,
           py::arg("dropped_signal") = py::none(), py::arg("dropped_index") = 0, py::arg("skipped_site") = py::none());
  executor.def("run_layers", &run_layers, py::arg("shape"), py::arg("schedule"), py::arg("x"), py::arg("ids"),
               py::arg("weights"), py::arg("w_gate"), py::arg("w_up"), py::arg("w_down"), py::kw_only(),
               py::arg("disturbance") = host::Disturbance{}, py::arg("timeout_seconds") = 10.0,
               "Runs x.shape[0] layers one after the other on every rank and returns y "
               "[launches, ranks, tokens, hidden]; raises RuntimeError with what each rank had to say.");
  executor.def("record_timelines", &host::record_timelines, py::arg("on"),
               "Whether layers of this process record what they do when, from now on; returns what held before.");
}

}  // namespace jaxmoe
