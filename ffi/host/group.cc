// See group.h.
#include "host/group.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <new>
#include <tuple>

namespace jaxmoe::host {

void Arenas::Free::operator()(std::byte* memory) const {
  ::operator delete(memory, std::align_val_t{kRegionAlignment});
}

Arenas::Arenas(const HeadCapacity& head, int64_t bytes) : head_(head), bytes_(bytes) {
  for (int32_t rank = 0; rank < head.ranks; ++rank) {
    memory_.emplace_back(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{kRegionAlignment})));
    std::memset(memory_.back().get(), 0, bytes);
    of_ranks_.push_back(memory_.back().get());
  }
}

struct Attendance::Table {
  using Key = std::tuple<const void*, int64_t, int32_t>;

  // One instruction of a run for one group.
  struct Calls {
    std::list<Key>::iterator place;  // in by_use
    std::map<std::pair<int32_t, int32_t>, int64_t> calls_of_device;  // by (rank, device)
    // A device that repeats a rank's work joins the meetings of its own replica of the group.
    std::map<int32_t, std::vector<int32_t>> devices_of_rank;
    std::map<std::pair<int64_t, int64_t>, std::pair<std::shared_ptr<Meeting>, int32_t>> meetings;  // by (replica, call)
  };

  std::mutex mutex;
  std::map<Key, Calls> calls;
  std::list<Key> by_use;  // the keys of `calls`; that of the last call behind all others
  std::vector<std::unique_ptr<Arenas>> free_arenas;

  // What so many others came behind is over. The numbers of runs say nothing: XLA has them in any order.
  static constexpr size_t kRemembered = 4096;

  Calls& calls_of(const Key& key) {
    if (const auto known = calls.find(key); known != calls.end()) {
      by_use.splice(by_use.end(), by_use, known->second.place);
      return known->second;
    }
    std::list<Key> place{key};
    Calls& made = calls[key];
    made.place = place.begin();
    by_use.splice(by_use.end(), place);
    return made;
  }

  void forget_oldest() {
    for (auto key = by_use.begin(); calls.size() > kRemembered && std::next(key) != by_use.end();) {
      const auto oldest = calls.find(*key++);
      if (!oldest->second.meetings.empty()) continue;  // a run with an open meeting is not over
      by_use.erase(oldest->second.place);
      calls.erase(oldest);
    }
  }

  std::unique_ptr<Arenas> take_arenas(const HeadCapacity& needed, const Shape& shape, const Schedule& schedule,
                                      const Formats& formats) {
    for (auto it = free_arenas.begin(); it != free_arenas.end(); ++it) {
      const Arenas& arenas = **it;
      if (arenas.head().holds(needed) && arenas.bytes() >= layout_of(shape, schedule, formats, arenas.head()).bytes) {
        std::unique_ptr<Arenas> taken = std::move(*it);
        free_arenas.erase(it);
        return taken;
      }
    }
    // Those of this group that are too small are replaced, not kept beside.
    for (auto it = free_arenas.begin(); it != free_arenas.end(); ++it) {
      if ((*it)->head().ranks == needed.ranks) {
        free_arenas.erase(it);
        break;
      }
    }
    return std::make_unique<Arenas>(needed, layout_of(shape, schedule, formats, needed).bytes);
  }
};

Attendance::Table& Attendance::table() {
  static Table* table = new Table;  // never destroyed: handlers may still run while the process ends
  return *table;
}

Attendance::Attendance(const CallSite& site, const Shape& shape, const Schedule& schedule, const Formats& formats)
    : ranks_(shape.ranks) {
  Table& all = table();
  const std::lock_guard lock(all.mutex);
  Table::Calls& calls = all.calls_of({site.instruction, site.run, site.group});
  std::vector<int32_t>& devices = calls.devices_of_rank[site.rank];
  auto device = std::find(devices.begin(), devices.end(), site.device);
  if (device == devices.end()) device = devices.insert(devices.end(), site.device);
  const int64_t replica = device - devices.begin();
  const int64_t call = calls.calls_of_device[{site.rank, site.device}]++;

  auto& [meeting, arrived] = calls.meetings[{replica, call}];
  if (meeting == nullptr) {
    meeting = std::make_shared<Meeting>();
    try {
      meeting->arenas = all.take_arenas(needed_head(shape, schedule), shape, schedule, formats);
    } catch (const std::exception& thrown) {
      // The meeting takes place nevertheless: it is where the peers of this rank look for what has gone wrong.
      char why[160];
      const int64_t bytes = layout_of(shape, schedule, formats, needed_head(shape, schedule)).bytes;
      std::snprintf(why, sizeof why, "no memory for arenas of %lld bytes for each of %d ranks: %s",
                    static_cast<long long>(bytes), static_cast<int>(ranks_), thrown.what());
      meeting->outcome.break_off(site.rank, why);
    }
  }
  meeting_ = meeting;
  if (++arrived == ranks_) calls.meetings.erase({replica, call});
  all.forget_oldest();
}

Attendance::~Attendance() {
  Table& all = table();
  const std::lock_guard lock(all.mutex);
  if (++meeting_->ranks_left < ranks_) return;
  // What a launch that was given up left behind is of no use to the next one.
  if (meeting_->outcome.is_given_up()) return;
  try {
    all.free_arenas.push_back(std::move(meeting_->arenas));
  } catch (const std::bad_alloc&) {  // no memory to remember them: the next call makes its own
  }
}

}  // namespace jaxmoe::host
