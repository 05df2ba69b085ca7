// The sm80 kernel family: each CTA runs its stretch of the plan, item by item:
//   queries -> for each KV tile: S = Q K^T, weigh, O += P V -> write the rows, or leave a partial state.
// The loader runs ahead along the stretch. Short and tall query tiles share everything but how four warps divide the
// work.
#pragma once

#include <cstdint>

#include "common/params.h"
#include "cuda/prepare.h"
#include "planner/plan.h"
#include "sm80/loader.h"
#include "sm80/merge.h"
#include "sm80/short.h"
#include "sm80/tall.h"

namespace attnloom {
namespace sm80 {

// Runs the pieces from `computing().next` on that have query tiles of one kind; leaves there where the other kind
// begins.
template <typename S, typename Tile>
__device__ __forceinline__ void run_pieces(const Cta<S>& cta) {
  Work<S>& work = cta.computing();
  Loader<S> loader(cta, work.next, Tile::kTall);
  int stage = Tile::kStages - 1;  // computed last: free until the next load
#pragma unroll 1
  for (int ahead = -1; ahead < stage; ++ahead) loader.load(ahead);
  Tile tile(cta);
  while (work.next < cta.constants().stop) {
    if (cta.loading().is(work.next)) {  // as a rule the loader is where the next piece begins
      work.copy(cta.loading());
    } else {
      const Piece piece = cta.plan().piece_at(work.next, cta.constants().stop);
      if ((cta.plan().tile_rows()[piece.tile] > S::kShortRows) != Tile::kTall) break;
      work.set(cta, piece);
    }
    KvTiles<S> tiles;
    tiles.start(cta, work);
    tile.begin(work, tiles.has());
    for (; tiles.has(); tiles.next(cta, work)) {
      const int next = stage + 1 == Tile::kStages ? 0 : stage + 1;
      tile.await(work, tiles, next);
      tile.compute(work, tiles, next, loader, stage);
      stage = next;
    }
    tile.end(work, stage, PieceOutput<S>{cta, work});
    if (!work.piece.whole()) merge_if_last<S>(cta.p, cta.hooks, cta.slice(stage, 0));
  }
  wait_copies<0>();
  __syncthreads();
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kCtasPerSm)
    attention_kernel(const __grid_constant__ AttentionParams params,
                     const __grid_constant__ typename S::HookParams hooks) {
  const Cta<S> cta{params, hooks};
  cta.prepare();
  Work<S>& work = cta.computing();
  work.next = cta.plan().start(blockIdx.x / cta.plan().header().lockstep);
  __syncthreads();
  while (work.next < cta.constants().stop) {
    run_pieces<S, Short<S>>(cta);
    if (work.next < cta.constants().stop) run_pieces<S, Tall<S>>(cta);
  }
}

// Brings the kernels onto the current device.
template <typename S>
int32_t prepare_attention() {
  const cudaError_t error =
      cudaFuncSetAttribute(attention_kernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes);
  return error != cudaSuccess ? static_cast<int32_t>(error) : prepare(finish_kernel<S>);
}

// One CTA per worker of the plan.
template <typename S>
int32_t run_attention(const AttentionParams& params) {
  attention_kernel<S><<<params.num_workers, S::kThreads, S::kSharedBytes, static_cast<cudaStream_t>(params.stream)>>>(
      params, typename S::HookParams(params.hook_params));
  return static_cast<int32_t>(cudaGetLastError());
}

// Finishes states that were merged elsewhere: every row of every request of the plan.
template <typename S>
int32_t finish_attention(const FinishParams& params) {
  if (params.total_q == 0) return 0;
  finish_kernel<S><<<params.total_q, S::kThreads, 0, static_cast<cudaStream_t>(params.stream)>>>(
      params, typename S::HookParams(params.hook_params));
  return static_cast<int32_t>(cudaGetLastError());
}

}  // namespace sm80
}  // namespace attnloom
