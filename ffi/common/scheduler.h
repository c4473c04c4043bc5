// The order of the GEMMs of one rank, as integers: which worker computes which tile when. Forward and backward passes
// share it. Every role of the kernel, every thread of the host executor and the property tests in
// tests/unit/test_schedule.py walk this same stream. Nothing here waits or touches memory other than the row counts it
// is given. What brings the rows is in chunks.h.
//
// The rows of a local expert are cut into row tiles, numbered over all experts; up to `unit_tiles` of one expert form a
// unit. The stream of units u0, u1, ... with a lag of two:
//
//   gate_up(u0)  gate_up(u1)  gate_up(u2) down(u0)  gate_up(u3) down(u1)  ...  down(last - 1)  down(last)
//
// The lag keeps the pull of rows, which feeds gate_up, ahead of the push of results, which follows down: both use the
// same NVLink. Within a unit the row tile varies fastest, so that workers side by side share a tile of weights. A
// worker that is free takes the next task of the stream.
//
// The last tile of an expert may have few rows. Where two thread blocks share a task, each taking half of the rows, the
// second one would have none: such a narrow tile is computed two column tiles at a time instead, one for each block. In
// every pair of columns it comes after the wide tiles, whose weights it uses. Where many workers would then have no down
// task (share_columns), its answers are computed one column tile at a time, half by each block; so is the last column tile
// of an odd number.
//
// Of a last tile with a few rows more than that the second block would have these few alone, and wait for the first one
// in every task. So where products take longer than loads the two tasks of a pair of columns exchange what they have
// (kRowHalves): both blocks take the upper rows in the first task and the lower ones in the second, each with a column
// tile of its own. block_part.h has what a block computes of each kind of task.
//
// A backward pass has more GEMMs, each `lag_units` units after the one whose results it reads:
//
//   gate_up(u2) h_gradient(u1) token_gradient(u0)  gate_up(u3) h_gradient(u2) token_gradient(u1)  ...
//
// (units whose gate and up the forward pass has saved have no gate_up) and, where a unit ends a segment of its expert
// (at most `segment_tiles` row tiles), the weight gradients of that segment after the unit's token_gradient:
// gate_gradient, up_gradient, down_gradient. Their tiles are tiles of a weight matrix, and their sums go over the rows
// of the segment, which therefore stay in the rings until then. Experts of several segments add up their weight
// gradients from one to the next (Task::part).
//
// Weights that are decoded (weight_slots) stand in front of the rows of their expert. Their slot is that of the expert
// weight_slots before it, all of whose tasks come before the first one of this expert, since there are at least
// min_weight_slots().
//
// Deadlock freedom: whatever an item waits for stands before it in the stream (protocol.h, wait_before), and every
// worker and dispatcher takes its items in stream order, so the first unfinished item can always go on. Which worker
// takes which task depends on timing; no bit of the result does.
#pragma once

#include <cstdint>

#include "common/shape.h"
#include "common/units.h"

