// Handler of jaxmoe_forward on XLA:CPU: finds the other ranks of the call and runs the host executor. Every device of
// the group blocks here until the layer is done; XLA:CPU needs a thread for each (jaxmoe.testing.use_virtual_devices).
//
// Python side: jaxmoe/megakernel.py, which checks sizes before anything is lowered.
#include "host/forward.h"

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

ffi::ErrorOr<std::unique_ptr<Instruction>> instantiate(ForwardAttributes) { return std::make_unique<Instruction>(); }

template <class Format>
LayerArrays<Format> arrays_of(const ForwardBuffers& b) {
  using Storage = typename Format::Storage;
  const auto data = [](const ffi::AnyBuffer& buffer) -> const Storage* {
    return buffer.element_count() == 0 ? nullptr : static_cast<const Storage*>(buffer.untyped_data());
  };
  return {.x = static_cast<const Storage*>(b.x.untyped_data()),
          .topk_ids = static_cast<const int32_t*>(b.topk_ids.untyped_data()),
          .topk_weights = static_cast<const typename Format::Number*>(b.topk_weights.untyped_data()),
          .w_gate = data(b.w_gate),
          .w_up = data(b.w_up),
          .w_down = data(b.w_down),
          .b_gate = data(b.b_gate),
          .b_up = data(b.b_up),
          .b_down = data(b.b_down),
          .y = static_cast<Storage*>(b.y.untyped_data())};
}

template <class Format>
ffi::Error run(const ForwardBuffers& buffers, const ForwardAttributes& attributes, const Instruction* instruction,
               int64_t run_id, int32_t device) {
  const Shape shape = shape_of(buffers, attributes);
  const Schedule schedule = schedule_of(attributes, attributes.workers);
  const int32_t* place = static_cast<const int32_t*>(buffers.place.untyped_data());
  const int32_t rank = place[0];
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

ffi::Error execute(Instruction* instruction, ffi::RunId run_id, int32_t device, ffi::AnyBuffer place, ffi::AnyBuffer x,
                   ffi::AnyBuffer topk_ids, ffi::AnyBuffer topk_weights, ffi::AnyBuffer w_gate, ffi::AnyBuffer w_up,
                   ffi::AnyBuffer w_down, ffi::AnyBuffer b_gate, ffi::AnyBuffer b_up, ffi::AnyBuffer b_down,
                   ffi::Result<ffi::AnyBuffer> y, ForwardAttributes attributes) {
  const ForwardBuffers buffers{place, x, topk_ids, topk_weights, w_gate, w_up, w_down, b_gate, b_up, b_down, *y};
  if (const std::string error = forward_error(buffers, attributes); !error.empty()) {
    return ffi::Error::InvalidArgument(error);
  }
  switch (x.element_type()) {
    case ffi::F32: return run<F32>(buffers, attributes, instruction, run_id.run_id, device);
    case ffi::F64: return run<F64>(buffers, attributes, instruction, run_id.run_id, device);
    case ffi::BF16: return run<Bf16>(buffers, attributes, instruction, run_id.run_id, device);
    case ffi::F16: return run<F16>(buffers, attributes, instruction, run_id.run_id, device);
    default:
      return ffi::Error::InvalidArgument("jaxmoe_forward: x must be float32, float64, bfloat16 or float16.");
  }
}

}  // namespace

StateType instruction_type() {
  static const XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<Instruction>();
  return {"jaxmoe_forward_instruction", &Instruction::id, &info};
}

}  // namespace jaxmoe::host

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxmoeForwardInstantiateHost, jaxmoe::host::instantiate,
                              xla::ffi::Ffi::BindInstantiate().Attrs<jaxmoe::ForwardAttributes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxmoeForwardHost, jaxmoe::host::execute,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::State<jaxmoe::host::Instruction>>()
                                  .Ctx<xla::ffi::RunId>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()   // place
                                  .Arg<xla::ffi::AnyBuffer>()   // x
                                  .Arg<xla::ffi::AnyBuffer>()   // topk_ids
                                  .Arg<xla::ffi::AnyBuffer>()   // topk_weights
                                  .Arg<xla::ffi::AnyBuffer>()   // w_gate
                                  .Arg<xla::ffi::AnyBuffer>()   // w_up
                                  .Arg<xla::ffi::AnyBuffer>()   // w_down
                                  .Arg<xla::ffi::AnyBuffer>()   // b_gate
                                  .Arg<xla::ffi::AnyBuffer>()   // b_up
                                  .Arg<xla::ffi::AnyBuffer>()   // b_down
                                  .Ret<xla::ffi::AnyBuffer>()   // y
                                  .Attrs<jaxmoe::ForwardAttributes>());
