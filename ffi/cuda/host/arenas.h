// All arenas of this process, found by device and group. A group is known by its GPUs and their processes in the order
// of ranks: XLA may hand out several communicators for one group, one after the other, and the same numbers of devices
// can stand for other devices in another program, so neither names it. Caller: cuda/host/layer_handler.cc.
//
// The table of arenas has a mutex that is never held while anything waits.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/host/arena.h"
#include "cuda/host/notes.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe {

// The arena of the current device `device` in the group that `link` leads to. `devices` names the devices of all groups
// of the program by numbers that all processes know them by, or is empty. Where a program named the same ones before, in
// groups of as many ranks, nobody is asked: who meets whom follows from what has run before, which is the same on all
// ranks. Else collective.
xla::ffi::ErrorOr<Arena*> find_arena(int32_t device, const Link& link, const std::vector<int64_t>& devices);

// The numbers of devices may stand for others from here on: groups that programs name meet again. Arenas stay, and are
// found by who the ranks are.
void forget_names();

// Why no layer of this process runs again, as the error of a call: what has failed on any GPU of it. Success where
// nothing has. All of them stop at once, since programs whose results are missing on some devices alone hang.
xla::ffi::Error process_failure();

}  // namespace jaxmoe