namespace jaxmoe {

// The passes of a layer; the two that only bring rows to experts and answers back (common/exchange.h); and those with
// one product each, that of a dispatch is gate_up and that of a combine is down.
enum class Pass : int32_t { kForward = 0, kBackward, kDispatch, kCombine, kDispatchMatmul, kMatmulCombine };

enum class Gemm : int32_t {
  kGateUp = 0,      // tokens x (w_gate, w_up); a backward pass computes them again
  kDown,            // h x w_down
  kHGradient,  // gradients of outputs x transposed w_down; then those of gate and up
  kTokenGradient,   // gradients of gate and up x transposed (w_gate, w_up)
  kGateGradient,    // of w_gate: transposed tokens x gradients of gate
  kUpGradient,      // of w_up
  kDownGradient,    // of w_down: transposed h x gradients of outputs
  kCount
};
inline constexpr const char* kGemmNames[static_cast<int32_t>(Gemm::kCount)] = {
    "gate_up", "down", "h_gradient", "token_gradient", "gate_gradient", "up_gradient", "down_gradient"};

JAXMOE_ANY constexpr bool is_weight_gradient(Gemm gemm) { return gemm >= Gemm::kGateGradient; }

// One output tile: `tile.rows` rows of one expert times one tile of columns. Of a weight gradient, `tile.rows` rows of
// the weight matrix, and what is said of the row tile below holds for the first one of the segment.
struct Task {
  Gemm gemm;
  int32_t expert;       // local
  int32_t row_tile;     // over all local experts
  int32_t ring_slot;    // where the tile's rows lie in the rings; without one what the caller of the walk puts here
  int32_t rows;         // 1 .. tile.rows; of a weight gradient all rows of the segment
  int32_t column_tile;  // of the result
  // From that one on: 1, or 2 of a narrow tile (1 where it is the last of an odd number, or blocks share its columns).
  int32_t column_tiles;
  int32_t weight_row_tile;  // of the matrix; of weight gradients alone
  int32_t part;         // of a weight gradient kFirstPart | kLastPart (units.h), of others any of those below
  // Of weight gradients alone: the row tile that stands for the segment whose sums lie where this one's will; none: -1.
  int32_t sums_tile;
};

// Other parts than those of segments (units.h). Of a h_gradient: gate and up of its tile are those that the forward
// pass has saved.
inline constexpr int32_t kSavedPart = 4;
// Of a block in a down task: its half of the columns of a narrow tile's only column tile.
inline constexpr int32_t kSharedColumns = 8;
// Beside these: one of the two tasks of a pair of columns whose blocks may exchange halves of the rows for columns.
inline constexpr int32_t kRowHalves = 16;
// Of a block: the others multiply the same rows with other columns.
inline constexpr int32_t kOwnColumns = 32;
// Of a block, beside that: so few rows that its steps come two to a stage (cuda/kernel/gemm/deep_stages.cuh).
inline constexpr int32_t kDeepSteps = 64;

// The tasks of a rank, numbered in stream order. The arguments have to outlive the walk; `kPass` is that of the
// schedule. kPassesUnits: whether there is code that passes experts of one unit faster; the tasks are the same.
template <Pass kPass, bool kPassesUnits = true>
class TaskWalk {
 public:
  // `narrow`: of the same rows; none where that is not known.
  JAXMOE_ANY TaskWalk(const Shape& shape, const Schedule& schedule, const int32_t* rows_per_expert,
                      const NarrowExperts& narrow = {})
      : shape_(shape), schedule_(schedule), rows_per_expert_(rows_per_expert), narrow_experts_(narrow),
        first_(schedule, rows_per_expert, shape.local_experts()),
        middle_(schedule, rows_per_expert, shape.local_experts()),
        last_(schedule, rows_per_expert, shape.local_experts()),
        gate_up_columns_(h_tiles(shape, schedule.tile)),
        down_columns_(answer_tiles(shape, schedule.tile)) {}

  // The task with that number; false after the last. The numbers asked of one walk must not fall.
  JAXMOE_ANY bool seek(int32_t number, Task& task) {
    if (kPass == Pass::kForward && narrow_experts_.count() > 0) return take_of_narrow(number, task);
    while (number - earlier_tasks_ >= section_tasks_) {
      if (pass_experts_of_one_unit(number)) continue;
      earlier_tasks_ += section_tasks_;
      if (!next_section()) return false;
    }
    const int32_t position = number - earlier_tasks_;
    if (kPass == Pass::kBackward && is_weight_gradient(gemm_)) {
      take_weight_gradient(position, task);
    } else {
      take_tile(position, task);
    }
    return true;
  }

  // Whose decoded weights the task multiplies that came last; not one of weight gradients.
  JAXMOE_ANY DecodedExpert weights() const {
    return {unit_.expert, unit_.nth, unit_.first_tile - unit_.tile_of_expert,
            row_tiles_of(unit_.rows_of_expert, schedule_.tile)};
  }

 private:
  static constexpr bool kIsHalf = kPass == Pass::kDispatchMatmul || kPass == Pass::kMatmulCombine;
  static constexpr Gemm kFirstGemm = kPass == Pass::kMatmulCombine ? Gemm::kDown : Gemm::kGateUp;
  // Weight gradients are those of a segment.
  static constexpr int32_t kGemmsOfUnit = kIsHalf ? 1 : kPass == Pass::kForward ? 2 : 3;

