// See timeline.h.
#include "host/timeline.h"

#include <map>
#include <mutex>
#include <utility>

namespace jaxmoe::host {
namespace {

struct Kept {
  std::mutex mutex;
  std::map<std::pair<int32_t, int32_t>, LaunchTimeline> launches;  // by (device, rank)

  static Kept& get() {
    static Kept* kept = new Kept;  // never destroyed: handlers may still run while the process ends
    return *kept;
  }
};

}  // namespace

void keep_timeline(LaunchTimeline launch) {
  Kept& kept = Kept::get();
  const std::lock_guard lock(kept.mutex);
  const std::pair key{launch.device, launch.rank};
  kept.launches.insert_or_assign(key, std::move(launch));
}

bool record_timelines(bool on) {
  Kept& kept = Kept::get();
  const std::lock_guard lock(kept.mutex);
  if (on) kept.launches.clear();
  return timeline_is_on.exchange(on);
}

std::vector<LaunchTimeline> kept_timelines() {
  Kept& kept = Kept::get();
  const std::lock_guard lock(kept.mutex);
  std::vector<LaunchTimeline> launches;
  for (const auto& [key, launch] : kept.launches) launches.push_back(launch);
  return launches;
}

}  // namespace jaxmoe::host
