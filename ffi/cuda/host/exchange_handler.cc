// Handlers of jaxmoe_dispatch and jaxmoe_combine on CUDA devices (handler.h), and of jaxmoe_finish. Python side:
// jaxmoe/exchange/kernel.py, which checks sizes before anything is lowered.
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/exchange_call.h"
#include "common/tiling.h"
#include "cuda/host/call_checks.h"
#include "cuda/host/gpu.h"
#include "cuda/host/handler.h"

namespace jaxmoe {
namespace {

// Where the arrays of a call lie, results first; those without elements lie nowhere. The place is read at once.
std::vector<const void*> arrays_to_keep(const ExchangeCall& call) {
  std::vector<const void*> results, operands;
  constexpr auto kEnd = static_cast<int32_t>(ExchangeArray::kCount);
  for (int32_t i = static_cast<int32_t>(ExchangeArray::kPlace) + 1; i < kEnd; ++i) {
    const auto name = static_cast<ExchangeArray>(i);
    if (!call.has(name) || call[name]->element_count() == 0) continue;
    (name < ExchangeArray::kRows ? operands : results).push_back(call.data(name));
  }
  results.insert(results.end(), operands.begin(), operands.end());
  return results;
}

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
    const bool beside = schedule_of(a).workers > 0;
    ready.arrays = ExchangeRoom{arrays_of<float>(call), room_of(call, a), beside};
    // One that has workers of its own leaves the others to the program, until jaxmoe_finish.
    if (beside) ready.beside = arrays_to_keep(call);
    ready.power_of_two_scales = a.power_of_two_scales != 0;
    return ready;
  }
  static const int32_t* place(const ExchangeCall& call) { return call.data<const int32_t>(ExchangeArray::kPlace); }
};

// The end of a call that was started: nothing is computed, the program waits. Operands are all arrays of that call, its
// results first, which are the results of this one.
xla::ffi::Error finish(cudaStream_t stream, xla::ffi::RemainingArgs operands, xla::ffi::RemainingRets results) {
  xla::ffi::ErrorOr<int> device = device_of(stream);
  if (device.has_error()) return device.error();
  const CurrentDevice current(*device);
  std::vector<const void*> arrays;
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const auto operand = operands.get<xla::ffi::AnyBuffer>(i);
    if (operand.has_error()) return operand.error();
    const void* array = operand->untyped_data();
    if (i < results.size()) {
      auto result = results.get<xla::ffi::AnyBuffer>(i);  // not const: before jax 0.11 it could not be read then
      if (result.has_error()) return result.error();
      if ((*result)->untyped_data() != array) array = nullptr;  // XLA has copied what may not be there yet
    }
    if (operand->element_count() > 0) arrays.push_back(array);
  }
  const std::string error = Gpu::of(*device).finish(stream, arrays);
  return error.empty() ? xla::ffi::Error::Success() : xla::ffi::Error(xla::ffi::ErrorCode::kFailedPrecondition, error);
}

}  // namespace
}  // namespace jaxmoe

JAXMOE_DEFINE_HANDLERS(Exchange, jaxmoe::ExchangeTarget);
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxmoeFinishCuda, jaxmoe::finish,
    xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<cudaStream_t>>().RemainingArgs().RemainingRets());