  // Columns go in pairs: in each, the wide tiles of the first column, those of the second, and the narrow tile. Units of
  // one tile, which short launches have most of, need no division.
  JAXMOE_ANY void take_tile(int32_t position, Task& task) const {
    const int32_t wide = unit_.tiles - narrow_;
    const bool one = unit_.tiles == 1;
    const int32_t of_pair = one ? 2 - narrow_ : 2 * wide + narrow_;
    const int32_t pair = one ? position >> (1 - narrow_) : small_quotient(position, of_pair);
    const int32_t in_pair = position - pair * of_pair;
    const int32_t columns = at_most(columns_ - 2 * pair, 2);
    const bool is_narrow = in_pair >= wide * columns;
    const int32_t column = in_pair >= wide ? 1 : 0;  // of a wide tile
    const int32_t tile = is_narrow ? wide : in_pair - column * wide;
    const int32_t row_tile = unit_.first_tile + tile;
    const int32_t rows = unit_.rows_of_tile(tile, schedule_.tile.rows);
    const int32_t saved = gemm_ == Gemm::kHGradient && is_saved(unit_) ? kSavedPart : 0;
    task = {gemm_,
            unit_.expert,
            row_tile,
            kPass == Pass::kMatmulCombine ? 0 : slot_in_ring(row_tile),
            rows,
            2 * pair + (is_narrow ? 0 : column),
            is_narrow ? columns : 1,
            -1,
            saved | (columns == 2 && schedule_.has_row_halves(rows) ? kRowHalves : 0),
            -1};
  }

  JAXMOE_ANY int32_t slot_in_ring(int32_t row_tile) const {
    return row_tile - small_quotient(row_tile, schedule_.ring_tiles) * schedule_.ring_tiles;
  }

  // The rows of the matrix vary fastest: tasks side by side share the columns of one factor.
  JAXMOE_ANY void take_weight_gradient(int32_t position, Task& task) const {
    const Segment& segment = last_.segment();
    const int32_t of_projection = weight_tiles(shape_.hidden, shape_.intermediate, schedule_.tile);
    const int32_t matrix = at_most(small_quotient(position, of_projection), shape_.projections);
    const bool is_down = matrix == shape_.projections;
    const int32_t in_matrix = position - matrix * of_projection;
    const int32_t row_tiles = tiles_over(is_down ? shape_.intermediate : shape_.hidden, schedule_.tile.rows);
    const int32_t column_tile = small_quotient(in_matrix, row_tiles);
    task = {is_down ? Gemm::kDownGradient : matrix == 0 ? Gemm::kGateGradient : Gemm::kUpGradient,
            segment.expert,
            segment.first_tile,
            slot_in_ring(segment.first_tile),
            at_most(segment.rows_of_expert - segment.tile_of_expert * schedule_.tile.rows,
                    segment.tiles * schedule_.tile.rows),
            column_tile,
            1,
            in_matrix - column_tile * row_tiles,
            segment.part,
            segment.sums_tile};
  }

  // A section is one GEMM of one unit, or the weight gradients of one segment. Moves to the next one; false after the
  // last.
  JAXMOE_ANY bool next_section() {
    section_tasks_ = 0;
    if (kPass == Pass::kBackward && schedule_.has_weight_gradients() && nth_gemm_ == kGemmsOfUnit - 1 &&
        !is_weight_gradient(gemm_) && has_unit_ && last_.segment_ends()) {
      gemm_ = Gemm::kGateGradient;
      section_tasks_ = weight_tasks(shape_, schedule_.tile);
      return true;
    }
    if (++nth_gemm_ == kGemmsOfUnit) {  // also before the first section
      nth_gemm_ = 0;
      ++step_;
    }
    gemm_ = gemm_of_unit();
    has_unit_ = step_ >= nth_gemm_ * schedule_.lag_units && next_unit();
    if (has_unit_) begin_section();
    // After the last unit the later GEMMs still have some; before their first, they have none yet.
    return has_unit_ || nth_gemm_ < kGemmsOfUnit - 1 || step_ < nth_gemm_ * schedule_.lag_units;
  }

