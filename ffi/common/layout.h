// The arena: the memory of a rank that its peers can reach, and where everything in it lies. Used by the host that
// allocates it, by every role that touches it and by tests; no size of it is computed anywhere else.
//
// The head keeps its place for the life of an arena, whatever shapes the launches have: a rank that is one launch ahead
// writes there while its peer still runs the launch before (protocol.h). The body is laid out for each shape anew.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "common/formats.h"
#include "common/protocol.h"
#include "common/shape.h"

namespace jaxmoe {

// Bytes from the start of the arena. Every region starts on a multiple of kRegionAlignment.
struct Region {
  int64_t offset;
  int64_t bytes;

  JAXMOE_ANY constexpr int64_t end() const { return offset + bytes; }
};

inline constexpr int64_t kRegionAlignment = 1024;  // more than any copy wants
inline constexpr int64_t kFlagBytes = 128;         // a word that peers write has a cache line of its own

class Packer {
 public:
  JAXMOE_ANY constexpr Region take(int64_t bytes) {
    const Region region{end_, bytes};
    end_ = ceil_div(end_ + bytes, kRegionAlignment) * kRegionAlignment;
    return region;
  }
  JAXMOE_ANY constexpr int64_t bytes() const { return end_; }

 private:
  int64_t end_ = 0;
};

// What the head of an arena has room for. It only grows, and all ranks of a group have the same.
struct HeadCapacity {
  int32_t ranks;
  int32_t local_experts;
  int64_t row_tiles;
  int64_t slots;  // of one rank

  JAXMOE_ANY constexpr bool holds(const HeadCapacity& other) const {
    return ranks == other.ranks && local_experts >= other.local_experts && row_tiles >= other.row_tiles &&
           slots >= other.slots;
  }
};

JAXMOE_ANY constexpr HeadCapacity needed_head(const Shape& shape, const Schedule& schedule) {
  return {shape.ranks, shape.local_experts(), max_row_tiles(shape, schedule.tile), shape.slots()};
}

// Launch state of a rank; written by that rank's kernel alone.
struct Control {
  uint32_t launch_number;  // of the last launch that ended
  uint32_t workers_left;  // thread blocks that have left the running launch; the last one sets it to zero
  uint32_t tasks_taken[2];  // number of the next task, by parity of the launch like the banks of counters
  uint32_t given_up;      // not zero once a wait took too long: the arena is not used again
  // Of the running launch; the last thread block to leave sets them to zero (cuda/kernel/crew.cuh).
  uint32_t workers_started;
  uint32_t crew;         // workers among which the work is dealt; 0: not known yet
  uint32_t tasks_ended;  // 1: every task has been taken
};

struct ArenaLayout {
  // Head. [..] is the logical shape; "writer -> reader".
  Region control;       // Control                                              this rank
  Region flags;         // [from kInputsReady on][ranks] cache lines        peers -> dispatch, tasks, combine
  Region counters;      // [2 banks][kSignalsOfRank + kSignalsPerTile * row_tiles] uint32  this rank, see protocol.h
  Region rows_from;     // [2 banks][ranks][local_experts] int32, sums up to    peers' sort -> walks of this rank,
                        //   and with each local expert                         dispatch
  Region source_slots;  // [ranks][slots] int32, sorted by local expert         peers' sort -> dispatch
                        //   of an exchange the place of each slot in that order, -1 of those of other ranks
  int64_t head_bytes;

  // Body, what peers reach. The order is the guarantee that a rank finds a peer's regions where its own lie: they come
  // first, and no length in them depends on what a rank may have for itself, such as the number of its multiprocessors.
  // `parts` is one, in a backward pass two: a token, and behind it the gradient of its output.
  Region tokens;          // [tokens, parts, hidden]            publish -> peers' dispatch; empty where x is read
  Region answers;         // [answer_rows, hidden]              peers' down, token_gradient -> combine; empty without.
                          //   Of a rank's slots; where sums are made at experts further rows lie behind those, see
                          //   waiting_answer() and sum_row()
  Region summed_slots;    // [ranks, tokens] uint32, a bit for each slot that is in the sum of that rank
                          //                                    peers' combine -> combine; empty without such sums
  // Of a backward pass or an exchange, and where sums are made at experts; else empty. Numbers are as wide as sums are:
  // float32, or float64 where tokens are.
  Region routing_weights; // [slots] number                     publish -> peers' dispatch
  // Of a backward pass or an exchange.
  Region routing_weight_gradients;  // [slots] number             peers' token_gradient, dispatch -> combine
  Region slot_rows;       // [slots] int32, of an exchange           peers' dispatch -> its end; else empty

