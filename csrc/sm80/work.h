// What a CTA works on: a piece of the plan as the true lengths say, and the KV tiles it has to run.
#pragma once

#include <cstdint>

#include "common/band.h"
#include "common/params.h"
#include "common/request.h"
#include "common/visible.h"
#include "planner/plan.h"
#include "sm80/ptx.h"
#include "sm80/shape.h"

namespace attnloom {
namespace sm80 {

template <typename S>
struct Work;

// Division of slots by the block size, which is known at run time only: n / d = n * inverse >> shift for n < 2^31
// (Granlund and Montgomery, PLDI 1994), two instructions instead of twenty.
struct Divider {
  uint32_t inverse;
  uint32_t shift;

  static __device__ Divider of(uint32_t divisor) {
    const uint32_t bits = divisor > 1 ? 32 - __clz(divisor - 1) : 0;  // ceil(log2(divisor))
    return {static_cast<uint32_t>((uint64_t{1} << (31 + bits)) / divisor + 1), 31 + bits};
  }
  __device__ __forceinline__ int32_t divide(int32_t n) const {
    return static_cast<int32_t>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * inverse >> shift);
  }
};

// A folded row: query `query` of the request, the `head`-th query head of the kv head.
struct Folded {
  int32_t query;
  int32_t head;
};

extern __shared__ __align__(128) char shared_memory[];

// What a CTA needs of the launch at every turn, in shared memory: registers are short.
struct Constants {
  Divider block_size;
  Coordinate stop;        // where the worker's stretch ends
  int32_t group;          // query heads of a kv head
  int32_t group_inverse;  // ceil(2^16 / group): x / group = x * group_inverse >> 16 for x * group < 2^16
};

// A CTA's view of the launch.
template <typename S>
struct Cta {
  const AttentionParams& p;
  const typename S::HookParams& hooks;

  __device__ __forceinline__ uint32_t lane() const { return thread_anew() % 32; }
  __device__ __forceinline__ uint32_t warp() const { return thread_anew() / 32; }

  // Sets the constants; the CTA must synchronise afterwards.
  __device__ void prepare() const {
    if (threadIdx.x == 0) {
      const int32_t group = plan().header().num_qo_heads / plan().header().num_kv_heads;
      constants() = {Divider::of(static_cast<uint32_t>(p.layout.block_size)),
                     plan().start(blockIdx.x / plan().header().lockstep + 1), group, (0xffff + group) / group};
    }
  }

  __device__ PlanView<const int32_t> plan() const { return {p.plan}; }
  __device__ Constants& constants() const { return *reinterpret_cast<Constants*>(shared_memory + S::kConstantsAt); }
  __device__ char* slice(int stage, int of_warp) const {
    return shared_memory + stage * S::kStageBytes + of_warp * S::kSliceBytes;
  }
  __device__ int32_t* positions(int stage) const {  // [kTileKv], where the layout has positions
    return reinterpret_cast<int32_t*>(shared_memory + S::kPositionsAt) + stage * S::kTileKv;
  }
  __device__ float* states() const { return reinterpret_cast<float*>(shared_memory + S::kStatesAt); }  // [warps][16][2]
  // Of the warp: what it loads, and what it computes.
  __device__ Work<S>& loading() const { return works()[warp()]; }
  __device__ Work<S>& computing() const { return works()[S::kWarps + warp()]; }

 private:
  __device__ Work<S>* works() const { return reinterpret_cast<Work<S>*>(shared_memory + S::kWorksAt); }
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
  __device__ void copy(const Work<S>& other) {
    const Work<S> made = other;
    __syncwarp();
    *this = made;
    __syncwarp();
  }
  __device__ void set(const Cta<S>& cta, const Piece& piece) {
    const PlanView<const int32_t> plan = cta.plan();
    const LayoutTensors& layout = cta.p.layout;
    Work<S> made;
    made.piece = piece;
    made.next = plan.after(piece);
    made.request = plan.tile_request()[piece.tile];
    made.row = plan.tile_row()[piece.tile];
    made.rows = plan.tile_rows()[piece.tile];
    const int32_t group = cta.constants().group;
    made.first = {made.row / group, made.row % group};
    made.head = plan.kv_head(blockIdx.x, piece.head);
    made.first_token = plan.qo_indptr()[made.request];
    const int32_t qo_len = plan.qo_indptr()[made.request + 1] - made.first_token;
    made.kv_len = layout.lengths[made.request];
    made.blocks = layout.indices + layout.starts[made.request];
    made.positions = layout.positions == nullptr ? nullptr : layout.positions + layout.starts[made.request];
    made.last_position = made.kv_len - 1;
    if (made.positions != nullptr && made.kv_len > 0) {
      const int32_t block_size = static_cast<int32_t>(layout.block_size);
      made.last_position = made.positions[(made.kv_len - 1) / block_size] + (made.kv_len - 1) % block_size;
    }
    made.first_position = made.last_position + 1 - qo_len;
    made.see(cta);
    __syncwarp();
    *this = made;
    __syncwarp();
  }

  // Row `index` of the query tile.
  __device__ __forceinline__ Folded folded(const Cta<S>& cta, int index) const {
    static_assert((S::kTallRows + 128) * 128 < 1 << 16, "a row past the first's query, times a group of 128");
    const int32_t past = first.head + index;
    const int32_t queries = past * cta.constants().group_inverse >> 16;
    return {first.query + queries, past - queries * cta.constants().group};
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

// The KV tiles of a piece, one after the other. A block mask hides some; they are found 32 at a time, a lane each.
template <typename S>
struct KvTiles {
  int32_t tile;
  int32_t end;  // tile == end: none left
  // Under a block mask: which of the 32 tiles from `base` on are seen and not yet run, which are full, how many to run.
  int32_t base;
  uint32_t seen;
  uint32_t full;
  int32_t left;

  __device__ bool has() const { return tile < end; }

  __device__ void start(const Cta<S>& cta, const Work<S>& work) {
    const Piece& piece = work.piece;
    const Range tiles = kv_tiles_of(work.any, S::kTileKv);
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
