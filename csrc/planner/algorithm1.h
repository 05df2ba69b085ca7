// Algorithm 1 of FlashInfer (Ye et al., MLSys 2025, arXiv 2501.01005, section 3.3): bound the KV chunk, sort the
// chunks, longest first to the least loaded worker. Serial, host only: the yardstick for the scan's makespan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "planner/scan.h"

namespace attnloom {

// Schedules the query tiles of `plan` (already filled in by the scan). Writes the executed KV tiles and the cost
// of each worker; returns the number of chunks.
inline int64_t plan_algorithm1(PlanView<const int32_t> plan, const CostModel& cost, int64_t* worker_tiles,
                               int64_t* worker_cost) {
  const PlanHeader& header = plan.header();
  int64_t all_tiles = 0;
  for (int32_t tile = 0; tile < header.num_tiles; ++tile) {
    all_tiles += static_cast<int64_t>(plan.tile_kv_tiles()[tile]) * header.num_kv_heads;
  }
  const int64_t bound = std::max<int64_t>(1, (all_tiles + header.num_workers - 1) / header.num_workers);

  struct Chunk {
    int64_t cost;
    int64_t kv_tiles;
  };
  std::vector<Chunk> chunks;
  for (int32_t tile = 0; tile < header.num_tiles; ++tile) {
    const int32_t rows = plan.tile_rows()[tile];
    for (int32_t head = 0; head < header.num_kv_heads; ++head) {
      int64_t left = plan.tile_kv_tiles()[tile];
      do {
        const int64_t kv_tiles = std::min(left, bound);
        chunks.push_back({item_cost(cost, rows, static_cast<int32_t>(kv_tiles)), kv_tiles});
        left -= kv_tiles;
      } while (left > 0);
    }
  }
  std::sort(chunks.begin(), chunks.end(), [](const Chunk& a, const Chunk& b) { return a.cost > b.cost; });

  using Load = std::pair<int64_t, int32_t>;  // (cost so far, worker)
  std::priority_queue<Load, std::vector<Load>, std::greater<Load>> least_loaded;
  for (int32_t worker = 0; worker < header.num_workers; ++worker) {
    worker_tiles[worker] = worker_cost[worker] = 0;
    least_loaded.push({0, worker});
  }
  for (const Chunk& chunk : chunks) {
    const Load load = least_loaded.top();
    least_loaded.pop();
    worker_tiles[load.second] += chunk.kv_tiles;
    worker_cost[load.second] = load.first + chunk.cost;
    least_loaded.push({load.first + chunk.cost, load.second});
  }
  return static_cast<int64_t>(chunks.size());
}

}  // namespace attnloom