  // Body, what this rank alone reaches.
  Region histograms;    // [most sorters, num_experts] int32          sort -> sort
  Region kept_tokens;   // [ranks - 1, tokens, parts, hidden]          dispatch -> dispatch; empty unless kept
  Region kept_states;   // [ranks - 1, tokens] uint32 (KeptState)      publish, dispatch -> dispatch; the same
  // Of the slots of all ranks, where sums are made here; else empty.
  Region answer_places;   // [ranks, slots] int32 (AnswerPlace)           publish, dispatch -> combine
  Region answer_weights;  // [ranks, slots] number, routing weights       dispatch -> combine
  Region wanted_experts;  // [ranks, tokens] uint32: those of this rank that the token wants are numbered below it
                          //                                            publish, walk -> combine, on a GPU
  Region row_targets;   // [ring_tiles, tile rows] int32 (RowTarget)   dispatch -> down, token_gradient; of a first half
                        //   the row of the caller's array, for gate_up
  Region rows;          // [ring_tiles, tile rows, parts, hidden]      dispatch -> gate_up, gradients
  Region h;             // [ring_tiles, tile rows, intermediate]       gate_up -> down; see below
  // Of a backward pass; empty in a forward one. There `h` holds h times the routing weight of its row, from
  // h_gradient to down_gradient; where there are no weight gradients it is empty.
  Region row_routing_weights;  // [ring_tiles, tile rows] number       dispatch -> h_gradient
  Region row_products;    // [ring_tiles, tile rows, gradient tiles]   h_gradient -> token_gradient
                          //   number: h times its gradient, summed over the columns of one task
  Region projections;     // [ring_tiles, tile rows, projections * intermediate]  gate_up -> h_gradient, which
                          //   writes their gradients over them -> token_gradient, gate_gradient, up_gradient
  Region weight_sums;     // [sums_of_an_expert] number                weight gradients -> those of the next segment;
                          //   empty where no expert can have two
  // [projections + 1][weight_slots, columns, rows] in the type of what is multiplied: gate, up, down, each matrix the
  // other way round than wide ones, as those in 8 bits lie.  dispatch -> gate_up, down, gradients; empty where nothing
  // is decoded
  Region decoded_weights;
  // [projections + 1][local_experts, blocks, blocks] float32, of kDecodedBlocks. dispatch -> gate_up, down; empty where
  // nothing is decoded to 8 bits. Not a ring: so small that every expert has a place of its own.
  Region decoded_scales;
  int64_t bytes;  // the same on all ranks as well, which therefore all need a larger arena at the same time
  int64_t answer_rows;  // of `answers`
};

// Sorters sort about this many slots each. One sorter sorts a decode batch without any wait.
inline constexpr int32_t kSlotsPerSorter = 1024;
// There is room for as many sorters as the slots want, up to this many, whether or not a rank has so many workers.
inline constexpr int32_t kMostSorters = 128;

JAXMOE_ANY constexpr int32_t most_sorters(const Shape& shape) {
  const int32_t wanted = ceil_div(shape.slots(), kSlotsPerSorter);
  return wanted < 1 ? 1 : at_most(wanted, kMostSorters);
}
JAXMOE_ANY constexpr int32_t num_sorters(const Shape& shape, int32_t workers) {
  return at_most(most_sorters(shape), workers);
}
JAXMOE_ANY constexpr int32_t num_sorters(const Shape& shape, const Schedule& schedule) {
  return num_sorters(shape, schedule.workers);
}

JAXMOE_ANY constexpr int64_t counter_words(const HeadCapacity& head) {
  return kSignalsOfRank + kSignalsPerTile * head.row_tiles;
}

// Where sums are made at experts, the rows of `answers` behind those of this rank's slots: first the answers of its
// experts that wait here to be added up, then the sums that each rank has made for this rank's tokens.
JAXMOE_ANY constexpr int64_t waiting_answer(const Shape& shape, const Schedule& schedule, int32_t row_tile,
                                            int32_t tile_row) {
  return shape.slots() + int64_t{row_tile} * schedule.tile.rows + tile_row;
}
JAXMOE_ANY constexpr int64_t sum_row(const Shape& shape, const Schedule& schedule, int32_t rank, int32_t token) {
  return waiting_answer(shape, schedule, schedule.summed_tiles, 0) + int64_t{rank} * shape.tokens + token;
}
JAXMOE_ANY constexpr int64_t rows_of_answers(const Shape& shape, const Schedule& schedule) {
  return schedule.sums_at_experts() ? sum_row(shape, schedule, shape.ranks, 0) : shape.slots();
}

// Arrays of hidden numbers that make up a row of tokens, and of the ring.
JAXMOE_ANY constexpr int32_t row_parts(const Schedule& schedule) { return schedule.backward() ? 2 : 1; }
// Whether tokens are copied to where peers reach them: also those that are rounded on the way, and so have scales.
JAXMOE_ANY constexpr bool publishes_tokens(const Shape& shape, const Schedule& schedule, bool scaled) {
  return shape.ranks > 1 || schedule.backward() || scaled;
}

// Scales of rows of tokens, or of h. Those of published and kept tokens are as the elements: row by row, one for each
// kScaleColumns columns. Those of a ring are in the order in which products take them: of `group` rows the first
// columns', then the next ones'. A group are the rows that one block of threads multiplies.
JAXMOE_ANY constexpr int64_t ring_scale(int32_t group, int64_t ring_row, int32_t blocks, int32_t block) {
  return (ring_row / group * blocks + block) * group + ring_row % group;
}
// Byte offset of the scales of a region, which lie behind the elements of its rows, and how many a row has.
JAXMOE_ANY constexpr int64_t scales_of(const Region& region, int64_t rows, int32_t columns) {
  return region.offset + rows * columns;  // one byte each
}
JAXMOE_ANY constexpr int32_t scale_blocks(int32_t columns) { return ceil_div(columns, kScaleColumns); }

// Numbers of all weight gradients of one expert, one array after the other: w_gate, w_up, w_down, b_gate, b_up, b_down.
JAXMOE_ANY constexpr int64_t sums_of_an_expert(const Shape& shape) {
  return (shape.projections + 1) * int64_t{shape.hidden} * shape.intermediate +
         shape.projections * int64_t{shape.intermediate} + shape.hidden;
}
JAXMOE_ANY constexpr bool experts_have_one_segment(const Shape& shape, const Schedule& schedule) {
  return !schedule.has_weight_gradients() || shape.max_rows() <= int64_t{schedule.segment_tiles} * schedule.tile.rows;
}

// Of one matrix of all experts that the ring of decoded weights holds.
constexpr int64_t decoded_bytes(const Shape& shape, const Schedule& schedule, const Formats& formats) {
  return Format{formats.tokens.element}.bytes(int64_t{schedule.weight_slots} * shape.hidden, shape.intermediate);
}

// The scales of one matrix of an expert where it is decoded to 8 bits, and where those of number `which` begin.
JAXMOE_ANY constexpr int64_t decoded_blocks(const Shape& shape) {
  return int64_t{scale_blocks(shape.hidden)} * scale_blocks(shape.intermediate);
}
JAXMOE_ANY constexpr int64_t first_decoded_scale(const Shape& shape, int32_t which, int32_t expert) {
  return (int64_t{which} * shape.local_experts() + expert) * decoded_blocks(shape);
}

constexpr ArenaLayout layout_of(const Shape& shape, const Schedule& schedule, const Formats& formats,
                                const HeadCapacity& head) {
  Packer pack;
  ArenaLayout l{};
  l.control = pack.take(sizeof(Control));
  l.flags = pack.take(kSignalsFromPeers * head.ranks * kFlagBytes);
  l.counters = pack.take(2 * counter_words(head) * int64_t{sizeof(uint32_t)});
  l.rows_from = pack.take(2 * int64_t{head.ranks} * head.local_experts * int64_t{sizeof(int32_t)});
  l.source_slots = pack.take(head.ranks * head.slots * int64_t{sizeof(int32_t)});
  l.head_bytes = pack.bytes();

  const int64_t ring_rows = int64_t{schedule.ring_tiles} * schedule.tile.rows;
  const int64_t parts = row_parts(schedule);
  const int64_t backward = schedule.backward() ? 1 : 0;
  const auto tokens = [&](int64_t rows) { return formats.tokens.bytes(rows * parts, shape.hidden); };
  const int64_t exchanges = schedule.exchanges() ? 1 : 0;
  const auto sums = [&](int64_t count) { return formats.sums.bytes(backward, count); };
  // What a half has in the caller's array, or does not have, is not here.
  const bool first_half = schedule.is_first_half();
  const int64_t of_slots = formats.sums.bytes(backward + exchanges, shape.slots());
  const int64_t summed = schedule.sums_at_experts() ? 1 : 0;
  const int64_t summed_slots = summed * shape.ranks * shape.slots(), summed_tokens = summed * shape.ranks * shape.tokens;
  l.tokens = pack.take(publishes_tokens(shape, schedule, formats.tokens.is_scaled()) ? tokens(shape.tokens) : 0);
  l.answer_rows = rows_of_answers(shape, schedule);
  l.answers = pack.take(first_half ? 0 : formats.answers.bytes(l.answer_rows, shape.hidden));
  l.summed_slots = pack.take(summed_tokens * int64_t{sizeof(uint32_t)});
  l.routing_weights = pack.take(of_slots + formats.sums.bytes(summed, shape.slots()));
  l.routing_weight_gradients = pack.take(of_slots);
  l.slot_rows = pack.take((first_half ? 1 : exchanges) * shape.slots() * int64_t{sizeof(int32_t)});

  l.histograms = pack.take(int64_t{most_sorters(shape)} * shape.num_experts * int64_t{sizeof(int32_t)});
  const int64_t kept = schedule.keep_tokens ? int64_t{shape.ranks - 1} * shape.tokens : 0;
  l.kept_tokens = pack.take(tokens(kept));
  l.kept_states = pack.take(kept * int64_t{sizeof(uint32_t)});
  l.answer_places = pack.take(summed_slots * int64_t{sizeof(int32_t)});
  l.answer_weights = pack.take(formats.sums.bytes(summed_slots, 1));
  l.wanted_experts = pack.take(summed_tokens * int64_t{sizeof(uint32_t)});
  l.row_targets = pack.take(ring_rows * int64_t{sizeof(int32_t)});
  l.rows = pack.take(tokens(ring_rows));
  const bool keeps_h = !first_half && (!schedule.backward() || schedule.has_weight_gradients());
  l.h = pack.take(keeps_h ? formats.h.bytes(ring_rows, shape.intermediate) : 0);
  l.row_routing_weights = pack.take(sums(ring_rows));
  l.row_products = pack.take(sums(ring_rows * gradient_tiles(shape, schedule.tile)));
  l.projections = pack.take(formats.h.bytes(backward * ring_rows * shape.projections, shape.intermediate));
  l.weight_sums = pack.take(experts_have_one_segment(shape, schedule) ? 0 : sums(sums_of_an_expert(shape)));
  l.decoded_weights = pack.take((shape.projections + 1) * decoded_bytes(shape, schedule, formats));
  const bool in_blocks = schedule.decodes() && formats.tokens.is_scaled();
  const int64_t scales = in_blocks ? first_decoded_scale(shape, shape.projections + 1, 0) : 0;
  l.decoded_scales = pack.take(scales * int64_t{sizeof(float)});
  l.bytes = pack.bytes();
  return l;
}

// A hash (FNV-1a of 64 bits, byte by byte) of all that the ranks of a group must have the same for a launch. Each takes
// the addresses in its peers' arenas from a layout of its own; comparing this number shows that they agree. Left out is
// what a rank may have for itself: its workers, and the dispatchers that they come with.
class Agreement {
 public:
  template <class... Integers>
  constexpr void add(Integers... values) {
    (add_one(static_cast<uint64_t>(values)), ...);
  }
  constexpr uint64_t hash() const { return hash_; }

