// The arena in the batch_invariant mode: states of chunks, on their way to one state of an item.
//
// [num_workers * (1 + chunk_states)][tile_q][kDimV] values, not divided by their totals, then as many row states.
#pragma once

#include <cstdint>

#include "cpu/state.h"
#include "planner/plan.h"

namespace attnloom {
namespace cpu {

template <int kDimV, bool kSoftmax>
class ChunkStates {
 public:
  ChunkStates(float* arena, const PlanHeader& plan)
      : values_(arena),
        states_(reinterpret_cast<RowState*>(arena + fold_slot(plan, plan.num_workers) * plan.tile_q * kDimV)),
        tile_q_(plan.tile_q),
        room_(plan.chunk_states) {}

  float* values(int64_t slot) const { return values_ + slot * tile_q_ * kDimV; }
  RowState* states(int64_t slot) const { return states_ + slot * tile_q_; }

  // Folds the next state of `rows` rows into a slot.
  void fold(int64_t slot, int32_t rows, const RowState* next, const float* next_values) const {
    for (int32_t i = 0; i < rows; ++i) {
      fold_state<kSoftmax, kDimV>(next[i], next_values + i * kDimV, states(slot) + i, values(slot) + i * kDimV);
    }
  }

  // Leaves the state of the nth chunk of the piece with which the worker of `own` continues an item.
  void leave(int64_t own, int32_t nth, int32_t rows, const RowState* next, const float* next_values) const {
    // Only true lengths beyond the planned ones have more chunks than there is room for: those share the last slot,
    // which is right, but not the same on any number of workers.
    if (nth >= room_) return fold(own + room_, rows, next, next_values);
    const int64_t slot = own + 1 + nth;
    for (int32_t i = 0; i < rows; ++i) states(slot)[i] = next[i];
    for (int32_t i = 0; i < rows * kDimV; ++i) values(slot)[i] = next_values[i];
  }

  // Folds what the worker of slot `from` left of `count` chunks into a slot, in their order.
  void fold_left(int64_t slot, int64_t from, int32_t count, int32_t rows) const {
    for (int32_t nth = 0; nth < count && nth < room_; ++nth)
      fold(slot, rows, states(from + 1 + nth), values(from + 1 + nth));
  }

 private:
  float* values_;
  RowState* states_;
  int64_t tile_q_;
  int32_t room_;
};

}  // namespace cpu
}  // namespace attnloom
