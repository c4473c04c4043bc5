// Handlers of jaxmoe_forward and jaxmoe_backward on CUDA devices. XLA calls `instantiate` once for every instruction of
// a program, and the others for every run and device:
//
//   prepare      asks for the communicator of the group; there is no stream and no memory yet
//   initialize   loads the kernel, and sees to it that the group's arena is large enough (cuda/host/arena.h)
//   execute      enqueues the kernel and does nothing else
//
// Where groups have several ranks no device of this process executes before all of them have ended initialize: XLA
// holds them back. So nothing there that allocates, maps or loads runs beside a kernel of the same run, which would
// wait for it for ever.
//
// What goes wrong on one device is returned by execute on all of this process (cuda/host/runs.h). A wait of the kernel
// that takes too long ends the kernel; the next run reports it.
//
// Python side: jaxmoe/implementations/megakernel/layer.py, which checks sizes before anything is lowered.
#include "cuda/host/layer_handler.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/formats.h"
#include "common/layer_call.h"
#include "common/tiling.h"
#include "cuda/host/arenas.h"
#include "cuda/host/call_checks.h"
#include "cuda/host/collectives.h"
#include "cuda/host/errors.h"
#include "cuda/host/launch.h"
#include "cuda/host/runs.h"

namespace ffi = xla::ffi;

namespace jaxmoe {

// One per instruction of an executable, the same object for all devices that run it. The group of a device is the same
// in all its runs.
class Instruction {
 public:
  static ffi::TypeId id;

  Runs runs;

  // Null where the device has not found its arena yet.
  Arena* arena_of(int device) {
    const std::lock_guard lock(mutex_);
    const auto found = arenas_.find(device);
    return found == arenas_.end() ? nullptr : found->second;
  }
  void remember(int device, Arena* arena) {
    const std::lock_guard lock(mutex_);
    arenas_[device] = arena;
  }

  // Whether `devices` devices have arenas with room for a launch, so that none of them has to meet its group.
  bool is_ready(int32_t devices, const LaunchSizes& sizes) {
    const std::lock_guard lock(mutex_);
    if (static_cast<int32_t>(arenas_.size()) < devices) return false;
    return std::ranges::all_of(arenas_, [&](const auto& of_device) { return of_device.second->holds(sizes); });
  }

  // True once for every device.
  bool is_first_launch(int device) {
    const std::lock_guard lock(mutex_);
    return launched_.insert(device).second;
  }