 private:
  constexpr void add_one(uint64_t value) {
    for (int byte = 0; byte < 8; ++byte) {
      hash_ = (hash_ ^ (value >> 8 * byte & 0xff)) * 0x100000001b3;
    }
  }
  uint64_t hash_ = 0xcbf29ce484222325;
};

constexpr uint64_t agreement_of(const Shape& shape, Schedule schedule, const Formats& formats,
                                const HeadCapacity& head) {
  schedule.workers = schedule.dispatchers = 0;
  Agreement all;
  for (const int32_t number : numbers_of(shape)) all.add(number);
  for (const int32_t number : numbers_of(schedule)) all.add(number);
  for (const int32_t number : numbers_of(formats)) all.add(number);
  all.add(head.ranks, head.local_experts, head.row_tiles, head.slots);
  // These follow from the numbers above in one build of this file; ranks could run two.
  const ArenaLayout l = layout_of(shape, schedule, formats, head);
  for (const Region& region : {l.control, l.flags, l.counters, l.rows_from, l.source_slots, l.tokens, l.answers, l.summed_slots,
                               l.routing_weights, l.routing_weight_gradients, l.slot_rows}) {
    all.add(region.offset, region.bytes);
  }
  all.add(l.head_bytes, l.bytes);
  return all.hash();
}

// Byte offset of a signal's word in the arena where it is waited for. Banks of counters change with every launch.
JAXMOE_ANY constexpr int64_t word_of(const ArenaLayout& layout, const HeadCapacity& head, uint32_t launch_number,
                                     Signal signal, int32_t index) {
  const int32_t kind = static_cast<int32_t>(signal);
  if (is_from_peers(signal)) {
    return layout.flags.offset +
           ((kind - static_cast<int32_t>(Signal::kInputsReady)) * head.ranks + index) * kFlagBytes;
  }
  const int64_t in_bank = is_per_tile(signal)
                              ? kSignalsOfRank + (kind - static_cast<int32_t>(Signal::kRowsArrived)) * head.row_tiles + index
                              : kind;
  return layout.counters.offset + ((launch_number & 1) * counter_words(head) + in_bank) * int64_t{sizeof(uint32_t)};
}

// Byte offset of what `source` wrote for this rank's experts: how many of its slots name an expert up to and with each.
// So the slots of one expert lie in the source's list from the number before it to its own.
JAXMOE_ANY constexpr int64_t rows_from_source(const ArenaLayout& layout, const HeadCapacity& head,
                                              uint32_t launch_number, int32_t source) {
  return layout.rows_from.offset +
         ((launch_number & 1) * head.ranks + source) * int64_t{head.local_experts} * int64_t{sizeof(int32_t)};
}

// Byte offset of the slot list, or of the places, that `source` wrote for this rank's experts.
JAXMOE_ANY constexpr int64_t slots_from_source(const ArenaLayout& layout, const HeadCapacity& head, int32_t source) {
  return layout.source_slots.offset + source * head.slots * int64_t{sizeof(int32_t)};
}

// What is known of a peer's token at this rank. A token that several local experts want crosses the wire once where the
// first pull is over before the next one begins; a pull never waits for another one. So which rows are copied from the
// kept token depends on timing, and what they hold does not.
//
//   absent -> coming   by the dispatcher that will keep it (compare and swap)
//   coming -> kept     by the same one, once the token lies in kept_tokens (release); who sees it may read (acquire)
enum class KeptState : uint32_t { kAbsent = 0, kComing, kKept };

// Number of a peer's token in kept_tokens and kept_states of `rank`.
JAXMOE_ANY constexpr int64_t kept_index(const Shape& shape, int32_t rank, int32_t source, int32_t token) {
  return int64_t{(source - rank + shape.ranks) % shape.ranks - 1} * shape.tokens + token;
}

// Where the answer of this rank to a slot is, as combine finds it: in that row of `answers` here, or one of these.
struct AnswerPlace {
  static constexpr int32_t kNone = -1;     // the slot names no expert of this rank
  static constexpr int32_t kTravels = -2;  // at the owner of the slot, in a row of its own
};

// Where the answer to a row goes: row `slot` of the answers of rank `source`. Of one that waits here to be added up that
// is a row behind those of slots, of this rank.
struct RowTarget {
  uint32_t packed;

