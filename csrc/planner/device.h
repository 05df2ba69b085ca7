// The device planner: the functions of scan.h, run by one CTA. Every array comes out as on the host, word for word,
// except that a negative length counts as 0 and that a plan past its capacity is empty: nobody is there to be told.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/params.h"
#include "cuda/launch.h"
#include "planner/plan.h"
#include "planner/scan.h"

namespace attnloom {
namespace device_planner {

constexpr int kWarps = 32;
constexpr int kThreads = 32 * kWarps;
constexpr int kSharedTiles = 4096;  // as many tiles keep their prefix sum in shared memory

struct Shared {
  int64_t costs_of_warps[kWarps];
  int32_t first_tile[kThreads];  // of each request of a round, counted from the round's first
  int32_t first_rank[kThreads];  // its rank in the batch, among tall tiles or among the others
  int64_t prefix[kSharedTiles + 1];
};

// Sum of the values of all threads before this one; `total` is the sum of all. A barrier must follow before the next
// call.
template <typename T>
__device__ T sum_before(T value, T* warps, T& total) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  T sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(0xffffffff, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    T whole = lane < blockDim.x / 32 ? warps[lane] : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const T other = __shfl_up_sync(0xffffffff, whole, step);
      if (lane >= step) whole += other;
    }
    warps[lane] = whole;
  }
  __syncthreads();
  total = warps[kWarps - 1];
  return sum - value + (warp > 0 ? warps[warp - 1] : 0);
}