  // The task of a forward pass with that number, where every expert with rows has one narrow tile: then units are
  // experts, and each has as many tasks as the next. Walking, even by the short cut below, may take as long as a task.
  JAXMOE_ANY bool take_of_narrow(int32_t number, Task& task) {
    const int32_t units = narrow_experts_.count(), lag = at_most(schedule_.lag_units, units);
    const int32_t up = tasks_of_expert(Gemm::kGateUp, 1), down = tasks_of_expert(Gemm::kDown, 1);
    // First `lag` units of gate_up alone, then one of each in turn, then `lag` units of down alone.
    const int32_t in_turn = number - lag * up, last = in_turn - (units - lag) * (up + down);
    int32_t unit, position;
    if (in_turn < 0) {
      gemm_ = Gemm::kGateUp;
      unit = number / up;
      position = number - unit * up;
    } else if (last < 0) {
      unit = in_turn / (up + down);
      position = in_turn - unit * (up + down);
      gemm_ = position < up ? Gemm::kGateUp : Gemm::kDown;
      if (position < up) {
        unit += lag;
      } else {
        position -= up;
      }
    } else {
      gemm_ = Gemm::kDown;
      const int32_t of_last = last / down;
      unit = units - lag + of_last;
      if (unit >= units) return false;
      position = last - of_last * down;
    }
    const int32_t expert = narrow_experts_.expert(unit);
    unit_ = {expert, unit, 1, 0, rows_per_expert_[expert], unit};
    begin_section();
    take_tile(position, task);
    return true;
  }

  // A short cut past experts that are a unit each, as nearly all are that have few rows. A worker passes several sections
  // between two of its tasks, with no stage loaded meanwhile, and one by one they took longer than all else that it does
  // there. Passes this section and the others up to the same one of the next unit, as often as the number is further on.
  // Returns whether it passed any. A half of a layer has one section to a unit, and none between.
  JAXMOE_ANY bool pass_experts_of_one_unit(int32_t number) {
    if (!kPassesUnits || kIsHalf || !has_unit_ || step_ < (kGemmsOfUnit - 1) * schedule_.lag_units) return false;
    if constexpr (kPass == Pass::kBackward) {
      return pass_backward(number);
    } else {
      return gemm_ == Gemm::kDown ? pass_forward<Gemm::kDown, Gemm::kGateUp>(number, last_, first_)
                                  : pass_forward<Gemm::kGateUp, Gemm::kDown>(number, first_, last_);
    }
  }
  // The walks of the section's GEMM and of the other one. Where experts are many this loop is nearly all of the way to a task.
  template <Gemm kOwn, Gemm kOther>
  JAXMOE_ANY bool pass_forward(int32_t number, UnitWalk& own, UnitWalk& other) {
    bool passed_any = false;
    for (;;) {
      const int32_t rows = own.rows_of_one_unit(), between = other.rows_of_one_unit();
      if (rows == 0 || between == 0) break;
      const int32_t passed = section_tasks_ + tasks_of_expert(kOther, between);
      if (number - earlier_tasks_ < passed) break;
      earlier_tasks_ += passed;
      own.pass_one_unit(rows);
      other.pass_one_unit(between);
      ++step_;
      section_tasks_ = tasks_of_expert(kOwn, rows);
      passed_any = true;
    }
    if (!passed_any) return false;
    unit_ = own.last_expert();
    begin_section();
    return true;
  }
  JAXMOE_ANY bool pass_backward(int32_t number) {
    const bool at_weights = is_weight_gradient(gemm_), at_first = gemm_ == Gemm::kGateUp,
               at_middle = gemm_ == Gemm::kHGradient;
    const int32_t of_weights = schedule_.has_weight_gradients() ? weight_tasks(shape_, schedule_.tile) : 0;
    bool passed_any = false;
    for (;;) {
      // The next unit of each walk: what is left of this step, and what comes before the section in the next one.
      const int32_t first_rows = first_.rows_of_one_unit(), middle_rows = middle_.rows_of_one_unit(),
                    last_rows = last_.rows_of_one_unit();
      if (first_rows == 0 || middle_rows == 0 || last_rows == 0) break;
      const bool saved = first_.ends_within(first_rows, schedule_.saved_tiles);
      const int32_t first = saved ? 0 : tasks_of_expert(Gemm::kGateUp, first_rows),
                    middle = tasks_of_expert(Gemm::kHGradient, middle_rows),
                    last = tasks_of_expert(Gemm::kTokenGradient, last_rows);
      const int32_t same = at_weights ? of_weights : at_first ? first : at_middle ? middle : last;
      const int32_t passed = section_tasks_ + first + middle + last + of_weights - same;
      if (number - earlier_tasks_ < passed) break;
      earlier_tasks_ += passed;
      first_.pass_one_unit(first_rows);
      middle_.pass_one_unit(middle_rows);
      last_.pass_one_unit(last_rows);
      ++step_;
      section_tasks_ = same;
      passed_any = true;
    }
    if (!passed_any) return false;
    last_.end_segment();
    if (at_weights) return true;
    unit_ = at_first ? first_.last_expert() : at_middle ? middle_.last_expert() : last_.last_expert();
    begin_section();
    return true;
  }

