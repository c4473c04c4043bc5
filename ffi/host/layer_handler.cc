// Handler of jaxmoe_forward and jaxmoe_backward on XLA:CPU: finds the other ranks of the call and runs the host
// executor. Each call has a thread of its own, where it waits for those of the other devices (host/instruction.h).
//
// Python side: jaxmoe/implementations/megakernel/layer.py, which checks sizes before anything is lowered.
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "common/call_checks.h"
#include "common/layer_call.h"
#include "host/executor.h"
#include "host/group.h"
#include "host/instruction.h"
#include "host/timeline.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxmoe::host {

ffi::TypeId Instruction::id{};

namespace {

ffi::ErrorOr<std::unique_ptr<Instruction>> instantiate(LayerAttributes) { return std::make_unique<Instruction>(); }

template <class Precision>
ffi::Future run(const LayerCall& call, const LayerAttributes& attributes, const Instruction* instruction,
                int64_t run_id, int32_t device) {
  const Launch launch{.shape = shape_of(call, attributes),
                      .schedule = schedule_of(attributes),
                      .formats = formats_of(call, attributes),
                      .activation = activation_of(attributes),
                      .power_of_two_scales = attributes.power_of_two_scales != 0,
                      .timeout_seconds = attributes.timeout_seconds};
  const int32_t* place = call.data<const int32_t>(ArrayName::kPlace);
  const int32_t rank = place[0];
  if (const std::string error = place_error(rank, launch.shape.ranks); !error.empty()) {
    return refused(ffi::Error::InvalidArgument(error));
  }
  const CallSite site{instruction, run_id, place[1], rank, device};
  const auto arrays = arrays_of<typename Precision::Storage, typename Precision::Number,
                                typename Precision::Weight::Storage>(call, attributes);
  return run_beside_others(site, launch, [=](const Launch& whole) {
    LaunchTimeline timeline;
    const bool recorded = timeline_is_on;
    const std::string failure = run_rank<Precision>(whole, rank, arrays, recorded ? &timeline : nullptr);
    if (recorded && failure.empty()) {
      timeline.device = device;
      keep_timeline(std::move(timeline));
    }
    return failure;
  });
}

ffi::Future execute(Instruction* instruction, ffi::RunId run_id, int32_t device, ffi::RemainingArgs operands,
                    ffi::RemainingRets results, LayerAttributes attributes) {
  std::string error;
  const LayerCall call(operands, results, attributes, &error);
  if (error.empty()) error = call_error(call, attributes);
  if (error.empty() && schedule_of(attributes).workers < 1) error = "jaxmoe: workers must be positive on a CPU.";
  if (!error.empty()) return refused(ffi::Error::InvalidArgument(error));
  const Formats formats = formats_of(call, attributes);
  const auto run_as = [&]<class Precision>(Precision) {
    return run<Precision>(call, attributes, instruction, run_id.run_id, device);
  };
  return with_wide(formats.answers.element, [&]<class Wide>(Wide wide) {
    if constexpr (!std::is_same_v<Wide, F64>) {
      if (formats.tokens.is_scaled()) return run_as(EightBit<Wide>{});
      if (formats.weights.is_scaled()) return run_as(Decoded<Wide>{});
    }
    return run_as(wide);
  });
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