// The last request of a round whose first tile is not after `tile`; those before it without tiles share its number.
__device__ inline int32_t request_of(const int32_t* first_tile, int32_t requests, int32_t tile) {
  int32_t low = 0;
  int32_t high = requests;
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (first_tile[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Tall query tiles of all requests.
__device__ inline int64_t count_tall(const PlanHeader& header, const PlanInput& in, Shared& shared) {
  if (!has_tall(header)) return 0;
  int64_t own = 0;
  for (int32_t request = threadIdx.x; request < header.num_requests; request += blockDim.x) {
    const int32_t qo_len = in.qo_indptr[request + 1] - in.qo_indptr[request];
    if (is_tall(header, qo_len)) own += tiles_of_request(header, qo_len);
  }
  int64_t all;
  sum_before(own, shared.costs_of_warps, all);
  __syncthreads();
  return all;
}

// Fills the tile arrays, and for each tile `costs`, over all kv heads of the line; returns the number of tiles, -1 when
// they exceed the capacity. A round takes as many requests as there are threads, and inside it as many tiles at a time.
__device__ inline int32_t fill_tiles(PlanView<int32_t> plan, const PlanHeader& header, const PlanInput& in,
                                     int64_t* costs, Shared& shared) {
  const int32_t threads = blockDim.x;
  const int32_t thread = threadIdx.x;
  const int32_t heads_of_line = header.num_kv_heads / header.lockstep;
  const int64_t all_tall = count_tall(header, in, shared);
  if (all_tall > header.tile_capacity) return -1;
  const Deal deal(static_cast<int32_t>(all_tall), plan.num_stretches);
  int32_t tall = 0;    // tiles of rounds before
  int32_t others = 0;  // likewise
  for (int32_t first = 0; first < header.num_requests; first += threads) {
    const int32_t request = first + thread;
    int64_t count = 0;
    bool of_tall = false;
    if (request < header.num_requests) {
      const int32_t begin = in.qo_indptr[request];
      plan.qo_indptr()[request] = begin;
      const int32_t qo_len = in.qo_indptr[request + 1] - begin;
      count = qo_len > 0 ? tiles_of_request(header, qo_len) : 0;
      of_tall = is_tall(header, qo_len);
    }
    int64_t of_round;
    const int64_t before = sum_before(count, shared.costs_of_warps, of_round);
    int64_t tall_of_round = 0;
    int64_t tall_before = 0;
    if (deal.tall > 0) {
      __syncthreads();
      tall_before = sum_before(of_tall ? count : 0, shared.costs_of_warps, tall_of_round);
    }
    // Tall tiles of later rounds lie before the others of this one.
    const int64_t others_of_round = of_round - tall_of_round;
    if (deal.tall + others + others_of_round > header.tile_capacity) return -1;
    shared.first_tile[thread] = static_cast<int32_t>(before);
    shared.first_rank[thread] = static_cast<int32_t>(of_tall ? tall + tall_before : others + before - tall_before);
    __syncthreads();
    const int32_t requests = static_cast<int32_t>(min_of(threads, header.num_requests - first));
    for (int32_t tile = thread; tile < of_round; tile += threads) {
      const int32_t local = request_of(shared.first_tile, requests, tile);
      const int32_t index = tile - shared.first_tile[local];
      const int32_t qo_len = in.qo_indptr[first + local + 1] - in.qo_indptr[first + local];
      const int32_t place = deal.place(is_tall(header, qo_len), shared.first_rank[local] + index);
      fill_tile(plan, in, first + local, index, place);
      costs[place] = heads_of_line * item_cost(in.cost, plan.tile_rows()[place], plan.tile_kv_tiles()[place]);
    }
    tall += static_cast<int32_t>(tall_of_round);
    others += static_cast<int32_t>(others_of_round);
    __syncthreads();
  }
  if (thread == 0) plan.qo_indptr()[header.num_requests] = in.qo_indptr[header.num_requests];
  return tall + others;
}

// Makes prefix sums of the costs of `tiles` tiles, in their place.
__device__ inline void sum_costs(int64_t* costs, int32_t tiles, Shared& shared) {
  int64_t sum = 0;
  for (int32_t base = 0; base < tiles; base += blockDim.x) {
    const int32_t tile = base + threadIdx.x;
    const int64_t own = tile < tiles ? costs[tile] : 0;
    int64_t of_round;
    const int64_t before = sum_before(own, shared.costs_of_warps, of_round);
    if (tile < tiles) costs[tile] = sum + before;
    sum += of_round;
    __syncthreads();
  }
  if (threadIdx.x == 0) costs[tiles] = sum;
}

// The whole plan. The header comes by value, complete but for num_tiles.
__device__ inline void make_plan(const PlanParams& params, const PlanHeader& given, const PlanInput& in,
                                 Shared& shared) {
  const int32_t num_stretches = given.num_workers / given.lockstep;
  const PlanView<int32_t> plan{params.plan, given};
  const PlanView<const int32_t> made{params.plan, given};
  PlanHeader& header = *reinterpret_cast<PlanHeader*>(params.plan);
  if (threadIdx.x == 0) header = given;
  __syncthreads();
  int64_t* prefix = given.tile_capacity <= kSharedTiles ? shared.prefix : params.prefix;
  const int32_t tiles = fill_tiles(plan, given, in, prefix, shared);
  if (tiles >= 0) sum_costs(prefix, tiles, shared);
  if (threadIdx.x == 0) header.num_tiles = tiles < 0 ? 0 : tiles;
  __syncthreads();
  int64_t dearest = 0;
  for (int32_t stretch = threadIdx.x; stretch < num_stretches; stretch += blockDim.x) {
    const int64_t of_stretch = cost_before(made, in.cost, prefix, locate(made, in.cost, prefix, stretch + 1, true)) -
                               cost_before(made, in.cost, prefix, locate(made, in.cost, prefix, stretch, true));
    if (dearest < of_stretch) dearest = of_stretch;
  }
  // True where it is so for the stretches of every thread.
  const int64_t total = tiles < 0 ? 0 : prefix[tiles];
  const bool whole = __syncthreads_and(cut_between_items(dearest, total, num_stretches, in.cost));
  for (int32_t stretch = threadIdx.x; stretch <= num_stretches; stretch += blockDim.x) {
    const Coordinate start = locate(made, in.cost, prefix, stretch, whole);
    plan.worker_tile()[stretch] = start.tile;
    plan.worker_head()[stretch] = start.head;
    plan.worker_kv()[stretch] = start.kv;
  }
  __syncthreads();
  for (int32_t stretch = threadIdx.x; stretch < num_stretches; stretch += blockDim.x) {
    fill_splits(plan, stretch);
    if (given.chunk > 0) atomicMax(&header.chunk_states, chunk_states_of(made, stretch));
  }
}

// A plan by the band alone.
struct NoVisible {
  static constexpr bool kHasVisible = false;
};
struct NoHookParams {
  explicit NoHookParams(const uint64_t*) {}
};

// The range that a variant declares, with the parameters where the kernel got them.
template <typename Variant, typename HookParams>
__device__ Range visible_of(const uint64_t* hooks, const QueryTile* tile) {
  return Variant::visible(*reinterpret_cast<const HookParams*>(hooks), tile->request, tile->first, tile->last,
                          tile->kv_len);
}

template <typename Variant, typename HookParams>
__global__ void __launch_bounds__(kThreads, 1)
    planner_kernel(const __grid_constant__ PlanParams params, const __grid_constant__ PlanHeader header,
                   const __grid_constant__ HookParams hooks) {
  __shared__ Shared shared;
  const CostModel cost{params.cost_item, params.cost_item_row, params.cost_kv_tile, params.cost_row};
  PlanInput in{params.qo_indptr, params.kv_lens, cost, nullptr, nullptr, params.block_mask};
  if constexpr (Variant::kHasVisible) {
    in.visible = visible_of<Variant, HookParams>;
    in.hook_params = reinterpret_cast<const uint64_t*>(&hooks);
  }
  make_plan(params, header, in, shared);
}

}  // namespace device_planner

// Puts the planner on the stream; returns CUDA's error. qo_indptr, kv_lens, plan, prefix and the block mask lie on the
// device; hook_params on the host, like everywhere.
template <typename Variant = device_planner::NoVisible, typename HookParams = device_planner::NoHookParams>
int32_t plan_on_device(const PlanParams& params, const PlanHeader& header) {
  using namespace device_planner;
  // No more threads than there is work for: a barrier of few warps is cheaper.
  int threads = 128;
  while (threads < kThreads && threads < header.num_requests) threads *= 2;
  launch(planner_kernel<Variant, HookParams>, 1, threads, 0, params.stream, params, header,
         HookParams(params.hook_params));
  return static_cast<int32_t>(cudaGetLastError());
}

}  // namespace attnloom
