// Layers and their gradients back to back on the host executor, for ThreadSanitizer:
// tests/host/test_thread_sanitizer.py compiles this together with the executor and runs it. The first argument says
// which passes: forward, backward or both, in turn; or eight_bit, forward passes of weights in 8 bits; or decoded, both
// passes of such weights beside wide tokens; or decoded_to_8_bits, forward passes of weights in 4 bits. A second one names a wait that one rank leaves out, which must be found.
#include <algorithm>
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

// Of a rank's tiles, about eight, the last ones have answers that travel on their own.
constexpr Schedule summed_schedule() {
  Schedule schedule = kForward;
  schedule.summed_tiles = 5;
  return schedule;
}
constexpr int kLaunches = 24;

// Wide enough for scales of 128 columns, of which a row of h has two.
constexpr Shape eight_bit_shape() {
  Shape shape = kShape;
  shape.tokens = 12;
  shape.hidden = kScaleColumns;
  shape.intermediate = 2 * kScaleColumns;
  return shape;
}
constexpr Schedule eight_bit_schedule() {
  Schedule schedule = kForward;
  schedule.tile.h_columns = kScaleColumns;
  schedule.tile.columns = kScaleColumns / 2;
  return schedule;
}

// As few slots as there can be: each is decoded into many times.
constexpr Schedule decoded(Schedule schedule) {
  schedule.unit_tiles = 1;
  schedule.lag_units = 0;
  schedule.ring_tiles = schedule.segment_tiles > 0 ? 4 : 2;
  schedule.weight_slots = 1;
  return schedule;
}

// The launches that a run repeats.
struct Plan {
  Shape shape;
  Formats formats;
  std::vector<Schedule> passes;
};

