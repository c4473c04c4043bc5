// The way to a worker's tasks as a GPU walks it (ffi/common/scheduler.h), without one: its shorter ways to quotients and
// numbers of tiles are compiled in with -D__CUDA_ARCH__, and what CUDA has for them is made up here, as inexact as CUDA
// promises. Prints, for each of some problems, how many tasks a few workers have and what becomes of all their fields.
// Built and run by test_task_walk.py.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

#if defined(__CUDA_ARCH__)
namespace {
constexpr int __clz(int32_t number) { return std::countl_zero(static_cast<uint32_t>(number)); }
constexpr int __popc(uint32_t word) { return std::popcount(word); }
// At most two units in the last place from the quotient.
float __fdividef(float number, float divisor) {
  float quotient = static_cast<float>(double{number} / double{divisor});
  const float towards = ULPS < 0 ? -std::numeric_limits<float>::infinity() : std::numeric_limits<float>::infinity();
  for (int i = 0; i < std::abs(ULPS); ++i) quotient = std::nextafter(quotient, towards);
  return quotient;
}
}  // namespace
#endif

#include "common/scheduler.h"
#include "common/tiling.h"

namespace {

using namespace jaxmoe;

class Hash {
 public:
  void add(int32_t number) { hash_ = (hash_ ^ static_cast<uint32_t>(number)) * 0x100000001b3; }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};

template <Pass kPass>
void print_tasks(const char* name, const Shape& shape, const Schedule& schedule, const std::vector<int32_t>& rows,
                 const NarrowExperts& narrow = {}) {
  Hash hash;
  int64_t count = 0;
  for (const int32_t worker : {0, schedule.workers / 2, schedule.workers - 1}) {
    TaskWalk<kPass> walk(shape, schedule, rows.data(), narrow);
    Task task;
    for (int32_t number = worker; walk.seek(number, task); number += schedule.workers, ++count) {
      for (const int32_t field : numbers_of(task)) hash.add(field);
    }
  }
  std::printf("%s %lld %016llx\n", name, static_cast<long long>(count), static_cast<unsigned long long>(hash.value()));
}

void print_problem(std::mt19937& random) {
  const auto draw = [&](int32_t least, int32_t most) {
    return std::uniform_int_distribution<int32_t>(least, most)(random);
  };
  const bool gated = draw(0, 1) != 0;
  Schedule schedule{};
  schedule.tile = kernel_tiles(gated);
  schedule.narrow_rows = schedule.tile.rows / 2;
  schedule.unit_tiles = draw(1, 6);
  schedule.lag_units = draw(0, 12);
  schedule.workers = draw(1, 66);
  schedule.share_columns = draw(0, 1);
  const int32_t most_rows = schedule.tile.rows * draw(1, schedule.unit_tiles + 1);
  std::vector<int32_t> rows(draw(1, 120));
  for (int32_t& number : rows) number = draw(0, 9) == 0 ? 0 : draw(1, most_rows);
  if (draw(0, 1) != 0) mark_experts_without_rows(rows.data(), static_cast<int32_t>(rows.size()));
  const Shape shape{.ranks = 1, .tokens = most_rows, .hidden = 64 * draw(1, 60), .intermediate = 64 * draw(1, 40),
                    .num_experts = static_cast<int32_t>(rows.size()), .top_k = 1, .projections = gated ? 2 : 1};
  schedule.ring_tiles = schedule.min_ring_tiles() + draw(0, 40);
  print_tasks<Pass::kForward>("forward", shape, schedule, rows);

  // Each with a narrow tile, or none.
  std::vector<int32_t> few = rows;
  std::vector<uint32_t> with_rows(NarrowExperts::words(shape.num_experts));
  int32_t narrow = 0;
  for (int32_t expert = 0; expert < shape.num_experts; ++expert) {
    if (few[expert] <= 0) continue;
    few[expert] = (few[expert] - 1) % schedule.narrow_rows + 1;
    with_rows[expert / NarrowExperts::kOfWord] |= 1u << expert % NarrowExperts::kOfWord;
    ++narrow;
  }
  print_tasks<Pass::kForward>("narrow", shape, schedule, few, NarrowExperts(narrow, with_rows.data()));

  const Schedule first = half_of(schedule, kFirstHalf), second = half_of(schedule, kSecondHalf);
  print_tasks<Pass::kDispatchMatmul>("dispatch_matmul", shape, first, rows);
  print_tasks<Pass::kMatmulCombine>("matmul_combine", shape, second, rows);

  schedule.share_columns = 0;
  schedule.segment_tiles = schedule.unit_tiles + draw(0, 2) * schedule.unit_tiles;
  schedule.saved_tiles = draw(0, 1) * draw(0, 200);
  schedule.frozen = draw(0, 3) == 0 ? 1 : 0;
  schedule.ring_tiles = schedule.min_ring_tiles() + draw(0, 40);
  print_tasks<Pass::kBackward>("backward", shape, schedule, rows);
}

// Where a quotient is nearest to a whole number.
int64_t wrong_quotients(int32_t divisor) {
  int64_t wrong = 0;
  for (int32_t multiple = divisor; multiple < kMostOfSmallQuotient; multiple += divisor) {
    for (const int32_t number : {multiple - 1, multiple}) wrong += small_quotient(number, divisor) != number / divisor;
  }
  return wrong;
}

}  // namespace

int main() {
  int64_t wrong = 0;
  for (int32_t divisor = 1; divisor < kMostOfSmallQuotient; divisor += divisor < 5000 ? 1 : 97) {
    wrong += wrong_quotients(divisor);
  }
  std::printf("quotients %lld\n", static_cast<long long>(wrong));
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) print_problem(random);
}
