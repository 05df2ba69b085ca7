// The KV tiles of a piece, in the order in which they are loaded and computed.
#pragma once

#include <cstdint>

#include "common/visible.h"
#include "sm80/work.h"

namespace attnloom {
namespace sm80 {

// Under a block mask, which hides some tiles, 32 are looked at together, a lane each: which of those from `base` on are
// seen and not yet run, which are full, and how many the piece has left.
template <bool kMasked>
struct MaskedTiles {
  int32_t base = 0;
  uint32_t seen = 0;
  uint32_t full = 0;
  int32_t left = 0;
};
template <>
struct MaskedTiles<false> {};

// The KV tiles of a piece, one after the other.
template <typename S>
struct KvTiles : MaskedTiles<S::Variant::kHasLogitsMask> {
  int32_t tile = 0;
  int32_t end = 0;  // tile == end: none left

  __device__ bool has() const { return tile < end; }

  __device__ void start(const Cta<S>& cta, const Work<S>& work) {
    tile = work.tiles.begin;
    end = work.tiles.end;
    if constexpr (S::Variant::kHasLogitsMask) {
      if (!masked(cta)) return;
      if constexpr (S::kAlike) {  // pieces are cut at chunks, whatever the mask hides
        this->left = INT32_MAX;
        look(cta, work, tile);
        settle(cta, work);
        return;
      }
      const Piece& piece = work.piece;
      this->left = piece.closes ? INT32_MAX : piece.kv_end - piece.kv_begin;
      int32_t skip = piece.kv_begin;
      look(cta, work, tile);
      while (__popc(this->seen) <= skip && this->base + 32 < end) {
        skip -= __popc(this->seen);
        look(cta, work, this->base + 32);
      }
      for (; skip > 0 && this->seen != 0; --skip) this->seen &= this->seen - 1;
      settle(cta, work);
    }
  }

  __device__ void next(const Cta<S>& cta, const Work<S>& work) {
    if constexpr (S::Variant::kHasLogitsMask) {
      if (masked(cta)) {
        this->seen &= this->seen - 1;
        --this->left;
        settle(cta, work);
        return;
      }
    }
    ++tile;
  }

  // Whether logits_mask leaves the whole tile to every query.
  __device__ bool is_full(const Cta<S>& cta) const {
    if constexpr (S::Variant::kHasLogitsMask) return masked(cta) && (this->full >> (tile - this->base) & 1);
    return false;
  }

 private:
  static __device__ bool masked(const Cta<S>& cta) { return cta.p.block_mask.kinds != nullptr; }

  __device__ void look(const Cta<S>& cta, const Work<S>& work, int32_t from) {
    this->base = from;
    TileKind kind = kHiddenTile;
    if (from + static_cast<int32_t>(cta.lane()) < end) {
      kind = tile_kind(cta.p.block_mask, work.queries(cta), S::kTileKv, from + cta.lane());
    }
    this->seen = __ballot_sync(0xffffffff, kind != kHiddenTile);
    this->full = __ballot_sync(0xffffffff, kind == kFullTile);
  }
  __device__ void settle(const Cta<S>& cta, const Work<S>& work) {
    while (this->seen == 0 && this->base + 32 < end) look(cta, work, this->base + 32);
    tile = this->seen != 0 && this->left > 0 ? this->base + __ffs(this->seen) - 1 : end;
  }
};

}  // namespace sm80
}  // namespace attnloom