Plan plan_named(const char* name) {
  const Formats wide = Formats::of(Element::kF32);
  if (std::strcmp(name, "forward") == 0) return {kShape, wide, {kForward}};
  if (std::strcmp(name, "backward") == 0) return {kShape, wide, {kBackward}};
  if (std::strcmp(name, "both") == 0) return {kShape, wide, {kForward, kBackward}};
  // In turns, so that one arena is laid out in two ways.
  if (std::strcmp(name, "sums_at_experts") == 0) return {kShape, wide, {summed_schedule(), kForward}};
  if (std::strcmp(name, "eight_bit") == 0) {
    const Format weights{Element::kE4M3, kScaleColumns, kScaleColumns};
    return {eight_bit_shape(), Formats::eight_bit(Element::kF32, weights), {eight_bit_schedule()}};
  }
  if (std::strcmp(name, "decoded") == 0) {
    const Format weights{Element::kE4M3, kAllOfThem, kAllOfThem};
    return {kShape, Formats::decoded(Element::kF32, weights), {decoded(kForward), decoded(kBackward)}};
  }
  if (std::strcmp(name, "decoded_to_8_bits") == 0) {
    const Format weights{Element::kE2M1, kAllOfThem, kAllOfThem, Element::kF32, group_columns_of(Element::kE8M0),
                         Element::kE8M0};
    return {eight_bit_shape(), Formats::eight_bit(Element::kF32, weights), {decoded(eight_bit_schedule())}};
  }
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
template <class Precision>
class RankArrays {
 public:
  RankArrays(const Plan& plan, uint32_t seed) : shape_(plan.shape), formats_(plan.formats), random_(seed) {}

  host::ArraysOf<Precision> fill(int32_t rank) {
    const size_t tokens = size_t{shape_.tokens} * shape_.hidden, slots = shape_.slots();
    const size_t experts = size_t{shape_.local_experts()} * shape_.hidden * shape_.intermediate;
    const size_t up = size_t{shape_.local_experts()} * shape_.intermediate;
    const size_t down = size_t{shape_.local_experts()} * shape_.hidden;
    const size_t groups = experts / group_columns_of(Element::kE8M0);
    const size_t scales = shape_.local_experts() * formats_.weights.scale_bytes(shape_.hidden, shape_.intermediate);
    ids_.resize(slots);
    for (int32_t& id : ids_) id = static_cast<int32_t>(random_() % (shape_.num_experts + 1)) - 1;
    if (rank == 2) std::fill(ids_.begin(), ids_.end(), -1);  // a rank that would run ahead if nothing held it
    return {.x = numbers(tokens),
            .topk_ids = ids_.data(),
            .topk_weights = numbers(slots),
            .w_gate = weights(experts),
            .w_up = weights(experts),
            .w_down = weights(experts),
            .b_gate = numbers(up),
            .b_up = numbers(up),
            .b_down = numbers(down),
            .w_gate_scales = numbers(scales / sizeof(float)),
            .w_up_scales = numbers(scales / sizeof(float)),
            .w_down_scales = numbers(scales / sizeof(float)),
            .w_gate_group_scales = powers(groups),
            .w_up_group_scales = powers(groups),
            .w_down_group_scales = powers(groups),
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
  using Weight = typename Precision::Weight;

  const typename Weight::Storage* weights(size_t count) {
    const float* values = numbers(count);
    std::vector<typename Weight::Storage>& stored = weights_.emplace_back(count);
    for (size_t i = 0; i < count; ++i) stored[i] = Weight::store(values[i]);
    return stored.data();
  }
  // Of groups: 2^-7 to 1.
  const uint8_t* powers(size_t count) {
    std::vector<uint8_t>& stored = powers_.emplace_back(count);
    for (uint8_t& each : stored) each = static_cast<uint8_t>(120 + random_() % 8);
    return stored.data();
  }
  float* numbers(size_t count) {
    std::uniform_real_distribution<float> number(-1, 1);
    std::vector<float>& values = numbers_.emplace_back(count);
    for (float& value : values) value = number(random_);
    return values.data();
  }

  const Shape shape_;
  const Formats formats_;
  std::mt19937 random_;
  std::vector<int32_t> ids_;
  std::list<std::vector<float>> numbers_;
  std::list<std::vector<typename Weight::Storage>> weights_;
  std::list<std::vector<uint8_t>> powers_;
};

template <class Precision>
void run(const Plan& plan, const host::Disturbance& disturbance) {
  const Shape& shape = plan.shape;
  const HeadCapacity head = needed_head(shape, plan.passes[0]);
  int64_t bytes = 0;
  for (const Schedule& schedule : plan.passes) {
    bytes = std::max(bytes, layout_of(shape, schedule, plan.formats, head).bytes);
  }
  const host::Arenas arenas(head, bytes);
  host::Outcome outcome;
  std::vector<host::Launch> launches;
  for (const Schedule& schedule : plan.passes) {
    launches.push_back({.shape = shape,
                        .schedule = schedule,
                        .formats = plan.formats,
                        .head = head,
                        .dispatchers_per_worker = 1,
                        .activation = {},
                        .arenas = arenas.of_ranks(),
                        .timeout_seconds = 2,
                        .outcome = &outcome,
                        .disturbance = disturbance});
  }
  std::vector<std::string> failures(shape.ranks);
  std::vector<std::thread> ranks;
  for (int32_t rank = 0; rank < shape.ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      RankArrays<Precision> memory(plan, 7 + rank);
      const host::ArraysOf<Precision> arrays = memory.fill(rank);
      for (int i = 0; i < kLaunches && failures[rank].empty(); ++i) {
        failures[rank] = host::run_rank<Precision>(launches[i % launches.size()], rank, arrays);
      }
    });
  }
  for (std::thread& thread : ranks) thread.join();
  for (const std::string& failure : failures) {
    if (!failure.empty()) std::fprintf(stderr, "%s\n", failure.c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Plan plan = plan_named(argc > 1 ? argv[1] : "both");
  host::Disturbance disturbance{.delay_seed = 1, .most_delay_us = 20};
  if (argc > 2) {
    disturbance.rank = 1;
    disturbance.skipped_site = site_named(argv[2]);
  }
  if (plan.formats.tokens.is_scaled()) {
    run<host::EightBit<host::F32>>(plan, disturbance);
  } else if (plan.formats.decodes()) {
    run<host::Decoded<host::F32>>(plan, disturbance);
  } else {
    run<host::F32>(plan, disturbance);
  }
  std::puts("done");
  return 0;
}
