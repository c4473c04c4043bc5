// The submodule `executor` of jaxmoe._native: layers and their gradients back to back on the host executor, without XLA
// between them, for the tests in tests/host/test_executor.py. Ranks are threads that never wait for each other between
// passes, so that a rank may be one launch ahead, and tests can make signals late, missing or ignored.
#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <limits>
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
#include "host/scaled_rows.h"
#include "host/timeline.h"

namespace py = pybind11;

namespace jaxmoe {
namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

void need(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument("executor: " + what + ".");
}

using Scales = std::array<Array<float>, 3>;  // of w_gate, w_up and w_down

// What the launches are given: of tokens [launches, ranks, tokens, ...], of experts [experts, ..., ...]. `dy` is empty
// where there is no backward pass, scales are where weights have none.
template <class Precision>
struct Inputs {
  using Weights = Array<typename Precision::Weight::Storage>;
  Formats formats;
  Array<float> x;
  Array<int32_t> topk_ids;
  Array<float> topk_weights;
  Weights w_gate, w_up, w_down;
  Array<float> dy;
  Scales scales;
  bool power_of_two_scales;

  int64_t launches() const { return x.shape(0); }
};

template <class Precision>
void check(const Shape& shape, const std::vector<Schedule>& passes, const Inputs<Precision>& in) {
  need(in.x.ndim() == 4 && in.topk_ids.ndim() == 4 && in.topk_weights.ndim() == 4 && in.w_gate.ndim() == 3 &&
           in.w_down.ndim() == 3,
       "x, ids and weights must be [launches, ranks, tokens, ...], weights of experts [experts, ..., ...]");
  const int64_t matrix = int64_t{shape.hidden} * shape.intermediate;
  need(in.x.size() == in.launches() * shape.ranks * shape.tokens * shape.hidden, "x does not have the shape's size");
  need(in.topk_ids.size() == in.launches() * shape.ranks * shape.slots() &&
           in.topk_weights.size() == in.topk_ids.size(),
       "ids or weights do not have the shape's size");
  need(in.w_gate.size() == shape.num_experts * matrix && in.w_up.size() == in.w_gate.size() &&
           in.w_down.size() == in.w_gate.size(),
       "weights of experts do not have the shape's size");
  need(shape.projections == 2, "experts have gate and up here");
  if (in.formats.weights.is_scaled()) {
    const auto scales_fit = [&](const Array<float>& scales, int32_t width, int32_t depth) {
      return scales.nbytes() == shape.num_experts * in.formats.weights.scale_bytes(width, depth);
    };
    const bool whole = shape.hidden % kScaleColumns == 0 && shape.intermediate % kScaleColumns == 0;
    need((whole || host::kDecodes<Precision>) &&
             scales_fit(in.scales[0], shape.intermediate, shape.hidden) &&
             scales_fit(in.scales[1], shape.intermediate, shape.hidden) &&
             scales_fit(in.scales[2], shape.hidden, shape.intermediate),
         "scales do not have the shape's size, or hidden and intermediate are no multiples of 128");
  }
  for (const Schedule& schedule : passes) {
    need(schedule.workers > 0 && schedule.dispatchers % schedule.workers == 0,
         "dispatchers must be a multiple of workers");
    need(!schedule.backward() || in.dy.size() == in.x.size(), "dy does not have the size of x");
    need(schedule.decodes() == host::kDecodes<Precision>, "all passes decode weights that have scales, or none does");
    need(!Precision::kScaled || (!schedule.backward() && schedule.tile.h_columns % kScaleColumns == 0),
         "with scales there are forward passes only, of tiles with a multiple of 128 columns of h");
  }
}

// What all ranks write, [launches, ranks, ...]; NaN where nobody does.
class Results {
 public:
  Results(const Shape& shape, int64_t launches, bool forward, bool backward, bool of_weights) {
    const int64_t local = shape.local_experts();
    const std::vector<int64_t> tokens{shape.tokens, shape.hidden}, slots{shape.tokens, shape.top_k};
    const std::vector<int64_t> up{local, shape.hidden, shape.intermediate};
    const std::vector<int64_t> down{local, shape.intermediate, shape.hidden};
    const auto add = [&](const char* name, float*& data, const std::vector<int64_t>& sizes) {
      std::vector<py::ssize_t> all{launches, shape.ranks};
      all.insert(all.end(), sizes.begin(), sizes.end());
      Array<float> array(all);
      data = array.mutable_data();
      std::fill(data, data + array.size(), std::numeric_limits<float>::quiet_NaN());
      named_[name] = array;
    };
    if (forward) add("y", y, tokens);
    if (!backward) return;
    add("dx", dx, tokens);
    add("dtopk_weights", dtopk_weights, slots);
    if (!of_weights) return;
    add("dw_gate", dw_gate, up);
    add("dw_up", dw_up, up);
    add("dw_down", dw_down, down);
  }

