// Handler of jaxmoe_dispatch and jaxmoe_combine on XLA:CPU. Each call has a thread of its own, as those of a layer have
// (host/layer_handler.cc). Python side: jaxmoe/exchange/kernel.py.
#include <memory>
#include <string>
#include <type_traits>

#include "common/exchange_call.h"
#include "common/tiling.h"
#include "host/exchange_rank.h"
#include "host/group.h"
#include "host/instruction.h"
#include "host/matmul_rank.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxmoe::host {
namespace {

ffi::ErrorOr<std::unique_ptr<Instruction>> instantiate(ExchangeAttributes) { return std::make_unique<Instruction>(); }

template <class Precision>
ffi::Future run(const ExchangeCall& call, const ExchangeAttributes& attributes, const CallSite& site) {
  using Number = typename Precision::Number;
  const Launch launch{.shape = shape_of(call, attributes),
                      .schedule = schedule_of(attributes),
                      .formats = formats_of(call),
                      .power_of_two_scales = attributes.power_of_two_scales != 0,
                      .timeout_seconds = attributes.timeout_seconds};
  const ExchangeArrays<Number> arrays = arrays_of<Number>(call);
  const bool multiplies = call.multiplies();
  const Room room = room_of(call, attributes);
  return run_beside_others(site, launch, [=](const Launch& whole) {
    ArraysOf<Precision> of_layer{};
    of_layer.x = static_cast<const typename Precision::Storage*>(arrays.x);
    of_layer.topk_ids = arrays.topk_ids;
    if constexpr (!Precision::kScaled) {
      if (multiplies) return MatmulRank<Precision>(whole, site.rank, of_layer, arrays, room).run();
    }
    return ExchangeRank<Precision>(whole, site.rank, of_layer, arrays, room).run();
  });
}

ffi::Future execute(Instruction* instruction, ffi::RunId run_id, int32_t device, ffi::RemainingArgs operands,
                    ffi::RemainingRets results, ExchangeAttributes attributes) {
  std::string error;
  const ExchangeCall call(operands, results, attributes, &error);
  if (error.empty()) error = call_error(call, attributes);
  const int32_t* place = error.empty() ? call.data<const int32_t>(ExchangeArray::kPlace) : nullptr;
  if (error.empty()) error = place_error(place[0], attributes.ranks);
  if (error.empty() && schedule_of(attributes).workers < 1) error = "jaxmoe: workers must be positive on a CPU.";
  if (!error.empty()) return refused(ffi::Error::InvalidArgument(error));
  const CallSite site{instruction, run_id.run_id, place[1], place[0], device};
  const Formats formats = formats_of(call);
  return with_wide(formats.answers.element, [&]<class Wide>(Wide) {
    if constexpr (!std::is_same_v<Wide, F64>) {
      if (formats.tokens.is_scaled()) return run<EightBit<Wide>>(call, attributes, site);
    }
    return run<Wide>(call, attributes, site);
  });
}

}  // namespace
}  // namespace jaxmoe::host

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxmoeExchangeInstantiateHost, jaxmoe::host::instantiate,
                              xla::ffi::Ffi::BindInstantiate().Attrs<jaxmoe::ExchangeAttributes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxmoeExchangeHost, jaxmoe::host::execute,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::State<jaxmoe::host::Instruction>>()
                                  .Ctx<xla::ffi::RunId>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<jaxmoe::ExchangeAttributes>());
