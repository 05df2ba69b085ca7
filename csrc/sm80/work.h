// What a CTA works on: a piece of the plan as the true lengths say.
#pragma once

#include <cstdint>

#include "common/band.h"
#include "common/params.h"
#include "common/request.h"
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

// A piece as the true lengths say. It lies in shared memory: most of it is needed too seldom for registers.
template <typename S>
struct Work {
  Piece piece;
  int32_t request;
  int32_t row;   // first folded row of the query tile in its request
  Folded first;  // what it is
  int32_t rows;  // of the query tile
  int32_t head;  // kv head
  int32_t kv_len;
  int32_t first_position;  // of the request's first query
  int32_t first_token;     // its row in q
  const int32_t* blocks;
  const int32_t* positions;  // of blocks, or null
  const char* keys;          // of the kv head, in the caches
  const char* values;
  Range any;        // slots that some query sees: no others are read
  Range tiles;      // the piece's KV tiles; under a block mask, the item's
  Range band_free;  // slots inside the band of every query
  Range mask_free;  // slots that logits_mask leaves to every query

  __device__ bool tall() const { return S::kAlike || rows > S::kShortRows; }

  // A thread makes it by itself.
  __device__ void set(const Cta<S>& cta, PlanView<const int32_t> plan, const Piece& of) {
    static_assert(sizeof(Work<S>) <= kWorkBytes, "kWorkBytes holds a Work");
    const LayoutTensors& layout = cta.p.layout;
    piece = of;
    request = plan.tile_request()[piece.tile];
    row = plan.tile_row()[piece.tile];
    rows = plan.tile_rows()[piece.tile];
    // In decode tile i is mostly request i: what is known of the request comes with what is known of the tile then.
    const int32_t guess = min(piece.tile, plan.num_requests - 1);
    take(Request(layout, plan.qo_indptr().data(), guess));
    if (request != guess) take(Request(layout, plan.qo_indptr().data(), request));
    first.query = cta.p.by_group.divide(row);
    first.head = row - first.query * cta.p.group;
    head = cta.kv_head(piece.head);
    keys = head_of(cta.p.k);
    values = head_of(cta.p.v);
    see(cta, plan.header());
  }

  // Row `index` of the query tile.
  __device__ __forceinline__ Folded folded(const Cta<S>& cta, int index) const {
    const int32_t past = first.head + index;
    const int32_t queries = cta.p.by_group.divide(past);
    return {first.query + queries, past - queries * cta.p.group};
  }
  // Rows [from, from + count) of the query tile, as the masks see them.
  __device__ QueryTile queries_of(const Cta<S>& cta, int from, int count) const {
    return {request, first_position + folded(cta, from).query, first_position + folded(cta, from + count - 1).query,
            kv_len};
  }
  __device__ QueryTile queries(const Cta<S>& cta) const { return queries_of(cta, 0, rows); }

 private:
  __device__ void take(const Request& known) {
    first_token = known.first_token;
    kv_len = known.kv_len;
    first_position = known.query_position(0);
    blocks = known.blocks;
    positions = known.positions;
  }

  __device__ const char* head_of(const CacheTensor& cache) const {
    // Strides fit into 32 bits, and products of them into 64.
    return multiply_add(head, static_cast<int32_t>(cache.stride_head) * static_cast<int32_t>(sizeof(typename S::Kv)),
                        cache.data);
  }

  __device__ void see(const Cta<S>& cta, const PlanHeader& header) {
    const QueryTile tile = queries(cta);
    any = {0, kv_len};
    band_free = mask_free = {0, 0};
    if (header.trimmed) {
      any = visible_to_any(header.band, tile.first, tile.last, kv_len);
      if constexpr (S::Variant::kHasVisible) {
        any = intersect(any, S::Variant::visible(cta.hooks, request, tile.first, tile.last, kv_len));
      }
      band_free = intersect(visible_to_all(header.band, tile.first, tile.last, kv_len), any);
      if constexpr (S::Variant::kHasMaskFree) {
        mask_free = S::Variant::mask_free(cta.hooks, request, tile.first, tile.last, kv_len);
      }
    }
    tiles = kv_tiles_of(any, S::kTileKv);
    if constexpr (S::kAlike) {
      tiles = tiles_of_piece(header, tiles, piece);
      return;
    }
    if (S::Variant::kHasLogitsMask && cta.p.block_mask.kinds != nullptr) return;
    if (!piece.closes) tiles.end = min(tiles.begin + piece.kv_end, tiles.end);
    tiles.begin += piece.kv_begin;
  }
};

}  // namespace sm80
}  // namespace attnloom