 private:
  std::mutex mutex_;
  std::map<int, Arena*> arenas_;
  std::set<int> launched_;
};
ffi::TypeId Instruction::id{};

namespace {

// A device that others of its process wait for tells itself that the time is over, and they hear it.
constexpr double kMarginSeconds = 10;

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

// The devices of the program by the numbers that all processes know them by; none where Python could not tell.
std::vector<int64_t> devices_of(const LayerAttributes& a) {
  if (*a.devices.begin() < 0) return {};
  return {a.devices.begin(), a.devices.end()};
}

// How many devices of this process run the program; 0: not known.
int32_t local_devices(const LayerAttributes& a) {
  Devices& known = Devices::get();
  const std::lock_guard lock(known.mutex);
  if (!known.several_processes) return static_cast<int32_t>(a.groups.size());
  const auto is_local = [&](int64_t id) { return known.local.contains(id); };
  return static_cast<int32_t>(std::ranges::count_if(devices_of(a), is_local));
}

ReplicaGroups groups_of(const LayerAttributes& a) {
  ReplicaGroups groups;
  for (const int64_t* group = a.groups.begin(); group != a.groups.end(); group += a.ranks) {
    groups.emplace_back(group, group + a.ranks);
  }
  return groups;
}

// Makes `device` the current one of this thread for a while.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    cudaGetDevice(&previous_);
    if (previous_ != device) cudaSetDevice(device);
    current_ = device;
  }
  ~CurrentDevice() {
    if (previous_ != current_) cudaSetDevice(previous_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int previous_ = 0;
  int current_ = 0;
};

// Workers of the kernel of a pass for these formats on the current device; the first call loads it.
// `ahead` as for prepare_kernel().
ffi::ErrorOr<int32_t> workers_of(int device, Pass pass, const Formats& formats, bool ahead) {
  using Kernel = std::tuple<int, Pass, Element, Element, bool, bool>;
  const Kernel kernel{device, pass, formats.tokens.element, formats.answers.element, formats.decodes(), ahead};
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
  if (const std::string error = prepare_kernel(pass, formats, ahead, &workers); !error.empty()) {
    return ffi::Unexpected(ffi::Error::Internal(error));
  }
  const std::lock_guard lock(mutex);
  return (*known)[kernel] = workers;
}

// As the CUDA runtime counts; XLA's ordinal counts only the devices that JAX may see.
ffi::ErrorOr<int> device_of(cudaStream_t stream) {
  int device = 0;
  const cudaError_t status = cudaStreamGetDevice(stream, &device);
  if (status != cudaSuccess) return ffi::Unexpected(cuda_error("cudaStreamGetDevice", status));
  return device;
}

// Checks a call of initialize or execute, makes its device the current one and calls body(device, call).
template <class Body>
ffi::Error on_device(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                     const LayerAttributes& attributes, Body body) {
  std::string wrong;
  const LayerCall call(operands, results, attributes, &wrong);
  if (wrong.empty()) wrong = gpu_call_error(call, attributes);
  if (!wrong.empty()) return ffi::Error::InvalidArgument(wrong);
  ffi::ErrorOr<int> device = device_of(stream);
  if (device.has_error()) return device.error();
  const CurrentDevice current(*device);
  return body(*device, call);
}

// With the workers that a call names, which may be none.
LaunchSizes sizes_of(const LayerCall& call, const LayerAttributes& attributes) {
  const Schedule schedule = schedule_of(attributes);
  return {shape_of(call, attributes), schedule, formats_of(call, schedule)};
}

// With the workers of `device`, which is current.
ffi::ErrorOr<LaunchSizes> sizes_on(int device, const LayerCall& call, const LayerAttributes& attributes) {
  LaunchSizes sizes = sizes_of(call, attributes);
  Schedule& schedule = sizes.schedule;
  const Pass pass = call.backward() ? Pass::kBackward : Pass::kForward;
  ffi::ErrorOr<int32_t> workers = workers_of(device, pass, sizes.formats, sizes.schedule.decodes());
  if (workers.has_error()) return ffi::Unexpected(workers.error());
  if (schedule.workers > *workers) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("jaxmoe: workers=" + std::to_string(schedule.workers) +
                                                       "; this device has room for " + std::to_string(*workers) + "."));
  }
  if (schedule.workers == 0) schedule.workers = *workers;
  schedule.dispatchers = schedule.workers * granularity_of_gpu(true).dispatchers_per_worker;
  return sizes;
}

ffi::ErrorOr<std::unique_ptr<Instruction>> instantiate(LayerAttributes) {
  return std::make_unique<Instruction>();
}

ffi::Error prepare(ffi::Context context, LayerAttributes attributes) {
  for (const std::string& error : {attributes_error(attributes), limits_error(attributes)}) {
    if (!error.empty()) return ffi::Error::InvalidArgument(error);
  }
  return attributes.ranks == 1 ? ffi::Error::Success() : request_communicator(context, groups_of(attributes));
}

ffi::ErrorOr<Link> link_of(const ffi::Context& context, cudaStream_t stream, const LayerAttributes& attributes) {
  const double seconds = attributes.timeout_seconds;
  Link link{.communicator = nullptr,
            .ranks = attributes.ranks,
            .stream = stream,
            .timeout_seconds = seconds,
            .deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(seconds))};
  if (attributes.ranks == 1) return link;
  ffi::ErrorOr<void*> communicator = get_communicator(context, groups_of(attributes));
  if (communicator.has_error()) return ffi::Unexpected(communicator.error());
  link.communicator = *communicator;
  return link;
}

// All that may fail on one device alone, which is current.
ffi::Error make_ready(Instruction* instruction, int device, const ffi::Context& context, cudaStream_t stream,
                      const LayerCall& call, const LayerAttributes& attributes) {
  ffi::ErrorOr<LaunchSizes> sizes = sizes_on(device, call, attributes);
  if (sizes.has_error()) return sizes.error();
  ffi::ErrorOr<Link> link = link_of(context, stream, attributes);
  if (link.has_error()) return link.error();
  Arena* arena = instruction->arena_of(device);
  if (arena == nullptr) {
    ffi::ErrorOr<Arena*> found = find_arena(device, *link, devices_of(attributes));
    if (found.has_error()) return found.error();
    arena = *found;
    instruction->remember(device, arena);
  }
  return arena->reserve(*link, *sizes);
}

