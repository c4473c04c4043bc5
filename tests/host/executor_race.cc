// Layers back to back on the host executor, for ThreadSanitizer: tests/host/test_thread_sanitizer.py compiles this
// together with the executor and runs it. An argument names a wait that one rank leaves out, which must be found.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "host/executor.h"
#include "host/group.h"

using namespace jaxmoe;

namespace {

constexpr Shape kShape{.ranks = 3, .tokens = 24, .hidden = 16, .intermediate = 24, .num_experts = 6, .top_k = 2};
constexpr Schedule kSchedule{.tile = {4, 8, 8},
                             .unit_tiles = 2,
                             .lag_units = 1,
                             .ring_tiles = 4,
                             .workers = 3,  // odd, or each would always meet the same tile of a unit
                             .chunk_rows = 3,
                             .dispatchers = 3,
                             .narrow_rows = 2,
                             .keep_tokens = 1};
constexpr int kLaunches = 25;

int32_t site_named(const char* name) {
  for (int32_t i = 0; i < static_cast<int32_t>(Site::kCount); ++i) {
    if (std::strcmp(kSiteNames[i], name) == 0) return i;
  }
  std::fprintf(stderr, "no site is called %s\n", name);
  std::exit(2);
}

}  // namespace

int main(int argc, char** argv) {
  host::Disturbance disturbance{.delay_seed = 1, .most_delay_us = 20};
  if (argc > 1) {
    disturbance.rank = 1;
    disturbance.skipped_site = site_named(argv[1]);
  }
  std::mt19937 random(7);
  std::uniform_real_distribution<float> number(-1, 1);
  const auto numbers = [&](size_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = number(random);
    return values;
  };
  const size_t matrix = size_t{kShape.local_experts()} * kShape.hidden * kShape.intermediate;
  const HeadCapacity head = needed_head(kShape, kSchedule);
  const host::Arenas arenas(head, layout_of(kShape, kSchedule, head, sizeof(float)).bytes);
  std::atomic<bool> given_up = false;
  const host::Launch launch{.shape = kShape,
                            .schedule = kSchedule,
                            .head = head,
                            .dispatchers_per_worker = 1,
                            .activation = {},
                            .arenas = arenas.of_ranks(),
                            .timeout_seconds = 2,
                            .given_up = &given_up,
                            .disturbance = disturbance};
  std::vector<std::string> failures(kShape.ranks);
  std::vector<std::thread> ranks;
  for (int32_t rank = 0; rank < kShape.ranks; ++rank) {
    const std::vector<float> x = numbers(kShape.tokens * kShape.hidden), weights = numbers(kShape.slots());
    const std::vector<float> w_gate = numbers(matrix), w_up = numbers(matrix), w_down = numbers(matrix);
    std::vector<int32_t> ids(kShape.slots());
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % (kShape.num_experts + 1)) - 1;
    if (rank == 2) std::fill(ids.begin(), ids.end(), -1);  // a rank that would run ahead if nothing held it
    ranks.emplace_back([&, rank, x, weights, w_gate, w_up, w_down, ids] {
      std::vector<float> y(x.size());
      const host::LayerArrays<host::F32> arrays{x.data(),      ids.data(), weights.data(), w_gate.data(), w_up.data(),
                                                w_down.data(), nullptr,    nullptr,        nullptr,       y.data()};
      for (int i = 0; i < kLaunches && failures[rank].empty(); ++i) {
        failures[rank] = host::run_rank<host::F32>(launch, rank, arrays);
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
