// Layers and their gradients back to back on the host executor, for ThreadSanitizer:
// tests/host/test_thread_sanitizer.py compiles this together with the executor and runs it. The first argument says
// which passes: forward, backward or both, in turn. A second one names a wait that one rank leaves out, which must be
// found.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "host/executor.h"
#include "host/group.h"

using namespace jaxmoe;

namespace {

constexpr Formats kFormats = Formats::of(Element::kF32);
constexpr Shape kShape{.ranks = 3, .tokens = 24, .hidden = 16, .intermediate = 24, .num_experts = 6, .top_k = 2};
constexpr Schedule kForward{.tile = {4, 8, 8},
                            .unit_tiles = 2,
                            .lag_units = 1,
                            .ring_tiles = 4,
                            .workers = 3,  // odd, or each would always meet the same tile of a unit
                            .chunk_rows = 3,
                            .dispatchers = 3,
                            .narrow_rows = 2,
                            .keep_tokens = 1,
                            .segment_tiles = 0};

// Experts have about two segments.
constexpr Schedule backward_schedule() {
  Schedule schedule = kForward;
  schedule.segment_tiles = 2;
  schedule.ring_tiles = schedule.min_ring_tiles();
  return schedule;
}
constexpr Schedule kBackward = backward_schedule();
constexpr int kLaunches = 24;

std::vector<Schedule> passes_named(const char* name) {
  if (std::strcmp(name, "forward") == 0) return {kForward};
  if (std::strcmp(name, "backward") == 0) return {kBackward};
  if (std::strcmp(name, "both") == 0) return {kForward, kBackward};
  std::fprintf(stderr, "no passes are called %s\n", name);
  std::exit(2);
}

int32_t site_named(const char* name) {
  for (int32_t i = 0; i < static_cast<int32_t>(Site::kCount); ++i) {
    if (std::strcmp(kSiteNames[i], name) == 0) return i;
  }
  std::fprintf(stderr, "no site is called %s\n", name);
  std::exit(2);
}

// What one rank reads and writes in all its launches.
class RankArrays {
 public:
  explicit RankArrays(uint32_t seed) : random_(seed) {}

  host::ArraysOf<host::F32> fill(int32_t rank) {
    const size_t tokens = size_t{kShape.tokens} * kShape.hidden, slots = kShape.slots();
    const size_t experts = size_t{kShape.local_experts()} * kShape.hidden * kShape.intermediate;
    const size_t up = size_t{kShape.local_experts()} * kShape.intermediate;
    const size_t down = size_t{kShape.local_experts()} * kShape.hidden;
    ids_.resize(slots);
    for (int32_t& id : ids_) id = static_cast<int32_t>(random_() % (kShape.num_experts + 1)) - 1;
    if (rank == 2) std::fill(ids_.begin(), ids_.end(), -1);  // a rank that would run ahead if nothing held it
    return {.x = numbers(tokens),
            .topk_ids = ids_.data(),
            .topk_weights = numbers(slots),
            .w_gate = numbers(experts),
            .w_up = numbers(experts),
            .w_down = numbers(experts),
            .b_gate = numbers(up),
            .b_up = numbers(up),
            .b_down = numbers(down),
            .dy = numbers(tokens),
            .y = numbers(tokens),
            .dx = numbers(tokens),
            .dtopk_weights = numbers(slots),
            .dw_gate = numbers(experts),
            .dw_up = numbers(experts),
            .dw_down = numbers(experts),
            .db_gate = numbers(up),
            .db_up = numbers(up),
            .db_down = numbers(down)};
  }

 private:
  float* numbers(size_t count) {
    std::uniform_real_distribution<float> number(-1, 1);
    std::vector<float>& values = numbers_.emplace_back(count);
    for (float& value : values) value = number(random_);
    return values.data();
  }

  std::mt19937 random_;
  std::vector<int32_t> ids_;
  std::list<std::vector<float>> numbers_;
};

}  // namespace

int main(int argc, char** argv) {
  const std::vector<Schedule> passes = passes_named(argc > 1 ? argv[1] : "both");
  host::Disturbance disturbance{.delay_seed = 1, .most_delay_us = 20};
  if (argc > 2) {
    disturbance.rank = 1;
    disturbance.skipped_site = site_named(argv[2]);
  }
  const HeadCapacity head = needed_head(kShape, kForward);
  const host::Arenas arenas(head, std::max(layout_of(kShape, kForward, kFormats, head).bytes,
                                           layout_of(kShape, kBackward, kFormats, head).bytes));
  std::atomic<bool> given_up = false;
  std::vector<host::Launch> launches;
  for (const Schedule& schedule : passes) {
    launches.push_back({.shape = kShape,
                        .schedule = schedule,
                        .head = head,
                        .dispatchers_per_worker = 1,
                        .activation = {},
                        .arenas = arenas.of_ranks(),
                        .timeout_seconds = 2,
                        .given_up = &given_up,
                        .disturbance = disturbance});
  }
  std::vector<std::string> failures(kShape.ranks);
  std::vector<std::thread> ranks;
  for (int32_t rank = 0; rank < kShape.ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      RankArrays memory(7 + rank);
      const host::ArraysOf<host::F32> arrays = memory.fill(rank);
      for (int i = 0; i < kLaunches && failures[rank].empty(); ++i) {
        failures[rank] = host::run_rank<host::F32>(launches[i % launches.size()], rank, arrays);
      }
    });
  }
  for (std::thread& thread : ranks) thread.join();
  for (const std::string& failure : failures) {
    if (!failure.empty()) std::fprintf(stderr, "%s\n", failure.c_str());
  }
  std::puts("done");
  return 0;
}