// What initialize does on its device. Returns only errors that all devices have alike: XLA leaves the others waiting
// for a device whose initialize has failed.
ffi::Error initialize_on(int device, Instruction* instruction, const ffi::Context& context, int64_t run_id,
                         cudaStream_t stream, const LayerCall& call, const LayerAttributes& attributes) {
  const int32_t devices = local_devices(attributes);
  const std::shared_ptr<Run> run = instruction->runs.enter(run_id, device, [&] {
    // No size of an arena depends on the number of workers.
    return Run::Start{.refusal = process_failure(),
                      .waits = devices > 1 && !instruction->is_ready(devices, sizes_of(call, attributes))};
  });
  if (run->is_refused()) return ffi::Error::Success();
  ffi::Error error = make_ready(instruction, device, context, stream, call, attributes);
  if (error.failure() && devices != 1) {
    error = ffi::Error(*error.errc(), error.message() + " (On GPU " + std::to_string(device) +
                                          " of this process; the call fails on all of them.)");
  }
  run->leave(error, devices, attributes.timeout_seconds + kMarginSeconds);
  return ffi::Error::Success();
}

// Buffers are there, what they hold is not.
ffi::Error initialize(Instruction* instruction, ffi::Context context, ffi::RunId run_id, cudaStream_t stream,
                      ffi::RemainingArgs operands, ffi::RemainingRets results, LayerAttributes attributes) {
  return on_device(stream, operands, results, attributes, [&](int device, const LayerCall& call) {
    return initialize_on(device, instruction, context, run_id.run_id, stream, call, attributes);
  });
}

// Device and rank follow from the stream and the communicator. `place`, which is on the GPU, is compared with them
// once.
ffi::Error execute_on(int device, Instruction* instruction, int64_t run_id, cudaStream_t stream, const LayerCall& call,
                      const LayerAttributes& attributes) {
  if (const std::shared_ptr<Run> run = instruction->runs.find(run_id, device); run != nullptr) {
    if (ffi::Error error = run->error(); error.failure()) return error;
  }
  ffi::ErrorOr<LaunchSizes> sizes = sizes_on(device, call, attributes);
  if (sizes.has_error()) return sizes.error();
  Arena* arena = instruction->arena_of(device);
  if (arena == nullptr) return ffi::Error::Internal("jaxmoe: execute without an initialize for its group.");
  return arena->launch(
      {.sizes = *sizes,
       .arrays = arrays_of<void, float>(call),
       .activation = activation_of(attributes),
       .power_of_two_scales = attributes.power_of_two_scales != 0,
       .timeout_seconds = attributes.timeout_seconds,
       .stream = stream,
       .place = instruction->is_first_launch(device) ? call.data<const int32_t>(ArrayName::kPlace) : nullptr});
}

ffi::Error execute(Instruction* instruction, ffi::Context, ffi::RunId run_id, cudaStream_t stream,
                   ffi::RemainingArgs operands, ffi::RemainingRets results, LayerAttributes attributes) {
  return on_device(stream, operands, results, attributes, [&](int device, const LayerCall& call) {
    return execute_on(device, instruction, run_id.run_id, stream, call, attributes);
  });
}

// Operands, results and attributes of the call, which initialize and execute both declare.
template <class Binding>
auto with_call(Binding binding) {
  return std::move(binding)
      .template Ctx<ffi::State<Instruction>>()
      .template Ctx<ffi::Context>()
      .template Ctx<ffi::RunId>()
      .template Ctx<ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
      .template Attrs<LayerAttributes>();
}

}  // namespace

void know_devices(const std::vector<int64_t>& local, bool several_processes) {
  Devices& devices = Devices::get();
  const std::lock_guard lock(devices.mutex);
  devices.local = {local.begin(), local.end()};
  devices.several_processes = several_processes;
}

StateType layer_instruction_type() {
  static const XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<Instruction>();
  return {"jaxmoe_instruction_cuda", &Instruction::id, &info};
}

}  // namespace jaxmoe

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxmoeLayerInstantiateCuda, jaxmoe::instantiate,
                              xla::ffi::Ffi::BindInstantiate().Attrs<jaxmoe::LayerAttributes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxmoeLayerPrepareCuda, jaxmoe::prepare,
    xla::ffi::Ffi::BindPrepare().Ctx<xla::ffi::Context>().Attrs<jaxmoe::LayerAttributes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxmoeLayerInitializeCuda, jaxmoe::initialize,
                              jaxmoe::with_call(xla::ffi::Ffi::BindInitialize()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxmoeLayerCuda, jaxmoe::execute, jaxmoe::with_call(xla::ffi::Ffi::Bind()));
