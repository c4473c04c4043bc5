// How the ranks of a call find each other (ffi/host/group.h). Ends with a line where everything went as it should. Built
// and run by test_group.py.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "common/formats.h"
#include "common/shape.h"
#include "host/group.h"

using namespace jaxmoe;

namespace {

constexpr Shape kShape{.ranks = 2, .tokens = 4, .hidden = 8, .intermediate = 8, .num_experts = 2, .top_k = 1};
constexpr Schedule kSchedule{.tile = {4, 8, 8},
                             .unit_tiles = 1,
                             .lag_units = 0,
                             .ring_tiles = 1,
                             .workers = 1,
                             .chunk_rows = 4,
                             .dispatchers = 1,
                             .narrow_rows = 0,
                             .keep_tokens = 0,
                             .segment_tiles = 0};
// Of four devices, where each rank's work is done twice.
constexpr int32_t kFirst[] = {0, 1}, kSecond[] = {2, 3};

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

class Present : public host::Attendance {
 public:
  Present(int64_t run, int32_t rank, int32_t device)
      : Attendance({&kShape, run, 0, rank, device}, kShape, kSchedule, Formats::of(Element::kF32)) {}
};

bool meet(const Present& one, const Present& other) { return &one.meeting() == &other.meeting(); }

// A call of both ranks on a device each.
void call_on_first_devices(int64_t run) {
  const Present rank_0(run, 0, kFirst[0]), rank_1(run, 1, kFirst[1]);
  require(meet(rank_0, rank_1), "the ranks of a call meet");
}

// XLA numbers runs in no order.
void a_run_under_way_is_not_forgotten_whatever_its_number() {
  constexpr int64_t kManyRuns = 5000, kUnderWay = -7;
  for (int64_t run = 0; run < kManyRuns; ++run) call_on_first_devices(run);
  call_on_first_devices(kUnderWay);
  call_on_first_devices(kManyRuns);
  // The first devices are one call ahead.
  const Present ahead_0(kUnderWay, 0, kFirst[0]), behind_1(kUnderWay, 1, kSecond[1]);
  require(!meet(ahead_0, behind_1), "the second call of a device is not the first one of another");
  const Present ahead_1(kUnderWay, 1, kFirst[1]), behind_0(kUnderWay, 0, kSecond[0]);
  require(meet(ahead_0, ahead_1) && meet(behind_0, behind_1), "those that are as far meet");
}

void a_run_that_is_asked_for_again_and_again_is_not_forgotten() {
  constexpr int64_t kManyRuns = 20000, kUnderWay = -9;
  for (int64_t run = 10000; run < kManyRuns; ++run) {
    call_on_first_devices(run);
    if (run % 1000 == 0) call_on_first_devices(kUnderWay);
  }
  const Present ahead_0(kUnderWay, 0, kFirst[0]), behind_1(kUnderWay, 1, kSecond[1]);
  require(!meet(ahead_0, behind_1), "a call of a device is not the first one of another");
  const Present ahead_1(kUnderWay, 1, kFirst[1]), behind_0(kUnderWay, 0, kSecond[0]);
  require(meet(ahead_0, ahead_1) && meet(behind_0, behind_1), "those that are as far meet");
}

}  // namespace

int main() {
  a_run_under_way_is_not_forgotten_whatever_its_number();
  a_run_that_is_asked_for_again_and_again_is_not_forgotten();
  std::puts("done");
}
