// Handlers of jaxmoe_forward and jaxmoe_backward on CUDA devices (handler.h). Python side:
// jaxmoe/implementations/megakernel/layer.py, which checks sizes before anything is lowered.
#include <string>

#include "common/formats.h"
#include "common/layer_call.h"
#include "cuda/host/call_checks.h"
#include "cuda/host/handler.h"

namespace jaxmoe {
namespace {

struct Layer {
  using Attributes = LayerAttributes;
  using Call = LayerCall;

  static std::string call_error(const LayerCall& call, const LayerAttributes& a) { return gpu_call_error(call, a); }
  static std::string attributes_error(const LayerAttributes& a) {
    const std::string error = jaxmoe::attributes_error(a);
    return error.empty() ? limits_error(a) : error;
  }
  static LaunchSizes sizes(const LayerCall& call, const LayerAttributes& a) {
    const Schedule schedule = schedule_of(a);
    const Pass pass = call.backward() ? Pass::kBackward : Pass::kForward;
    return {shape_of(call, a), schedule, formats_of(call, a), pass};
  }
  static ArenaCall arena_call(const LayerCall& call, const LayerAttributes& a) {
    ArenaCall ready{};
    ready.arrays = arrays_of<void, float>(call, a);
    ready.activation = activation_of(a);
    ready.power_of_two_scales = a.power_of_two_scales != 0;
    return ready;
  }
  static const int32_t* place(const LayerCall& call) { return call.data<const int32_t>(ArrayName::kPlace); }
};

}  // namespace
}  // namespace jaxmoe

JAXMOE_DEFINE_HANDLERS(Layer, jaxmoe::Layer);