  const py::dict& named() const { return named_; }

  float* y = nullptr;
  float* dx = nullptr;
  float* dtopk_weights = nullptr;
  float* dw_gate = nullptr;
  float* dw_up = nullptr;
  float* dw_down = nullptr;

 private:
  py::dict named_;
};

// The arrays of one rank in one launch of all passes.
template <class Precision>
host::ArraysOf<Precision> arrays_of(const Shape& shape, const Inputs<Precision>& in, const Results& out,
                                    int64_t launch, int32_t rank) {
  const int64_t nth = launch * shape.ranks + rank;
  const int64_t tokens = nth * shape.tokens * shape.hidden, slots = nth * shape.slots();
  const int64_t experts = int64_t{shape.local_experts()} * shape.hidden * shape.intermediate;
  const auto from = [](auto* data, int64_t offset) { return data == nullptr ? nullptr : data + offset; };
  // Of this rank's experts; all of them have as many.
  const auto scales = [&](const Array<float>& all) { return all.data() + all.size() / shape.ranks * rank; };
  return {.x = in.x.data() + tokens,
          .topk_ids = in.topk_ids.data() + slots,
          .topk_weights = in.topk_weights.data() + slots,
          .w_gate = in.w_gate.data() + rank * experts,
          .w_up = in.w_up.data() + rank * experts,
          .w_down = in.w_down.data() + rank * experts,
          .w_gate_scales = scales(in.scales[0]),
          .w_up_scales = scales(in.scales[1]),
          .w_down_scales = scales(in.scales[2]),
          .dy = in.dy.size() == 0 ? nullptr : in.dy.data() + tokens,
          .y = from(out.y, tokens),
          .dx = from(out.dx, tokens),
          .dtopk_weights = from(out.dtopk_weights, slots),
          .dw_gate = from(out.dw_gate, nth * experts),
          .dw_up = from(out.dw_up, nth * experts),
          .dw_down = from(out.dw_down, nth * experts)};
}

// Arenas that have room for every pass.
host::Arenas arenas_for(const Shape& shape, const std::vector<Schedule>& passes, const Formats& formats,
                        HeadCapacity& head) {
  head = needed_head(shape, passes[0]);
  for (const Schedule& schedule : passes) {
    head.row_tiles = std::max(head.row_tiles, needed_head(shape, schedule).row_tiles);
  }
  int64_t bytes = 0;
  for (const Schedule& schedule : passes) {
    bytes = std::max(bytes, layout_of(shape, schedule, formats, head).bytes);
  }
  return {head, bytes};
}

// Runs every pass for every launch's inputs, one after the other in the same arenas.
template <class Precision>
py::dict run_passes(const Shape& shape, const std::vector<Schedule>& passes, const Inputs<Precision>& in,
                    const host::Disturbance& disturbance, double timeout_seconds) {
  check(shape, passes, in);
  const auto backward = [](const Schedule& schedule) { return schedule.backward(); };
  const Results out(shape, in.launches(), !std::all_of(passes.begin(), passes.end(), backward),
                    std::any_of(passes.begin(), passes.end(), backward), !host::kDecodes<Precision>);
  HeadCapacity head;
  const host::Arenas arenas = arenas_for(shape, passes, in.formats, head);
  host::Outcome outcome;
  const auto run = [&](int32_t rank) -> std::string {
    for (int64_t i = 0; i < in.launches(); ++i) {
      for (const Schedule& schedule : passes) {
        const host::Launch launch{.shape = shape,
                                  .schedule = schedule,
                                  .formats = in.formats,
                                  .head = head,
                                  .dispatchers_per_worker = schedule.dispatchers / schedule.workers,
                                  .activation = {},
                                  .power_of_two_scales = in.power_of_two_scales,
                                  .arenas = arenas.of_ranks(),
                                  .timeout_seconds = timeout_seconds,
                                  .outcome = &outcome,
                                  .disturbance = disturbance};
        LaunchTimeline timeline;
        const bool recorded = host::timeline_is_on;
        const std::string failure = host::run_rank<Precision>(launch, rank, arrays_of(shape, in, out, i, rank),
                                                              recorded ? &timeline : nullptr);
        if (!failure.empty()) return failure;
        if (recorded) host::keep_timeline(std::move(timeline));
      }
    }
    return "";
  };
  std::vector<std::string> failures(shape.ranks);
  {
    const py::gil_scoped_release unlocked;
    std::vector<std::thread> ranks;
    for (int32_t rank = 0; rank < shape.ranks; ++rank) {
      ranks.emplace_back([&, rank] {
        try {
          failures[rank] = run(rank);
        } catch (const std::exception& thrown) {
          outcome.break_off(rank, thrown.what());
          failures[rank] = outcome.reason();
        }
      });
    }
    for (std::thread& thread : ranks) thread.join();
  }
  std::string text;
  for (const std::string& failure : failures) text += (text.empty() || failure.empty() ? "" : "\n") + failure;
  if (!text.empty()) throw std::runtime_error(text);
  return out.named();
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
  executor.def(
      "run_passes",
      [](const Shape& shape, const std::vector<Schedule>& passes, Array<float> x, Array<int32_t> topk_ids,
         Array<float> topk_weights, const py::array& w_gate, const py::array& w_up, const py::array& w_down,
         std::optional<Array<float>> dy, const std::optional<Format>& weights, const std::optional<Scales>& scales,
         bool power_of_two_scales, const host::Disturbance& disturbance, double timeout_seconds) {
        need(!passes.empty(), "passes must name a schedule");
        need(weights.has_value() == scales.has_value() && (!weights || weights->is_scaled()),
             "weights in 8 bits have a format with scales, and scales; others have neither");
        const Array<float> given_dy = dy ? *dy : Array<float>(0);
        const Scales given_scales = scales ? *scales : Scales{};
        const auto run = [&]<class Precision>(Precision, const Formats& formats) {
          using Weights = typename Inputs<Precision>::Weights;
          const Inputs<Precision> inputs{formats, x, topk_ids, topk_weights, py::cast<Weights>(w_gate),
                                         py::cast<Weights>(w_up), py::cast<Weights>(w_down), given_dy, given_scales,
                                         power_of_two_scales};
          return run_passes(shape, passes, inputs, disturbance, timeout_seconds);
        };
        if (weights && passes[0].decodes()) {
          return run(host::Decoded<host::F32>{}, Formats::decoded(Element::kF32, *weights));
        }
        if (weights) return run(host::EightBit<host::F32>{}, Formats::eight_bit(Element::kF32, *weights));
        return run(host::F32{}, Formats::of(Element::kF32));
      },
      py::arg("shape"), py::arg("passes"), py::arg("x"), py::arg("topk_ids"), py::arg("topk_weights"),
      py::arg("w_gate"), py::arg("w_up"), py::arg("w_down"), py::arg("dy") = py::none(), py::kw_only(), py::arg("weights") = py::none(),
      py::arg("scales") = py::none(), py::arg("power_of_two_scales") = false,
      py::arg("disturbance") = host::Disturbance{}, py::arg("timeout_seconds") = 10.0,
      "Runs x.shape[0] times the passes that the schedules are for, one after the other on every rank and in the same "
      "arenas. Returns {name: [launches, ranks, ...]}: y of a forward pass, dx, dtopk_weights and, of wide weights, "
      "dw_gate, dw_up and dw_down of a backward pass. Weights that have scales are given as bytes, with their Format and the scales of "
      "w_gate, w_up and w_down. Raises RuntimeError with what each rank had to say.");
  executor.def(
      "round_rows",
      [](const Array<float>& rows, bool power_of_two_scales, std::optional<float> given) {
        need(rows.ndim() == 2 && rows.shape(1) % kScaleColumns == 0, "rows must be [rows, a multiple of 128]");
        Array<uint8_t> rounded({rows.shape(0), rows.shape(1)});
        Array<float> scales({rows.shape(0), rows.shape(1) / kScaleColumns});
        for (py::ssize_t i = 0; i < scales.size(); ++i) {
          scales.mutable_data()[i] = host::round_columns<host::F32>(
              rows.data() + i * kScaleColumns, power_of_two_scales, given ? &*given : nullptr,
              rounded.mutable_data() + i * kScaleColumns);
        }
        return py::make_tuple(rounded, scales);
      },
      py::arg("rows"), py::arg("power_of_two_scales"), py::arg("given") = py::none(),
      "Rows as they are published where weights are in 8 bits: bytes of float8_e4m3fn, and their scales, all of them "
      "`given` where that is a number.");
  executor.def("load_8_bits", py::vectorize(&host::E4M3::load), py::arg("bytes"));
  executor.def("store_8_bits", py::vectorize(&host::E4M3::store), py::arg("numbers"));
  executor.def("record_timelines", &host::record_timelines, py::arg("on"),
               "Whether layers of this process record what they do when, from now on; returns what held before.");
}

}  // namespace jaxmoe
