// Handlers of jaxmoe_dispatch and jaxmoe_combine on CUDA devices (handler.cuh). Python side: jaxmoe/exchange/kernel.py,
// which checks sizes before anything is lowered.
#include <string>

#include "common/exchange_call.h"
#include "common/tiling.h"
#include "cuda/host/call_checks.h"
#include "cuda/host/handler.cuh"

namespace jaxmoe {
namespace {

struct ExchangeTarget {
  using Attributes = ExchangeAttributes;
  using Call = ExchangeCall;

  static std::string call_error(const ExchangeCall& call, const ExchangeAttributes& a) {
    return gpu_call_error(call, a);
  }
  static std::string attributes_error(const ExchangeAttributes& a) {
    const std::string error = jaxmoe::attributes_error(a);
    return error.empty() ? limits_error(a) : error;
  }
  static LaunchSizes sizes(const ExchangeCall& call, const ExchangeAttributes& a) {
    return {shape_of(call, a), schedule_of(a), formats_of(call), call.pass()};
  }
  static ArenaCall arena_call(const ExchangeCall& call, const ExchangeAttributes& a) {
    ArenaCall ready{};
    ready.arrays = ExchangeRoom{arrays_of<float>(call), room_of(call, a)};
    ready.power_of_two_scales = a.power_of_two_scales != 0;
    return ready;
  }
  static const int32_t* place(const ExchangeCall& call) { return call.data<const int32_t>(ExchangeArray::kPlace); }
};

}  // namespace
}  // namespace jaxmoe

JAXMOE_DEFINE_HANDLERS(Exchange, jaxmoe::ExchangeTarget);
