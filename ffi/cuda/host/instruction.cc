// See instruction.h.
#include "cuda/host/instruction.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/tiling.h"
#include "cuda/host/arenas.h"
#include "cuda/host/errors.h"

namespace ffi = xla::ffi;

namespace jaxmoe {

ffi::TypeId Instruction::id{};

namespace {

// What Python knows of JAX's devices.
struct Devices {
  std::mutex mutex;
  std::set<int64_t> local;  // of this process, by the numbers that all processes know them by
  bool several_processes = false;

  static Devices& get() {
    static Devices* devices = new Devices;  // never destroyed: handlers may still run while the process ends
    return *devices;
  }
};

// Workers of the kernel of a pass for these formats on the current device; the first call loads it.
ffi::ErrorOr<int32_t> workers_of(int device, Pass pass, const Formats& formats, const Schedule& schedule) {
  using Kernel = std::pair<int, const void*>;
  const Kernel kernel{device, kernel_of(pass, formats, schedule)};
  static std::mutex mutex;
  static std::map<Kernel, int32_t>* known = new std::map<Kernel, int32_t>;
  {
    const std::lock_guard lock(mutex);
    if (const auto found = known->find(kernel); found != known->end()) return found->second;
  }
  // Without the lock: loading may wait for kernels that wait for peers, whose handlers come through here too.
  int major = 0, minor = 0;
  cudaError_t status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (status != cudaSuccess) return ffi::Unexpected(cuda_error("the device cannot be asked what it is", status));
  if (major != 9 || minor != 0) {
    return ffi::Unexpected(ffi::Error(
        ffi::ErrorCode::kFailedPrecondition,
        "jaxmoe: device " + std::to_string(device) + " has compute capability " + std::to_string(major) + "." +
            std::to_string(minor) + ", the kernel is compiled for 9.0 (H100, H200). Pass implementation=\"xla\"."));
  }
  int32_t workers = 0;
  if (const std::string error = prepare_kernel(pass, formats, schedule, &workers); !error.empty()) {
    return ffi::Unexpected(ffi::Error::Internal(error));
  }
  const std::lock_guard lock(mutex);
  return (*known)[kernel] = workers;
}

}  // namespace

int32_t local_devices(const std::vector<int64_t>& devices, std::size_t count) {
  Devices& known = Devices::get();
  const std::lock_guard lock(known.mutex);
  if (!known.several_processes) return static_cast<int32_t>(count);
  const auto is_local = [&](int64_t id) { return known.local.contains(id); };
  return static_cast<int32_t>(std::ranges::count_if(devices, is_local));
}

ffi::ErrorOr<int> device_of(cudaStream_t stream) {
  int device = 0;
  const cudaError_t status = cudaStreamGetDevice(stream, &device);
  if (status != cudaSuccess) return ffi::Unexpected(cuda_error("cudaStreamGetDevice", status));
  return device;
}

ffi::ErrorOr<LaunchSizes> with_workers(int device, LaunchSizes sizes) {
  Schedule& schedule = sizes.schedule;
  ffi::ErrorOr<int32_t> workers = workers_of(device, sizes.pass, sizes.formats, schedule);
  if (workers.has_error()) return ffi::Unexpected(workers.error());
  if (schedule.workers > *workers) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("jaxmoe: workers=" + std::to_string(schedule.workers) +
                                                       "; this device has room for " + std::to_string(*workers) + "."));
  }
  if (schedule.workers == 0) schedule.workers = *workers;
  schedule.dispatchers = schedule.workers * granularity_of_gpu(true).dispatchers_per_worker;
  return sizes;
}

void know_devices(const std::vector<int64_t>& local, bool several_processes) {
  forget_names();
  Devices& devices = Devices::get();
  const std::lock_guard lock(devices.mutex);
  devices.local = {local.begin(), local.end()};
  devices.several_processes = several_processes;
}

StateType instruction_type() {
  static const XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<Instruction>();
  return {"jaxmoe_instruction_cuda", &Instruction::id, &info};
}

}  // namespace jaxmoe
