// Handler of jaxmoe_forward and jaxmoe_backward on XLA:CPU: finds the other ranks of the call and runs the host
// executor. Every device of the group blocks here until the layer is done; XLA:CPU needs a thread for each
// (jaxmoe.testing.use_virtual_devices).
//
// Python side: jaxmoe/implementations/megakernel/layer.py, which checks sizes before anything is lowered.
#include "host/layer_handler.h"

#include <memory>
#include <string>
#include <utility>

#include "host/executor.h"
#include "host/group.h"
#include "host/timeline.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxmoe::host {

// One per instruction of an executable, the same object for all devices that run it: it tells the calls of one program
// apart, which XLA:CPU may run in another order on every device.
struct Instruction {
  static ffi::TypeId id;
};
ffi::TypeId Instruction::id{};

namespace {

ffi::ErrorOr<std::unique_ptr<Instruction>> instantiate(LayerAttributes) { return std::make_unique<Instruction>(); }

template <class Format>
LayerArrays<Format> arrays_of(const LayerBuffers& b) {
  using Storage = typename Format::Storage;
  using Number = typename Format::Number;
  using Buffers = LayerBuffers;
  LayerArrays<Format> arrays{.x = data_of<const Storage>(b[Buffers::kX]),
                             .topk_ids = data_of<const int32_t>(b[Buffers::kTopkIds]),
                             .topk_weights = data_of<const Number>(b[Buffers::kTopkWeights]),
                             .w_gate = data_of<const Storage>(b[Buffers::kWGate]),
                             .w_up = data_of<const Storage>(b[Buffers::kWUp]),
                             .w_down = data_of<const Storage>(b[Buffers::kWDown]),
                             .b_gate = data_of<const Storage>(b[Buffers::kBGate]),
                             .b_up = data_of<const Storage>(b[Buffers::kBUp]),
                             .b_down = data_of<const Storage>(b[Buffers::kBDown])};
  if (b.saved() != nullptr) arrays.saved = data_of<Storage>(*b.saved());
  if (!b.backward()) {
    arrays.y = data_of<Storage>(b.y());
    return arrays;
  }
  arrays.dy = data_of<const Storage>(b[Buffers::kDy]);
  arrays.dx = data_of<Storage>(b[Buffers::kDX]);
  arrays.dtopk_weights = data_of<Number>(b[Buffers::kDTopkWeights]);
  arrays.wide_gradients = b[Buffers::kDWGate].element_type() != b[Buffers::kX].element_type();
  arrays.dw_gate = data_of(b[Buffers::kDWGate]);
  arrays.dw_up = data_of(b[Buffers::kDWUp]);
  arrays.dw_down = data_of(b[Buffers::kDWDown]);
  arrays.db_gate = data_of(b[Buffers::kDBGate]);
  arrays.db_up = data_of(b[Buffers::kDBUp]);
  arrays.db_down = data_of(b[Buffers::kDBDown]);
  return arrays;
}

template <class Format>
ffi::Error run(const LayerBuffers& buffers, const LayerAttributes& attributes, const Instruction* instruction,
               int64_t run_id, int32_t device) {
  const Shape shape = shape_of(buffers, attributes);
  const Schedule schedule = schedule_of(attributes, attributes.workers);
  const int32_t* place = static_cast<const int32_t*>(buffers[LayerBuffers::kPlace].untyped_data());
  const int32_t rank = place[0];
  if (rank < 0 || rank >= shape.ranks) {
    return ffi::Error::InvalidArgument("jaxmoe: place names rank " + std::to_string(rank) + " of " +
                                       std::to_string(shape.ranks) + " ranks; it must be from 0 on and below that.");
  }
  const CallSite site{instruction, run_id, place[1], rank, device};
  const Attendance attendance(site, shape, schedule, sizeof(typename Format::Storage));
  Meeting& meeting = attendance.meeting();
  const Launch launch{.shape = shape,
                      .schedule = schedule,
                      .head = meeting.arenas->head(),
                      .dispatchers_per_worker = attributes.dispatchers_per_worker,
                      .activation = activation_of(attributes),
                      .arenas = meeting.arenas->of_ranks(),
                      .timeout_seconds = attributes.timeout_seconds,
                      .given_up = &meeting.given_up,
                      .disturbance = {}};
  LaunchTimeline timeline;
  const bool recorded = timeline_is_on;
  const std::string failure =
      run_rank<Format>(launch, rank, arrays_of<Format>(buffers), recorded ? &timeline : nullptr);
  if (recorded && failure.empty()) {
    timeline.device = device;
    keep_timeline(std::move(timeline));
  }
  return failure.empty() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kDeadlineExceeded, failure);
}

ffi::Error execute(Instruction* instruction, ffi::RunId run_id, int32_t device, ffi::RemainingArgs operands,
                   ffi::RemainingRets results, LayerAttributes attributes) {
  std::string error;
  const LayerBuffers buffers(operands, results, &error);
  if (error.empty()) error = layer_error(buffers, attributes);
  if (error.empty() && buffers.backward()) {
    const ffi::DataType type = buffers[LayerBuffers::kX].element_type();
    for (int i = LayerBuffers::kDWGate; i < LayerBuffers::kGradients; ++i) {
      const ffi::DataType gradients = buffers[static_cast<LayerBuffers::Gradient>(i)].element_type();
      if (gradients == type || (gradients == ffi::F32 && type != ffi::F64)) continue;
      error = "jaxmoe: gradients of weights must be of the type of x, or float32 with 16-bit tokens.";
    }
  }
  if (!error.empty()) return ffi::Error::InvalidArgument(error);
  switch (buffers[LayerBuffers::kX].element_type()) {
    case ffi::F32: return run<F32>(buffers, attributes, instruction, run_id.run_id, device);
    case ffi::F64: return run<F64>(buffers, attributes, instruction, run_id.run_id, device);
    case ffi::BF16: return run<Bf16>(buffers, attributes, instruction, run_id.run_id, device);
    case ffi::F16: return run<F16>(buffers, attributes, instruction, run_id.run_id, device);
    default:
      return ffi::Error::InvalidArgument("jaxmoe: x must be float32, float64, bfloat16 or float16.");
  }
}

}  // namespace

StateType instruction_type() {
  static const XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<Instruction>();
  return {"jaxmoe_instruction", &Instruction::id, &info};
}

}  // namespace jaxmoe::host

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxmoeLayerInstantiateHost, jaxmoe::host::instantiate,
                              xla::ffi::Ffi::BindInstantiate().Attrs<jaxmoe::LayerAttributes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxmoeLayerHost, jaxmoe::host::execute,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::State<jaxmoe::host::Instruction>>()
                                  .Ctx<xla::ffi::RunId>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<jaxmoe::LayerAttributes>());
