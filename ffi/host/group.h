// Symmetric memory on a CPU: the devices of one process share an address space, so an arena is a block of the heap that
// every rank of a group knows. Caller: host/layer_handler.cc.
//
// Handlers of one call run on as many threads as the group has ranks, in any order and beside those of other calls; all
// handlers of one call get the same `Meeting`. Arenas outlive calls: the next call of a group of that size takes them
// as the last one left them, as on a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/layout.h"
#include "host/launch.h"

namespace jaxmoe::host {

// The arenas of one group of ranks.
class Arenas {
 public:
  Arenas(const HeadCapacity& head, int64_t bytes);

  const HeadCapacity& head() const { return head_; }
  int64_t bytes() const { return bytes_; }
  const std::vector<std::byte*>& of_ranks() const { return of_ranks_; }

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  HeadCapacity head_;
  int64_t bytes_;
  std::vector<std::unique_ptr<std::byte, Free>> memory_;
  std::vector<std::byte*> of_ranks_;
};

// What the ranks of one call share.
struct Meeting {
  std::unique_ptr<Arenas> arenas;  // null where there was no memory for them: then the call is broken off
  Outcome outcome;
  int32_t ranks_left = 0;  // of Attendance
};

// Names a call: one instruction of one executable, in one run, for one group of devices. `device` tells apart devices
// that repeat the same rank's work (mesh axes that the compiler handles).
struct CallSite {
  const void* instruction;
  int64_t run;
  int32_t group;
  int32_t rank;
  int32_t device;
};

// One rank's presence in a call: from construction to destruction it may use the meeting. Nothing here waits for peers.
class Attendance {
 public:
  Attendance(const CallSite& site, const Shape& shape, const Schedule& schedule, const Formats& formats);
  ~Attendance();
  Attendance(const Attendance&) = delete;
  Attendance& operator=(const Attendance&) = delete;

  Meeting& meeting() const { return *meeting_; }

 private:
  struct Table;
  static Table& table();

  std::shared_ptr<Meeting> meeting_;
  int32_t ranks_;
};

}  // namespace jaxmoe::host
