// jaxmoe._native: handlers for XLA:CPU, and the account of why there is no CUDA part where there is none.
#include "common/extension.h"

#include "common/build_config.h"
#include "common/device_info.h"
#include "common/exchange_call.h"
#include "common/layer_call.h"
#include "host/instruction.h"
#include "host/timeline.h"
#include "xla/ffi/api/api.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxmoeDeviceInfoHost);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxmoeLayerInstantiateHost);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxmoeLayerHost);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxmoeExchangeInstantiateHost);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxmoeExchangeHost);

namespace jaxmoe {

std::vector<Registration> registrations() {
  return {{kDeviceInfoTarget, "execute", JaxmoeDeviceInfoHost},
          {kForwardTarget, "instantiate", JaxmoeLayerInstantiateHost},
          {kForwardTarget, "execute", JaxmoeLayerHost},
          {kBackwardTarget, "instantiate", JaxmoeLayerInstantiateHost},
          {kBackwardTarget, "execute", JaxmoeLayerHost},
          {kDispatchTarget, "instantiate", JaxmoeExchangeInstantiateHost},
          {kDispatchTarget, "execute", JaxmoeExchangeHost},
          {kCombineTarget, "instantiate", JaxmoeExchangeInstantiateHost},
          {kCombineTarget, "execute", JaxmoeExchangeHost}};
}

std::vector<StateType> state_types() { return {host::instruction_type()}; }

std::map<std::string, std::string> part_build_info() { return {{"cuda_missing", build_config::kCudaMissing}}; }

std::vector<LaunchTimeline> timelines() { return host::kept_timelines(); }

}  // namespace jaxmoe
