// The sm80 kernel family: each CTA runs its stretch of the plan, item by item:
//   queries -> for each KV tile: S = Q K^T, weigh, O += P V -> write the rows, or leave a partial state.
// The loader runs ahead along the stretch. Short and tall query tiles share everything but how four warps divide the
// work.
#pragma once

#include <cstdint>

#include "common/params.h"
#include "cuda/launch.h"
#include "cuda/prepare.h"
#include "planner/plan.h"
#include "sm80/loader.h"
#include "sm80/merge.h"
#include "sm80/short.h"
#include "sm80/tall.h"

namespace attnloom {
namespace sm80 {

// Runs the pieces from `piece` on that have query tiles of one kind and come with one stream of the loader; returns
// where it ends.
template <typename S, typename Tile>
__device__ __forceinline__ int32_t run_pieces(const Cta<S>& cta, int32_t piece) {
  Loader<S, Tile::kStages> loader(cta, piece, Tile::kTall);
  int stage = Tile::kStages - 1;  // computed last: free until the next load
  Tile tile(cta);
#pragma unroll 1
  for (; piece < cta.stretch().pieces && cta.work(piece).tall() == Tile::kTall; ++piece) {
    look_ahead(cta, piece);
    KvTiles<S> tiles;
    tiles.start(cta, cta.work(piece));
    if (tiles.has() && !loader.covers(piece)) break;
    tile.begin(cta.work(piece), tiles.has());
    for (; tiles.tile < anew(cta.work(piece).tiles.end); tiles.next(cta, cta.work(piece))) {
      const int next = stage + 1 == Tile::kStages ? 0 : stage + 1;
      const typename Loader<S, Tile::kStages>::State state = loader.state();  // comes while the warp waits
      tile.await(cta.work(piece), tiles, next);
      tile.compute(cta.work(piece), tiles, next, [&] { loader.load(state, piece, stage); });
      stage = next;
    }
    const bool known = loader.covers(piece + 1);
    tile.end(cta.work(piece), known, cta.work(piece + 1), stage);
    if constexpr (!S::kAlike) {
      if (!cta.work(piece).piece.whole()) {
        merge_if_last<S>(piece, reinterpret_cast<float*>(cta.slice(stage, 0)));
        tile.merged(known, cta.work(piece + 1));
      }
    }
  }
  wait_copies<0>();
  __syncthreads();
  return piece;
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kCtasPerSm)
    attention_kernel(const __grid_constant__ AttentionParams params,
                     const __grid_constant__ typename S::HookParams hooks) {
  const Cta<S> cta{params, hooks};
  if (cta.warp() == 0) {
    PlanView<const int32_t> plan = cta.plan();
    const Stretch stretch = cta.stretch_of(plan);
    // All that has been read so far was asked for at once.
    plan.num_requests = anew(plan.num_requests);
    plan.tile_capacity = anew(plan.tile_capacity);
    if (cta.lane() == 0) cta.keep(stretch);
    make_pieces(cta, plan, stretch, 0);
  } else if (cta.warp() == 1) {  // now, while it has nothing else to do: a warp that falls behind later ends later
    cta.find_splits();
  } else {
    cta.template keep_params<64, S::kThreads - 64>();
  }
  __syncthreads();
  int32_t piece = 0;
#pragma unroll 1
  while (piece < cta.stretch().pieces) {
    if constexpr (!S::kAlike) piece = run_pieces<S, Short<S>>(cta, piece);
    if constexpr (S::kTall) {
      if (piece < cta.stretch().pieces) piece = run_pieces<S, Tall<S>>(cta, piece);
    }
  }
}

// Brings a kernel onto the current device.
template <typename S>
cudaError_t prepare_shape() {
  return cudaFuncSetAttribute(attention_kernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes);
}

// CTAs that share a multiprocessor of the current device; 0 if it has too little shared memory for one.
template <typename S>
int32_t ctas_per_sm() {
  int ctas = 0;
  const cudaError_t error =
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, attention_kernel<S>, S::kThreads, S::kSharedBytes);
  return error == cudaSuccess ? ctas : 0;
}

// One CTA per worker of the plan.
template <typename S>
int32_t run_attention(const AttentionParams& params) {
  if (!S::kAlike && params.tile_q != Partials<S>::kSlotRows) return static_cast<int32_t>(cudaErrorInvalidValue);
  AttentionParams launched = params;
  const CacheTensor& k = params.k;
  const CacheTensor& v = params.v;
  const bool alike = k.unit == v.unit && k.units_block == v.units_block && k.units_slot == v.units_slot &&
                     k.stride_head == v.stride_head;
  launched.caches_alike = alike && params.layout.positions == nullptr;
  launched.values_behind_keys = static_cast<const char*>(v.data) - static_cast<const char*>(k.data);
  const dim3 grid(params.lockstep, params.num_workers / params.lockstep);
  launch(attention_kernel<S>, grid, S::kThreads, S::kSharedBytes, params.stream, launched,
         typename S::HookParams(params.hook_params));
  return static_cast<int32_t>(cudaGetLastError());
}

// Finishes states that were merged elsewhere: every row of every request of the plan.
template <typename S>
int32_t finish_attention(const FinishParams& params) {
  if (params.total_q == 0) return 0;
  launch(finish_kernel<S>, params.total_q, S::kThreads, 0, params.stream, params,
         typename S::HookParams(params.hook_params));
  return static_cast<int32_t>(cudaGetLastError());
}

}  // namespace sm80
}  // namespace attnloom
