// Scores to weights: scale, hooks, masks and the online softmax of one row over one KV tile.
#pragma once

#include <cstdint>

#include "common/band.h"
#include "common/math.h"
#include "cpu/products.h"
#include "cpu/state.h"

namespace attnloom {
namespace cpu {

struct Row {  // what hooks may know of a row
  int32_t request;
  int32_t q_index;  // of the query in its request
  int32_t q_pos;
  int32_t q_head;
  int32_t kv_head;
};

struct TileColumns {        // the KV tile a row meets
  const int32_t* kv_pos;    // [kTileKv], logical positions
  const int32_t* kv_index;  // [kTileKv], slots of the row; columns outside the tile's range repeat the nearest inside
};

struct RowState {
  float peak;   // largest score so far
  float total;  // sum of exp(score - peak)
};

enum class Columns {
  kAll,     // every column is visible
  kRange,   // those of a range
  kByBand,  // those of a range that the band admits by logical position
};

// Turns the scores of a row into weights, in place; updates the state and returns the factor for what was accumulated
// before. kMaskHook: whether logits_mask has a say in this tile.
template <typename Variant, Columns kColumns, bool kMaskHook, typename HookParams>
inline float weigh_row(const HookParams& params, const Row& row, const TileColumns& tile, Range visible, Band band,
                       float scale, float* scores, RowState* state) {
  constexpr float kDropped = Variant::kSoftmax ? -kInfinity : 0.0f;
  float peak = -kInfinity;
#pragma omp simd reduction(max : peak)
  for (int column = 0; column < kTileKv; ++column) {
    float score = scores[column] * scale;
    [[maybe_unused]] const int32_t kv_pos = tile.kv_pos[column];
    [[maybe_unused]] const int32_t kv_index = tile.kv_index[column];
    if constexpr (Variant::kHasLogitsTransform) {
      score = Variant::logits_transform(params, score, row.request, row.q_pos, kv_pos, row.q_head, row.kv_head,
                                        row.q_index, kv_index);
    }
    if constexpr (kColumns != Columns::kAll) {
      bool keep = (column >= visible.begin) & (column < visible.end);
      if constexpr (kColumns == Columns::kByBand) {
        keep = keep & ((band.right < 0) | (kv_pos - row.q_pos <= band.right)) &
               ((band.left < 0) | (row.q_pos - kv_pos <= band.left));
      }
      score = keep ? score : kDropped;
    }
    if constexpr (Variant::kHasLogitsMask && kMaskHook) {
      const bool keep =
          Variant::logits_mask(params, row.request, row.q_pos, kv_pos, row.q_head, row.kv_head, row.q_index, kv_index);
      score = keep ? score : kDropped;
    }
    scores[column] = score;
    peak = peak < score ? score : peak;
  }
  if constexpr (!Variant::kSoftmax) return 1.0f;

  peak = math::max(peak, state->peak);
  const float shift = peak > -kInfinity ? peak : 0.0f;  // a row that has seen no key yet keeps weights of zero
  float total = 0.0f;
#pragma omp simd reduction(+ : total)
  for (int column = 0; column < kTileKv; ++column) {
    const float weight = math::exp_nonpositive(scores[column] - shift);
    scores[column] = weight;
    total += weight;
  }
  const float factor = math::exp_nonpositive(state->peak - shift);
  state->peak = peak;
  state->total = state->total * factor + total;
  return factor;
}

}  // namespace cpu
}  // namespace attnloom
