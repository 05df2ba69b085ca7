// A CTA's view of the launch, and what it keeps of it in shared memory: registers are short.
#pragma once

#include <cstdint>

#include "common/params.h"
#include "planner/plan.h"
#include "sm80/ptx.h"
#include "sm80/shape.h"

namespace attnloom {
namespace sm80 {

template <typename S>
struct Work;

// A query tile of the plan and its request, as the true lengths say.
struct QueryTileInfo {
  int64_t start;  // of the request's block ids
  int32_t kv_tiles;
  int32_t request;
  int32_t row;  // first folded row in the request
  int32_t rows;
  int32_t first_token;  // of the request, in q
  int32_t qo_len;
  int32_t kv_len;
  int32_t last_position;  // of the request's last slot
};

// What a warp knows of the worker's stretch; warps are not in step. Query tiles come 32 at a time: three dependent
// reads of global memory for all of them together, instead of for each.
struct Stretch {
  Coordinate next;  // where the loader goes on
  Coordinate stop;
  int32_t first;  // tile of entry 0; none is there before the first fill
  int32_t end;
  int32_t computing;  // place of the piece that is computed
  int32_t end_tile;   // where its KV tiles end
  // Of the launch: a call takes no registers for them.
  const AttentionParams* params;
  const void* hooks;
  QueryTileInfo tiles[32];
};

extern __shared__ __align__(128) char shared_memory[];

template <typename S>
struct Cta {
  const AttentionParams& p;
  const typename S::HookParams& hooks;

  __device__ __forceinline__ uint32_t lane() const { return thread_anew() % 32; }
  __device__ __forceinline__ uint32_t warp() const { return thread_anew() / 32; }

  // Sets what the warp knows at the beginning.
  __device__ void prepare() const {
    const PlanHeader& header = plan().header();
    stretch().next = plan().start(blockIdx.x / header.lockstep);
    stretch().stop = plan().start(blockIdx.x / header.lockstep + 1);
    stretch().first = stretch().end = 0;
    stretch().params = &p;
    stretch().hooks = &hooks;
  }

  __device__ PlanView<const int32_t> plan() const { return {anew(p.plan)}; }
  __device__ char* slice(int stage, int of_warp) const {
    return shared_memory + stage * S::kStageBytes + of_warp * S::kSliceBytes;
  }
  __device__ int32_t* positions(int stage) const {  // [kTileKv], where the layout has positions
    return reinterpret_cast<int32_t*>(shared_memory + S::kPositionsAt) + stage * S::kTileKv;
  }
  // Of the warp's tokens in a tile whose rows are not yet copied: what `indices` and `positions` say of their pages.
  __device__ int32_t* page_ids(int place) const {
    return reinterpret_cast<int32_t*>(shared_memory + S::kPagesAt) + (place * S::kWarps + warp()) * S::kSlice;
  }
  __device__ int32_t* page_positions(int place) const { return page_ids(place) + (S::kShortStages - 1) * S::kTileKv; }
  __device__ float* states() const { return reinterpret_cast<float*>(shared_memory + S::kStatesAt); }  // [warps][16][2]

  // Of the warp: the pieces between the loader and the computation, one after the other, and one that the loader passed
  // over.
  __device__ __forceinline__ Work<S>& ring(int32_t piece) const { return *works(piece & (S::kRing - 1)); }
  __device__ __forceinline__ Work<S>& passed_over() const { return *works(S::kRing); }
  // The one that is computed, which may be asked for anew instead of keeping a register.
  __device__ __forceinline__ Work<S>& computing() const { return *works(anew(stretch().computing)); }
  __device__ void compute_next(int32_t piece) const { set_computing(piece & (S::kRing - 1)); }
  __device__ void compute_passed_over() const { set_computing(S::kRing); }

  __device__ Stretch& stretch() const { return stretch_of_warp(); }
  // What functions that are not inlined begin with.
  static __device__ Cta again() {
    const Stretch& known = stretch_of_warp();
    return {*known.params, *static_cast<const typename S::HookParams*>(known.hooks)};
  }
  // A tile of the stretch. All lanes of a warp together.
  __device__ const QueryTileInfo& tile(int32_t index) const {
    Stretch& known = stretch();
    if (index < known.first || index >= known.end) fill(known, index);
    return known.tiles[index - known.first];
  }
  // The piece that begins at `at`.
  __device__ Piece piece_at(Coordinate at) const { return piece_of(at, stretch().stop, tile(at.tile).kv_tiles); }

 private:
  static __device__ Stretch& stretch_of_warp() {
    static_assert(sizeof(Stretch) <= kStretchBytes, "kStretchBytes holds a Stretch");
    return *reinterpret_cast<Stretch*>(shared_memory + S::kStretchesAt + thread_anew() / 32 * kStretchBytes);
  }
  __device__ void set_computing(int32_t place) const {
    __syncwarp();
    stretch().computing = place;
    __syncwarp();
  }
  __device__ Work<S>* works(int32_t place) const {
    return reinterpret_cast<Work<S>*>(shared_memory + S::kWorksAt + (warp() * (S::kRing + 1) + place) * kWorkBytes);
  }
  __device__ void fill(Stretch& known, int32_t first) const {
    const Coordinate stop = stretch().stop;
    const int32_t end = min(first + 32, stop.tile + (stop.head > 0 || stop.kv > 0));
    const int32_t index = first + lane();
    __syncwarp();
    if (index < end) {
      QueryTileInfo made;
      made.kv_tiles = plan().tile_kv_tiles()[index];
      made.request = plan().tile_request()[index];
      made.row = plan().tile_row()[index];
      made.rows = plan().tile_rows()[index];
      made.start = p.layout.starts[made.request];
      made.kv_len = p.layout.lengths[made.request];
      made.first_token = plan().qo_indptr()[made.request];
      made.qo_len = plan().qo_indptr()[made.request + 1] - made.first_token;
      made.last_position = made.kv_len - 1;
      if (p.layout.positions != nullptr && made.kv_len > 0) {
        const int32_t block = p.block_size.divide(made.kv_len - 1);
        made.last_position = p.layout.positions[made.start + p.layout.entry_of(block)] +
                             (made.kv_len - 1 - block * static_cast<int32_t>(p.layout.block_size));
      }
      known.tiles[lane()] = made;
    }
    known.first = first;
    known.end = end;
    __syncwarp();
  }
};

}  // namespace sm80
}  // namespace attnloom
