// The KV tiles of a piece, in the order in which they are loaded and computed.
#pragma once

#include <cstdint>

#include "common/visible.h"
#include "sm80/work.h"

namespace attnloom {
namespace sm80 {

// The KV tiles of a piece, one after the other. A block mask hides some; they are found 32 at a time, a lane each.
template <typename S>
struct KvTiles {
  int32_t tile = 0;
  int32_t end = 0;  // tile == end: none left
  // Under a block mask: which of the 32 tiles from `base` on are seen and not yet run, which are full, how many to run.
  int32_t base = 0;
  uint32_t seen = 0;
  uint32_t full = 0;
  int32_t left = 0;

  __device__ bool has() const { return tile < end; }

  __device__ void start(const Cta<S>& cta, const Work<S>& work) {
    const Piece& piece = work.piece;
    const Range tiles = kv_tiles_of(work.any, S::kTileKv);
    if constexpr (S::kAlike) {
      const Range inside = tiles_of_piece(cta.plan().header(), tiles, piece);
      tile = inside.begin;
      end = inside.end;
      left = INT32_MAX;
      if constexpr (S::Variant::kHasLogitsMask) {
        if (!masked(cta)) return;
        look(cta, work, tile);
        settle(cta, work);
      }
      return;
    }
    if (!masked(cta)) {
      tile = tiles.begin + piece.kv_begin;
      end = piece.closes ? tiles.end : min(tiles.begin + piece.kv_end, tiles.end);
      return;
    }
    if constexpr (S::Variant::kHasLogitsMask) {
      end = tiles.end;
      left = piece.closes ? INT32_MAX : piece.kv_end - piece.kv_begin;
      int32_t skip = piece.kv_begin;
      look(cta, work, tiles.begin);
      while (__popc(seen) <= skip && base + 32 < end) {
        skip -= __popc(seen);
        look(cta, work, base + 32);
      }
      for (; skip > 0 && seen != 0; --skip) seen &= seen - 1;
      settle(cta, work);
    }
  }

  __device__ void next(const Cta<S>& cta, const Work<S>& work) {
    if (!masked(cta)) {
      ++tile;
      return;
    }
    if constexpr (S::Variant::kHasLogitsMask) {
      seen &= seen - 1;
      --left;
      settle(cta, work);
    }
  }

  // Whether logits_mask leaves the whole tile to every query.
  __device__ bool is_full(const Cta<S>& cta) const {
    if constexpr (S::Variant::kHasLogitsMask) return masked(cta) && (full >> (tile - base) & 1);
    return false;
  }

 private:
  static __device__ bool masked(const Cta<S>& cta) {
    if constexpr (S::Variant::kHasLogitsMask) return cta.p.block_mask.kinds != nullptr;
    return false;
  }

  __device__ void look(const Cta<S>& cta, const Work<S>& work, int32_t from) {
    base = from;
    TileKind kind = kHiddenTile;
    if (base + cta.lane() < end) kind = tile_kind(cta.p.block_mask, work.queries(cta), S::kTileKv, base + cta.lane());
    seen = __ballot_sync(0xffffffff, kind != kHiddenTile);
    full = __ballot_sync(0xffffffff, kind == kFullTile);
  }
  __device__ void settle(const Cta<S>& cta, const Work<S>& work) {
    while (seen == 0 && base + 32 < end) look(cta, work, base + 32);
    tile = seen != 0 && left > 0 ? base + __ffs(seen) - 1 : end;
  }
};

}  // namespace sm80
}  // namespace attnloom
