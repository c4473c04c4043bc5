// What the handlers of XLA:CPU share.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <thread>
#include <utility>

#include "common/extension.h"
#include "common/formats.h"
#include "host/group.h"
#include "host/launch.h"
#include "host/precision.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe::host {

// One per instruction of an executable, the same object for all devices that run it: it tells the calls of one program
// apart, which XLA:CPU may run in another order on every device.
struct Instruction {
  static xla::ffi::TypeId id;
};
StateType instruction_type();

// Runs body(launch), with what the ranks of `launch` share filled in: it returns what went wrong, or nothing. What it
// throws is an error of its peers as well.
template <class Body>
xla::ffi::Error run_among_peers(const CallSite& site, Launch& launch, const Body& body) {
  try {
    const Attendance attendance(site, launch.shape, launch.schedule, launch.formats);
    Meeting& meeting = attendance.meeting();
    if (meeting.outcome.is_broken_off()) return xla::ffi::Error::Internal(meeting.outcome.reason());
    launch.head = meeting.arenas->head();
    launch.arenas = meeting.arenas->of_ranks();
    launch.outcome = &meeting.outcome;
    try {
      const std::string failure = body(std::as_const(launch));
      if (failure.empty()) return xla::ffi::Error::Success();
      if (meeting.outcome.is_broken_off()) return xla::ffi::Error::Internal(failure);
      return xla::ffi::Error(xla::ffi::ErrorCode::kDeadlineExceeded, failure);
    } catch (const std::exception& thrown) {
      meeting.outcome.break_off(site.rank, thrown.what());
      return xla::ffi::Error::Internal(meeting.outcome.reason());
    }
  } catch (const std::exception& thrown) {  // behind this one it would end the process
    return xla::ffi::Error::Internal(std::string("jaxmoe: ") + thrown.what());
  }
}

// Does so on a thread of its own. A call waits for those of its peers, and XLA:CPU may have begun another one on their
// devices, which waits for one of this device: so none may keep its device from beginning the next. `launch` and `body`
// have copies of all that they read but the arrays, which XLA keeps until then.
template <class Body>
xla::ffi::Future run_beside_others(const CallSite& site, Launch launch, Body body) {
  xla::ffi::Promise promise;
  xla::ffi::Future future(promise);
  launch.dispatchers_per_worker = launch.schedule.dispatchers / launch.schedule.workers;
  const auto keep = [](xla::ffi::Promise& promise, const xla::ffi::Error& error) {
    if (error.success()) {
      promise.SetAvailable();
    } else {
      promise.SetError(error);
    }
  };
  try {
    std::thread([=]() mutable {
      // Made before the promise is kept: then XLA may go on, and nothing here is used any more.
      const xla::ffi::Error error = run_among_peers(site, launch, body);
      keep(promise, error);
    }).detach();
  } catch (const std::exception&) {  // no thread: the peers have to know, which wait for this rank
    keep(promise, run_among_peers(site, launch, [](const Launch&) -> std::string { throw; }));
  }
  return future;
}
// Of a call that does not begin.
inline xla::ffi::Future refused(xla::ffi::Error error) {
  xla::ffi::Promise promise;
  xla::ffi::Future future(promise);
  promise.SetError(std::move(error));
  return future;
}

// What is wrong with the rank in `place`, which only a CPU reads; empty where nothing is.
inline std::string place_error(int32_t rank, int32_t ranks) {
  if (rank >= 0 && rank < ranks) return "";
  return "jaxmoe: place names rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
         " ranks; it must be from 0 on and below that.";
}

// body(policy) with that of the elements of x, y and biases; the checks let no others come here.
template <class Body>
xla::ffi::Future with_wide(Element element, const Body& body) {
  switch (element) {
    case Element::kF32: return body(F32{});
    case Element::kF64: return body(F64{});
    case Element::kBf16: return body(Bf16{});
    case Element::kF16: return body(F16{});
    case Element::kE4M3:
    case Element::kE8M0:
    case Element::kE2M1:
    case Element::kCount: break;
  }
  return refused(xla::ffi::Error::Internal("jaxmoe: an element type that the checks know and the executor does not."));
}

}  // namespace jaxmoe::host
