#include "cuda/host/arenas.h"

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/host/errors.h"
#include "cuda/host/failures.h"
#include "cuda/host/meeting.h"
#include "cuda/host/timelines.h"

namespace ffi = xla::ffi;

namespace jaxmoe {
namespace {

// The devices of all groups, one group after the other, and how many of them are a group: groups of 2 and of 4 of the
// same devices have the same list.
using Names = std::pair<int32_t, std::vector<int64_t>>;

struct Table {
  std::mutex mutex;
  std::map<std::pair<int32_t, Members>, std::unique_ptr<Arena>> arenas;
  // By the current device and what a program named. Several names may lead to one arena.
  std::map<std::pair<int32_t, Names>, Arena*> named;
  std::set<std::string> told;  // failures that a call or a person has heard of

  static Table& get() {
    static Table* table = new Table;  // never destroyed: handlers may still run while the process ends
    return *table;
  }

  std::vector<Arena*> all() {
    const std::lock_guard lock(mutex);
    std::vector<Arena*> found;
    for (const auto& [key, arena] : arenas) found.push_back(arena.get());
    return found;
  }
  bool tell(const std::string& text) {  // false: it was known
    const std::lock_guard lock(mutex);
    return told.insert(text).second;
  }
};

Arena* arena_of(int32_t device, const Members& members, int32_t ranks, int32_t rank) {
  Table& table = Table::get();
  const std::lock_guard lock(table.mutex);
  std::unique_ptr<Arena>& arena = table.arenas[{device, members}];
  if (arena == nullptr) arena = std::make_unique<Arena>(device, ranks, rank);
  return arena.get();
}

ffi::Error check_membership(const Membership& found, int32_t device, int32_t ranks) {
  if (found.ranks == ranks && found.rank >= 0 && found.rank < ranks && found.device == device) {
    return ffi::Error::Success();
  }
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                    "jaxmoe: XLA's communicator has " + std::to_string(found.ranks) + " ranks and is rank " +
                        std::to_string(found.rank) + " on device " + std::to_string(found.device) +
                        "; this call has " + std::to_string(ranks) + " ranks and runs on device " +
                        std::to_string(device) + ".");
}

}  // namespace

std::vector<LaunchTimeline> arena_timelines() {
  std::vector<LaunchTimeline> launches;
  for (Arena* arena : Table::get().all()) {
    ffi::ErrorOr<std::optional<LaunchTimeline>> read = arena->timeline();
    if (read.has_error()) throw std::runtime_error(read.error().message());
    if (*read) launches.push_back(std::move(**read));
  }
  return launches;
}

ffi::ErrorOr<Arena*> find_arena(int32_t device, const Link& link, const std::vector<int64_t>& devices) {
  if (link.ranks == 1) return arena_of(device, {}, 1, 0);

  Membership found{};
  if (const std::string error = membership(link, &found); !error.empty()) {
    return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kFailedPrecondition, "jaxmoe: " + error));
  }
  if (ffi::Error error = check_membership(found, device, link.ranks); error.failure()) return ffi::Unexpected(error);
  Table& table = Table::get();
  const Names names{link.ranks, devices};
  if (!devices.empty()) {
    const std::lock_guard lock(table.mutex);
    if (const auto named = table.named.find({device, names}); named != table.named.end()) {
      if (named->second->rank() == found.rank) return named->second;
      return ffi::Unexpected(ffi::Error::Internal(
          "jaxmoe: rank " + std::to_string(found.rank) + " of XLA's communicator was rank " +
          std::to_string(named->second->rank()) + " when a program named the same groups before."));
    }
  }
  ffi::ErrorOr<Members> members = meet_group(device, link, found, devices);
  if (members.has_error()) return ffi::Unexpected(members.error());
  Arena* arena = arena_of(device, *members, link.ranks, found.rank);
  if (!devices.empty()) {
    const std::lock_guard lock(table.mutex);
    table.named[{device, names}] = arena;
  }
  return arena;
}

void forget_names() {
  Table& table = Table::get();
  const std::lock_guard lock(table.mutex);
  table.named.clear();
}

std::vector<std::string> failures() {
  std::vector<std::string> texts = Gpu::condemned();
  for (Arena* arena : Table::get().all()) {
    if (std::string text = arena->failure(); !text.empty()) texts.push_back(std::move(text));
  }
  for (const std::string& text : texts) Table::get().tell(text);
  return texts;
}

std::vector<std::string> untold_failures() {
  std::vector<std::string> texts;
  for (Arena* arena : Table::get().all()) {
    const std::string text = arena->failure();
    if (!text.empty() && Table::get().tell(text)) texts.push_back(text);
  }
  return texts;  // calls return what happens to GPUs
}

ffi::Error process_failure() {
  for (Arena* arena : Table::get().all()) {
    const std::string text = arena->failure();
    if (text.empty()) continue;
    Table::get().tell(text);
    return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, text + kRestart);
  }
  const std::vector<std::string> condemned = Gpu::condemned();
  if (condemned.empty()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition, condemned.front() + kRestart);
}

}  // namespace jaxmoe
