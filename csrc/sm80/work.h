// What a warp works on: a piece of the plan as the true lengths say.
#pragma once

#include <cstdint>

#include "common/band.h"
#include "common/params.h"
#include "common/visible.h"
#include "planner/plan.h"
#include "sm80/cta.h"
#include "sm80/shape.h"

namespace attnloom {
namespace sm80 {

// A folded row: query `query` of the request, the `head`-th query head of the kv head.
struct Folded {
  int32_t query;
  int32_t head;
};

// A piece as the true lengths say. It lies in shared memory, a copy for each warp: the same for all lanes, and most of
// it is needed too seldom for registers.
template <typename S>
struct Work {
  Piece piece;
  Coordinate next;  // where the stretch goes on
  int32_t request;
  int32_t row;   // first folded row of the query tile in its request
  Folded first;  // what it is
  int32_t rows;  // of the query tile
  int32_t head;  // kv head
  int32_t kv_len;
  int32_t first_position;  // of the request's first query
  int32_t last_position;   // of its last slot
  int32_t first_token;     // its row in q
  const int32_t* blocks;
  const int32_t* positions;  // of blocks, or null
  Range any;                 // slots that some query sees: no others are read
  Range any_of_warp;         // of a tall tile: slots that some query of the warp's own rows sees
  Range band_free;           // slots inside the band of every query
  Range mask_free;           // slots that logits_mask leaves to every query

  // Whether this is the piece that begins at `at`.
  __device__ bool is(Coordinate at) const {
    return piece.tile == at.tile && piece.head == at.head && piece.kv_begin == at.kv;
  }

  // All lanes of a warp write the same.
  __device__ void set(const Cta<S>& cta, const Piece& piece) {
    const LayoutTensors& layout = cta.p.layout;
    const QueryTileInfo tile = cta.tile(piece.tile);
    const int32_t group = cta.p.group;
    Work<S> made;
    made.piece = piece;
    made.next = cta.plan().after(piece);
    made.request = tile.request;
    made.row = tile.row;
    made.rows = tile.rows;
    made.first = {tile.row / group, tile.row % group};
    made.head = cta.plan().kv_head(blockIdx.x, piece.head);
    made.first_token = tile.first_token;
    made.kv_len = tile.kv_len;
    made.blocks = layout.indices + tile.start;
    made.positions = layout.positions == nullptr ? nullptr : layout.positions + tile.start;
    made.last_position = tile.last_position;
    made.first_position = tile.last_position + 1 - tile.qo_len;
    made.see(cta);
    __syncwarp();
    *this = made;
    __syncwarp();
  }

  // Row `index` of the query tile.
  __device__ __forceinline__ Folded folded(const Cta<S>& cta, int index) const {
    static_assert((S::kTallRows + 128) * 128 < 1 << 16, "a row past the first's query, times a group of 128");
    const int32_t past = first.head + index;
    const int32_t queries = past * cta.p.group_inverse >> 16;
    return {first.query + queries, past - queries * cta.p.group};
  }
  // Rows [from, from + count) of the query tile, as the masks see them.
  __device__ QueryTile queries_of(const Cta<S>& cta, int from, int count) const {
    return {request, first_position + folded(cta, from).query, first_position + folded(cta, from + count - 1).query,
            kv_len};
  }
  __device__ QueryTile queries(const Cta<S>& cta) const { return queries_of(cta, 0, rows); }

 private:
  __device__ void see(const Cta<S>& cta) {
    static_assert(sizeof(Work<S>) <= kWorkBytes, "kWorkBytes holds a Work");
    const PlanHeader& header = cta.plan().header();
    const QueryTile tile = queries(cta);
    any = {0, kv_len};
    band_free = mask_free = {0, 0};
    if (!header.trimmed) return;
    any = visible_to_any(header.band, tile.first, tile.last, kv_len);
    if constexpr (S::Variant::kHasVisible) {
      any = intersect(any, S::Variant::visible(cta.hooks, request, tile.first, tile.last, kv_len));
    }
    band_free = intersect(visible_to_all(header.band, tile.first, tile.last, kv_len), any);
    if constexpr (S::Variant::kHasMaskFree) {
      mask_free = S::Variant::mask_free(cta.hooks, request, tile.first, tile.last, kv_len);
    }
  }
};

}  // namespace sm80
}  // namespace attnloom
