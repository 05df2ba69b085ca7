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

enum class Columns {
  kAll,     // every column is visible
  kRange,   // those of a range
  kByBand,  // those of a range that the band admits by logical position
};

// Turns the scores of a row into weights, in place; updates the state and returns the factor for what was accumulated
// before. kMaskHook: whether logits_mask has a say in this tile.
template <typename Variant, Columns kColumns, bool kMaskHook, typename HookParams>
inline float weigh_row(const HookParams& hook_params, const Row& row, const TileColumns& tile, Range visible, Band band,
                       float scale, float* scores, RowState* state) {
  constexpr float kDropped = Variant::kSoftmax ? -kInfinity : 0.0f;
  [[maybe_unused]] const HookParams params = hook_params;  // a copy, which no store to `scores` can change
  // Hooks have loops of their own: in one, a compiler would evaluate them for visible columns only, and not vectorise
  // what they load.
  if constexpr (Variant::kHasLogitsTransform) {
#pragma omp simd
    for (int column = 0; column < kTileKv; ++column) {
      scores[column] =
          Variant::logits_transform(params, scores[column] * scale, row.request, row.q_pos, tile.kv_pos[column],
                                    row.q_head, row.kv_head, row.q_index, tile.kv_index[column]);
    }
    scale = 1.0f;
  }
  if constexpr (Variant::kHasLogitsMask && kMaskHook) {
#pragma omp simd
    for (int column = 0; column < kTileKv; ++column) {
      const bool keep = Variant::logits_mask(params, row.request, row.q_pos, tile.kv_pos[column], row.q_head,
                                             row.kv_head, row.q_index, tile.kv_index[column]);
      scores[column] = keep ? scores[column] * scale : kDropped;
    }
    scale = 1.0f;
  }
  float peak = -kInfinity;
#pragma omp simd reduction(max : peak)
  for (int column = 0; column < kTileKv; ++column) {
    float score = scores[column] * scale;
    [[maybe_unused]] const int32_t kv_pos = tile.kv_pos[column];
    if constexpr (kColumns != Columns::kAll) {
      bool keep = (column >= visible.begin) & (column < visible.end);
      if constexpr (kColumns == Columns::kByBand) {
        keep = keep & ((band.right < 0) | (kv_pos - row.q_pos <= band.right)) &
               ((band.left < 0) | (row.q_pos - kv_pos <= band.left));
      }
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
