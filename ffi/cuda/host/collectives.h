// How a handler gets XLA's communicator of its group: the collectives extension of the FFI, which jaxlib has since
// 0.11.2. Caller: cuda/host/layer_handler.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

#if __has_include("xla/ffi/api/collectives_api.h")
#define JAXMOE_HAS_COLLECTIVES 1
#include "xla/ffi/api/collectives_api.h"
#else
#define JAXMOE_HAS_COLLECTIVES 0
#endif

namespace jaxmoe {

// Device numbers as XLA flattens them (replica * partitions + partition), a list for each group, in the order of ranks.
using ReplicaGroups = std::vector<std::vector<int64_t>>;

#if JAXMOE_HAS_COLLECTIVES

struct CollectivesErrorPolicy {
  using Status = xla::ffi::Error;
  template <class T>
  using StatusOr = xla::ffi::ErrorOr<T>;

  static Status Ok() { return Status::Success(); }
  static Status TakeError(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
    std::string message = xla::ffi::internal::GetErrorMessage(api, error);
    xla::ffi::internal::DestroyError(api, error);
    return Status::Internal("jaxmoe: XLA has no communicator for this group: " + message);
  }
};

class Communicators : public xla::ffi::internal::CommunicatorContextBase<CollectivesErrorPolicy> {
 public:
  Communicators(const XLA_FFI_Api* api, const XLA_FFI_Collectives_Extension* extension)
      : CommunicatorContextBase(api, extension), bytes_(extension->extension_base.struct_size) {}

  // Members that a newer header declares are beyond the end of an older runtime's struct.
  bool has_communicators() const {
    return bytes_ >= offsetof(XLA_FFI_Collectives_Extension, get_communicator) + sizeof(void*);
  }

 private:
  std::size_t bytes_;
};

struct CollectivesExtension : xla::ffi::internal::CollectivesExtensionBase<Communicators> {
  // Without this the versions of header and runtime would have to be equal; a minor version only adds members.
  static bool Support(int32_t major, int32_t minor) { return major == 0 && minor >= 1; }
};

inline xla::ffi::ErrorOr<Communicators> communicators(const xla::ffi::Context& context) {
  auto found = context.get<xla::ffi::Extension<CollectivesExtension>>();
  if (found.has_error() || !found->has_communicators()) {
    return xla::ffi::Unexpected(xla::ffi::Error(
        xla::ffi::ErrorCode::kUnimplemented,
        "jaxmoe: this jaxlib gives handlers no communicators" +
            (found.has_error() ? " (" + found.error().message() + ")" : std::string()) +
            "; experts on several GPUs need jaxlib 0.11.2 or newer. Or pass implementation=\"xla\"."));
  }
  return found;
}

// In prepare: XLA sees to it that the communicator is there in initialize and execute.
inline xla::ffi::Error request_communicator(const xla::ffi::Context& context, const ReplicaGroups& groups) {
  auto found = communicators(context);
  if (found.has_error()) return found.error();
  return found->RequestCommunicator(xla::ffi::GroupMode::kFlattenedId, groups, /*communication_id=*/0);
}

// In initialize and execute: the ncclComm_t of this device's group, for this run (cuda/host/notes.h).
inline xla::ffi::ErrorOr<void*> get_communicator(const xla::ffi::Context& context, const ReplicaGroups& groups) {
  auto found = communicators(context);
  if (found.has_error()) return xla::ffi::Unexpected(found.error());
  auto handle = found->GetCommunicator(xla::ffi::GroupMode::kFlattenedId, groups, /*communication_id=*/0);
  if (handle.has_error()) return xla::ffi::Unexpected(handle.error());
  return static_cast<void*>(*handle);
}

#else

inline xla::ffi::Error no_collectives() {
  return xla::ffi::Error(xla::ffi::ErrorCode::kUnimplemented,
                         "jaxmoe: jaxmoe was built with a jaxlib that has no xla/ffi/api/collectives_api.h, "
                         "through which it reaches other GPUs. Install jax 0.11.2 or newer (it needs Python 3.12 or "
                         "newer), then build jaxmoe again; or pass implementation=\"xla\".");
}
inline xla::ffi::Error request_communicator(const xla::ffi::Context&, const ReplicaGroups&) { return no_collectives(); }
inline xla::ffi::ErrorOr<void*> get_communicator(const xla::ffi::Context&, const ReplicaGroups&) {
  return xla::ffi::Unexpected(no_collectives());
}

#endif

}  // namespace jaxmoe
