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

// Runs the pieces from `at` on that have query tiles of one kind; returns where the other kind begins, or the end.
template <typename S, typename Tile>
__device__ __forceinline__ Coordinate run_pieces(const Cta<S>& cta, Coordinate at) {
  Loader<S, Tile::kStages> loader(cta, at, Tile::kTall);
  int stage = Tile::kStages - 1;  // computed last: free until the next load
  Tile tile(cta);
#pragma unroll 1
  while (at < cta.stretch().stop) {
    const bool prepared = loader.prepared(at);
    // Else it is a piece without tiles, which still has rows to write.
    if (!prepared && (S::kAlike || cta.tile(at.tile).rows > S::kShortRows) != Tile::kTall) break;
    if (prepared) {
      loader.begin();
    } else {
      cta.passed_over().set(cta, cta.piece_at(at));
      cta.compute_passed_over();
    }
    Work<S>& work = cta.computing();
    KvTiles<S> tiles;
    tiles.start(cta, work);
    tile.begin(work, tiles.has());
    cta.stretch().end_tile = tiles.end;
    for (; tiles.tile < anew(cta.stretch().end_tile); tiles.next(cta, work)) {
      const int next = stage + 1 == Tile::kStages ? 0 : stage + 1;
      tile.await(work, tiles, next);
      tile.compute(work, tiles, next, loader, stage);
      stage = next;
    }
    at = cta.computing().next;
    const bool known = loader.prepared(at);
    tile.end(cta.computing(), known, loader.next(), stage);
    if constexpr (!S::kAlike) {
      if (!cta.computing().piece.whole()) {
        merge_if_last<S>(reinterpret_cast<float*>(cta.slice(stage, 0)));
        tile.merged(known, loader.next());
      }
    }
  }
  wait_copies<0>();
  __syncthreads();
  return at;
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kCtasPerSm)
    attention_kernel(const __grid_constant__ AttentionParams params,
                     const __grid_constant__ typename S::HookParams hooks) {
  const Cta<S> cta{params, hooks};
  cta.prepare();
  __syncwarp();
  Coordinate at = cta.stretch().next;
#pragma unroll 1
  while (at < cta.stretch().stop) {
    if constexpr (!S::kAlike) at = run_pieces<S, Short<S>>(cta, at);
    if constexpr (S::kTall) {
      if (at < cta.stretch().stop) at = run_pieces<S, Tall<S>>(cta, at);
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
