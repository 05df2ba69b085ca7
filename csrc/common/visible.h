// What of its KV a query tile may see: the band, the range that a variant declares, and a block mask. Used by the
// planner on planned lengths and by kernels on true ones.
#pragma once

#include <cstdint>

#include "common/band.h"
#include "common/macros.h"

namespace attnloom {

// The queries of a tile, by logical position; they may lie before position 0 when there are more than keys.
struct QueryTile {
  int32_t request;
  int32_t first;
  int32_t last;
  int32_t kv_len;
};

enum TileKind : uint8_t {
  kHiddenTile = 0,   // no query of the block sees a key of it
  kPartialTile = 1,  // the mask decides
  kFullTile = 2,     // every query sees every key
};

// core/block_mask.py: kinds[request][q block][kv block] over positions, both blocks of one KV tile.
struct BlockMask {
  const uint8_t* kinds;    // null: none
  int64_t stride_request;  // 0: one mask for all requests
  int32_t q_blocks;
  int32_t kv_blocks;
};

ATTNLOOM_HD Range intersect(Range a, Range b) {
  const int32_t begin = a.begin > b.begin ? a.begin : b.begin;
  const int32_t end = a.end < b.end ? a.end : b.end;
  return {begin < end ? begin : end, end};
}

// Kind of a KV tile for all queries of a tile, which may lie in several query blocks. Before position 0 and past the
// mask's end the variant decides: nobody compares lengths that only the device knows.
ATTNLOOM_HD TileKind tile_kind(const BlockMask& mask, const QueryTile& tile, int32_t tile_kv, int32_t kv_tile) {
  const int32_t last = tile.last / tile_kv;
  if (tile.first < 0 || last >= mask.q_blocks || kv_tile >= mask.kv_blocks) return kPartialTile;
  bool any = false;
  bool all = true;
  for (int32_t block = tile.first / tile_kv; block <= last; ++block) {
    const uint8_t kind =
        mask.kinds[tile.request * mask.stride_request + static_cast<int64_t>(block) * mask.kv_blocks + kv_tile];
    any |= kind != kHiddenTile;
    all &= kind == kFullTile;
  }
  return !any ? kHiddenTile : (all ? kFullTile : kPartialTile);
}

// KV tiles among `tiles` that the mask does not hide.
ATTNLOOM_HD int32_t count_tiles(const BlockMask& mask, const QueryTile& tile, int32_t tile_kv, Range tiles) {
  if (mask.kinds == nullptr) return tiles.end - tiles.begin;
  int32_t count = 0;
  for (int32_t kv_tile = tiles.begin; kv_tile < tiles.end; ++kv_tile) {
    count += tile_kind(mask, tile, tile_kv, kv_tile) != kHiddenTile;
  }
  return count;
}

}  // namespace attnloom
