// Meetings of the ranks of a group: each says what it has to say, and returns once it has heard all others. All ranks
// decide alike whether they meet, each on its own (ffi/memory.md). Caller: cuda/host/arena.cc,
// cuda/host/arenas.cc.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "cuda/host/gpu.h"
#include "cuda/host/notes.h"
#include "cuda/host/symmetric_memory.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe {

// A rank: its GPU by UUID, and its process, of which several may share a GPU.
using Member = std::pair<std::vector<unsigned char>, uint64_t>;
using Members = std::vector<Member>;  // of a group, in the order of ranks

// The ranks tell each other who they are. `devices` are the numbers by which the program names those of all groups.
xla::ffi::ErrorOr<Members> meet_group(int32_t device, const Link& link, const Membership& self,
                                      const std::vector<int64_t>& devices);

// The arena that a rank wants; all ranks want the same.
struct WantedArena {
  int32_t rank;        // who wants it
  int64_t bytes;
  uint64_t agreement;  // agreement_of() of common/layout.h
};

// One step of the growth of an arena, on which all ranks are: this one says whether it has succeeded in `step` and
// where its block is, and hears whether all others have.
xla::ffi::Error meet(Gpu& gpu, const Link& link, const WantedArena& wanted, const SharedMemory& memory,
                     const char* step, bool succeeded, std::vector<Note>* notes);

}  // namespace jaxmoe