  static constexpr int32_t kSlotBits = 24;
  static constexpr uint32_t kNone = ~0u;  // of a row of zeros
  JAXMOE_ANY static constexpr RowTarget of(int32_t source, int32_t slot) {
    return {static_cast<uint32_t>(source) << kSlotBits | static_cast<uint32_t>(slot)};
  }
  JAXMOE_ANY constexpr int32_t source() const { return static_cast<int32_t>(packed >> kSlotBits); }
  JAXMOE_ANY constexpr int32_t slot() const { return static_cast<int32_t>(packed & ((1u << kSlotBits) - 1)); }
};
inline constexpr int32_t kMaxSlots = 1 << RowTarget::kSlotBits;
inline constexpr int32_t kMaxRanks = 1 << (32 - RowTarget::kSlotBits);

// Most experts of a rank: a GPU keeps their row counts in shared memory, all of which is taken.
inline constexpr int32_t kMaxLocalExperts = 512;
// As many where it holds more beside rows in 8 bits: what decoding to 8 bits takes, or a recording.
inline constexpr int32_t kMaxLocalExpertsAhead = 448;
// Most experts of a group: a sorter counts them where the stages of the GEMMs will be, which leave room for more.
inline constexpr int32_t kMaxExperts = 4096;

}  // namespace jaxmoe
