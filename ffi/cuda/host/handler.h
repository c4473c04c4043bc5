// The handlers of an FFI target on CUDA devices, whatever it computes: `Target` says what its calls are. XLA calls `instantiate` once for every instruction of
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
//   struct Target {
//     using Attributes = ...;                                               // those of common/group_attributes.h and more
//     using Call = ...;                                                     // its arrays, made of operands and results
//     static std::string call_error(const Call&, const Attributes&);        // empty where nothing is wrong
//     static std::string attributes_error(const Attributes&);               // the same, before there are arrays
//     static LaunchSizes sizes(const Call&, const Attributes&);             // of a call without errors; workers may be 0
//     static ArenaCall arena_call(const Call&, const Attributes&);          // its sizes, stream and place are filled in
//     static const int32_t* place(const Call&);
//   };
//
// JAXMOE_DEFINE_HANDLERS at the end makes the symbols that cuda/host/extension.cc registers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/host/arenas.h"
#include "cuda/host/collectives.h"
#include "cuda/host/instruction.h"
#include "cuda/host/runs.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe {

template <class Target>
class Handlers {
  using Attributes = typename Target::Attributes;
  using Call = typename Target::Call;
  using Error = xla::ffi::Error;

 public:
  static xla::ffi::ErrorOr<std::unique_ptr<Instruction>> instantiate(Attributes) {
    return std::make_unique<Instruction>();
  }

  static Error prepare(xla::ffi::Context context, Attributes attributes) {
    if (const std::string error = Target::attributes_error(attributes); !error.empty()) {
      return Error::InvalidArgument(error);
    }
    return attributes.ranks == 1 ? Error::Success() : request_communicator(context, groups_of(attributes));
  }

  // Buffers are there, what they hold is not.
  static Error initialize(Instruction* instruction, xla::ffi::Context context, xla::ffi::RunId run_id,
                          cudaStream_t stream, xla::ffi::RemainingArgs operands, xla::ffi::RemainingRets results,
                          Attributes attributes) {
    return on_device(stream, operands, results, attributes, [&](int device, const Call& call) {
      return initialize_on(device, instruction, context, run_id.run_id, stream, call, attributes);
    });
  }

  static Error execute(Instruction* instruction, xla::ffi::Context, xla::ffi::RunId run_id, cudaStream_t stream,
                       xla::ffi::RemainingArgs operands, xla::ffi::RemainingRets results, Attributes attributes) {
    return on_device(stream, operands, results, attributes, [&](int device, const Call& call) {
      return execute_on(device, instruction, run_id.run_id, stream, call, attributes);
    });
  }

  // Operands, results and attributes of the call, which initialize and execute both declare.
  template <class Binding>
  static auto with_call(Binding binding) {
    return std::move(binding)
        .template Ctx<xla::ffi::State<Instruction>>()
        .template Ctx<xla::ffi::Context>()
        .template Ctx<xla::ffi::RunId>()
        .template Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
        .RemainingArgs()
        .RemainingRets()
        .template Attrs<Attributes>();
  }

 private:
  // A device that others of its process wait for tells itself that the time is over, and they hear it.
  static constexpr double kMarginSeconds = 10;

  // The devices of the program by the numbers that all processes know them by; none where Python could not tell.
  static std::vector<int64_t> devices_of(const Attributes& a) {
    if (*a.devices.begin() < 0) return {};
    return {a.devices.begin(), a.devices.end()};
  }

  static ReplicaGroups groups_of(const Attributes& a) {
    ReplicaGroups groups;
    for (const int64_t* group = a.groups.begin(); group != a.groups.end(); group += a.ranks) {
      groups.emplace_back(group, group + a.ranks);
    }
    return groups;
  }

  // Checks a call of initialize or execute, makes its device the current one and calls body(device, call).
  template <class Body>
  static Error on_device(cudaStream_t stream, const xla::ffi::RemainingArgs& operands,
                         xla::ffi::RemainingRets results, const Attributes& attributes, Body body) {
    std::string wrong;
    const Call call(operands, results, attributes, &wrong);
    if (wrong.empty()) wrong = Target::call_error(call, attributes);
    if (!wrong.empty()) return Error::InvalidArgument(wrong);
    xla::ffi::ErrorOr<int> device = device_of(stream);
    if (device.has_error()) return device.error();
    const CurrentDevice current(*device);
    return body(*device, call);
  }

