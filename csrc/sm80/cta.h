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

// Which pieces an item is cut into: those of `count` stretches from `opener` on. Some of these may be empty.
struct Split {
  int32_t opener;
  int32_t count;
  int32_t pieces;  // that are not
};

// The worker's stretch of the plan: pieces 0, 1, ... of consecutive items, of which the first may begin and the last
// may end within its item.
struct Stretch {
  Coordinate start;
  Coordinate stop;
  int32_t pieces;  // in all

  __device__ Piece piece(const AttentionParams& p, PlanView<const int32_t> plan, int32_t index) const {
    const int32_t head = start.head + index;
    const int32_t tiles = p.by_line_heads.divide(head);
    const Coordinate at{start.tile + tiles, head - tiles * p.line_heads, index == 0 ? start.kv : 0};
    return piece_of(at, stop, plan.tile_kv_tiles()[at.tile]);
  }
};

extern __shared__ __align__(128) char shared_memory[];

template <typename S>
struct Cta {
  const AttentionParams& p;
  const typename S::HookParams& hooks;

  // Beside tall tiles nothing that follows from the thread's number may keep a register over the main loop.
  static __device__ __forceinline__ uint32_t thread() { return S::kTall ? thread_anew() : threadIdx.x; }
  __device__ __forceinline__ uint32_t lane() const { return thread() % 32; }
  __device__ __forceinline__ uint32_t warp() const { return thread() / 32; }

  __device__ Stretch stretch_of(PlanView<const int32_t> plan) const {
    const Coordinate start = plan.start(stretch_index());
    const Coordinate stop = plan.start(stretch_index() + 1);
    const int32_t items = (stop.tile - start.tile) * p.line_heads + stop.head - start.head;
    return {start, stop, plan.has_work(stretch_index()) ? items + (stop.kv > 0) : 0};
  }
  __device__ void keep(const Stretch& made) const { stretch_of_cta() = made; }

  // A warp finds who shares items with the stretch, which merges ask for: a half of it for each end.
  __device__ void find_splits() const {
    const PlanView<const int32_t> of = plan();
    const uint32_t half = lane() / 16;
    const int32_t begun = of.split_begin()[stretch_index()];
    int32_t last = of.split_end()[stretch_index()];
    const int32_t opener = half == 0 ? begun : stretch_index();
    if (half == 0) last = begun < 0 ? -1 : of.split_end()[begun];
    if (__all_sync(0xffffffff, last < 0)) return;  // only whole items: nobody asks
    // The first and the last have work; between them, those that do not end where they begin. Two at once a lane.
    const auto kv = of.worker_kv();
    int32_t pieces = lane() % 16 == 0 ? 2 : 0;
    if (last >= 0) {
#pragma unroll 1
      for (int32_t i = opener + 1 + static_cast<int32_t>(lane() % 16); i < last; i += 32) {
        pieces += (kv[i] != kv[i + 1]) + (kv[min(i + 16, last)] != kv[min(i + 17, last)]);
      }
    }
#pragma unroll
    for (int step = 1; step < 16; step *= 2) pieces += __shfl_xor_sync(0xffffffff, pieces, step);
    if (lane() % 16 == 0) splits()[half] = {opener, last - opener + 1, pieces};
  }
  // Functions that are not inlined do not reach the launch's parameters where these lie, but by global memory, which is
  // as far as data: kThreads threads from kFirst on copy them.
  template <int kFirst, int kThreads>
  __device__ void keep_params() const {
    constexpr int kWords = sizeof(AttentionParams) / 4;
#pragma unroll
    for (int from = 0; from < kWords; from += kThreads) {
      const int word = from + static_cast<int>(threadIdx.x) - kFirst;
      if (word >= kWords) continue;
      reinterpret_cast<uint32_t*>(shared_memory + S::kParamsAt)[word] = reinterpret_cast<const uint32_t*>(&p)[word];
    }
    if (threadIdx.x == kFirst) hooks_of_launch() = &hooks;
  }
  // What those functions begin with.
  static __device__ Cta again() {
    return {*reinterpret_cast<const AttentionParams*>(shared_memory + S::kParamsAt),
            *static_cast<const typename S::HookParams*>(hooks_of_launch())};
  }

  // The grid is [stretches][lockstep], x first, so that workers in lockstep lie side by side.
  static __device__ int32_t lockstep() { return gridDim.x; }
  static __device__ int32_t stretch_index() { return blockIdx.y; }
  static __device__ int32_t worker() { return peer(stretch_index()); }
  // The worker of another stretch that computes the same kv heads.
  static __device__ int32_t peer(int32_t stretch) { return stretch * lockstep() + static_cast<int32_t>(blockIdx.x); }
  // The kv head that the worker computes for a head of the line.
  static __device__ int32_t kv_head(int32_t head) { return head * lockstep() + static_cast<int32_t>(blockIdx.x); }

  __device__ PlanView<const int32_t> plan() const {
    const int32_t* const plan = anew(p.plan);
    const PlanHeader& header = *reinterpret_cast<const PlanHeader*>(plan);
    return {plan, static_cast<int32_t>(gridDim.y), header.num_requests, header.tile_capacity};
  }
  __device__ const Stretch& stretch() const { return stretch_of_cta(); }
  // Of a piece that is not whole.
  __device__ const Split& split_of(const Piece& piece) const { return splits()[piece.opens]; }
  // A piece that the table holds (pieces.h).
  __device__ __forceinline__ Work<S>& work(int32_t piece) const {
    return *reinterpret_cast<Work<S>*>(shared_memory + S::kWorksAt + (piece & (S::kTable - 1)) * kWorkBytes);
  }

  __device__ char* slice(int stage, int of_warp) const {
    return shared_memory + stage * S::kStageBytes + of_warp * S::kSliceBytes;
  }
  // Of group `group` of 16 tokens of a tile.
  __device__ __forceinline__ uint32_t keys_of(int stage, int group) const {
    return shared_address(slice(stage, group / S::kGroups)) + group % S::kGroups * (16 * S::kPitchK);
  }
  __device__ __forceinline__ uint32_t values_of(int stage, int group) const {
    return shared_address(slice(stage, group / S::kGroups)) + S::kSlice * S::kPitchK +
           group % S::kGroups * (16 * S::kPitchV);
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

 private:
  static_assert(sizeof(Split) == kSplitBytes, "kSplitBytes is that of a Split");
  static __device__ Split* splits() { return reinterpret_cast<Split*>(shared_memory + S::kSplitsAt); }
  static __device__ const void*& hooks_of_launch() {
    return *reinterpret_cast<const void**>(shared_memory + S::kHooksAt);
  }
  static __device__ Stretch& stretch_of_cta() {
    static_assert(sizeof(Stretch) <= kStretchBytes, "kStretchBytes holds a Stretch");
    return *reinterpret_cast<Stretch*>(shared_memory + S::kStretchAt);
  }
};

}  // namespace sm80
}  // namespace attnloom