  JAXMOE_ANY Gemm gemm_of_unit() const {
    if (nth_gemm_ == 0) return kFirstGemm;
    if (kPass == Pass::kForward) return Gemm::kDown;
    return nth_gemm_ == 1 ? Gemm::kHGradient : Gemm::kTokenGradient;
  }

  JAXMOE_ANY bool next_unit() {
    if (nth_gemm_ == 0) return first_.next(unit_);
    if (kPass == Pass::kBackward && nth_gemm_ == 1) return middle_.next(unit_);
    return last_.next(unit_);
  }

  // What a unit saved is not computed again, and what is not saved whole is.
  JAXMOE_ANY bool is_saved(const Unit& unit) const {
    return kPass == Pass::kBackward && unit.first_tile + unit.tiles <= schedule_.saved_tiles;
  }

  JAXMOE_ANY void begin_section() {
    if (gemm_ == Gemm::kGateUp && is_saved(unit_)) return;  // an empty section
    columns_ = columns_of(gemm_);
    // Counted to the end of the expert: a unit that others of its expert follow has no narrow tile.
    const int32_t rows_left = unit_.rows_of_expert - (unit_.tile_of_expert + unit_.tiles - 1) * schedule_.tile.rows;
    narrow_ = is_narrow(gemm_, rows_left) ? 1 : 0;
    section_tasks_ = tasks_of(unit_.tiles, narrow_ != 0, columns_);
  }

  // Of so many tiles, of which one or none is computed two column tiles at a time.
  JAXMOE_ANY static constexpr int32_t tasks_of(int32_t tiles, bool narrow, int32_t columns) {
    return tiles * columns - (narrow ? columns >> 1 : 0);
  }

  // Whether a last tile of so many rows is computed two column tiles at a time.
  JAXMOE_ANY bool is_narrow(Gemm gemm, int32_t rows) const {
    const bool in_pairs = kPass != Pass::kForward || gemm == Gemm::kGateUp || schedule_.share_columns == 0;
    return in_pairs && rows <= schedule_.narrow_rows;
  }
  JAXMOE_ANY int32_t columns_of(Gemm gemm) const {
    if (kPass == Pass::kForward) return gemm == Gemm::kGateUp ? gate_up_columns_ : down_columns_;
    return gemm == Gemm::kGateUp      ? h_tiles(shape_, schedule_.tile)
           : gemm == Gemm::kHGradient ? gradient_tiles(shape_, schedule_.tile)
                                      : answer_tiles(shape_, schedule_.tile);
  }
  // Of an expert whose tiles are one unit.
  JAXMOE_ANY int32_t tasks_of_expert(Gemm gemm, int32_t rows) const {
    const int32_t tiles = row_tiles_of(rows, schedule_.tile);
    return tasks_of(tiles, is_narrow(gemm, rows - (tiles - 1) * schedule_.tile.rows), columns_of(gemm));
  }

  const Shape& shape_;
  const Schedule& schedule_;
  const int32_t* const rows_per_expert_;
  const NarrowExperts narrow_experts_;
  UnitWalk first_;   // of the gate/up GEMM
  UnitWalk middle_;  // of h_gradient; a forward pass has none
  UnitWalk last_;    // of the down GEMM, of token_gradient
  // Of a forward pass, counted once: between two tasks of a short launch walking takes half of the time. A backward kernel
  // that records a timeline has no registers for them.
  const int32_t gate_up_columns_;
  const int32_t down_columns_;
  Unit unit_{};
  bool has_unit_ = false;
  int32_t step_ = -1;
  int32_t nth_gemm_ = kGemmsOfUnit - 1;
  Gemm gemm_ = kFirstGemm;
  int32_t columns_ = 0;  // column tiles of the section's GEMM
  int32_t narrow_ = 0;   // tiles of the unit that are computed two column tiles at a time: its last one, or none
  int32_t section_tasks_ = 0;
  int32_t earlier_tasks_ = 0;  // of the sections before
};

}  // namespace jaxmoe