  static xla::ffi::ErrorOr<Link> link_of(Run& run, const xla::ffi::Context& context, cudaStream_t stream,
                                         const Attributes& attributes) {
    Link link{.communicator = nullptr,
              .ranks = attributes.ranks,
              .stream = stream,
              .timeout_seconds = attributes.timeout_seconds,
              .goes_on = [&run] { run.goes_on(); }};
    if (attributes.ranks == 1) return link;
    xla::ffi::ErrorOr<void*> communicator = get_communicator(context, groups_of(attributes));
    if (communicator.has_error()) return xla::ffi::Unexpected(communicator.error());
    link.communicator = *communicator;
    return link;
  }

  // All that may fail on one device alone, which is current.
  static Error make_ready(Instruction* instruction, int device, Run& run, const xla::ffi::Context& context,
                          cudaStream_t stream, const Call& call, const Attributes& attributes) {
    xla::ffi::ErrorOr<LaunchSizes> sizes = with_workers(device, Target::sizes(call, attributes));
    if (sizes.has_error()) return sizes.error();
    xla::ffi::ErrorOr<Link> link = link_of(run, context, stream, attributes);
    if (link.has_error()) return link.error();
    Arena* arena = instruction->arena_of(device);
    if (arena == nullptr) {
      xla::ffi::ErrorOr<Arena*> found = find_arena(device, *link, devices_of(attributes));
      if (found.has_error()) return found.error();
      arena = *found;
      instruction->remember(device, arena);
    }
    return arena->reserve(*link, *sizes);
  }

  // What initialize does on its device. Returns only errors that all devices have alike: XLA leaves the others waiting
  // for a device whose initialize has failed.
  static Error initialize_on(int device, Instruction* instruction, const xla::ffi::Context& context, int64_t run_id,
                             cudaStream_t stream, const Call& call, const Attributes& attributes) {
    const int32_t devices = local_devices(devices_of(attributes), attributes.groups.size());
    const std::shared_ptr<Run> run = instruction->runs.enter(run_id, device, [&] {
      // No size of an arena depends on the number of workers.
      return Run::Start{.refusal = process_failure(),
                        .waits = devices > 1 && !instruction->is_ready(devices, Target::sizes(call, attributes))};
    });
    if (run->is_refused()) return Error::Success();
    Error error = make_ready(instruction, device, *run, context, stream, call, attributes);
    if (error.failure() && devices != 1) {
      error = Error(*error.errc(), error.message() + " (On GPU " + std::to_string(device) +
                                       " of this process; the call fails on all of them.)");
    }
    run->leave(error, devices, attributes.timeout_seconds + kMarginSeconds);
    return Error::Success();
  }

  // Device and rank follow from the stream and the communicator. `place`, which is on the GPU, is compared with them
  // once.
  static Error execute_on(int device, Instruction* instruction, int64_t run_id, cudaStream_t stream, const Call& call,
                          const Attributes& attributes) {
    if (const std::shared_ptr<Run> run = instruction->runs.find(run_id, device); run != nullptr) {
      if (Error error = run->error(); error.failure()) return error;
    }
    xla::ffi::ErrorOr<LaunchSizes> sizes = with_workers(device, Target::sizes(call, attributes));
    if (sizes.has_error()) return sizes.error();
    Arena* arena = instruction->arena_of(device);
    if (arena == nullptr) return Error::Internal("jaxmoe: execute without an initialize for its group.");
    ArenaCall ready = Target::arena_call(call, attributes);
    ready.sizes = *sizes;
    ready.timeout_seconds = attributes.timeout_seconds;
    ready.stream = stream;
    ready.place = instruction->is_first_launch(device) ? Target::place(call) : nullptr;
    return arena->launch(ready);
  }
};

}  // namespace jaxmoe

// The four stages of a target, as symbols `Jaxmoe<name>InstantiateCuda` and so on.
#define JAXMOE_DEFINE_HANDLERS(name, Target)                                                                         \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(Jaxmoe##name##InstantiateCuda, jaxmoe::Handlers<Target>::instantiate,                \
                                xla::ffi::Ffi::BindInstantiate().Attrs<Target::Attributes>());                       \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                                     \
      Jaxmoe##name##PrepareCuda, jaxmoe::Handlers<Target>::prepare,                                                  \
      xla::ffi::Ffi::BindPrepare().Ctx<xla::ffi::Context>().Attrs<Target::Attributes>());                            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(Jaxmoe##name##InitializeCuda, jaxmoe::Handlers<Target>::initialize,                  \
                                jaxmoe::Handlers<Target>::with_call(xla::ffi::Ffi::BindInitialize()));               \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(Jaxmoe##name##Cuda, jaxmoe::Handlers<Target>::execute,                               \
                                jaxmoe::Handlers<Target>::with_call(xla::ffi::Ffi::Bind()))
