// The host planner's functions, as the loader calls them.

#include <vector>

#include "common/macros.h"
#include "common/params.h"
#include "planner/algorithm1.h"
#include "planner/plan.h"
#include "planner/scan.h"

using namespace attnloom;

namespace {

CostModel cost_of(const PlanParams& params) {
  return {params.cost_item, params.cost_item_row, params.cost_kv_tile, params.cost_row};
}

PlanInput input_of(const PlanParams& params) {
  return {params.qo_indptr,   params.kv_lens,   cost_of(params), reinterpret_cast<VisibleHook>(params.visible),
          params.hook_params, params.block_mask};
}

}  // namespace

// Returns the number of tiles; -1 - r when request r has a negative length; -1 - num_requests when the tiles
// exceed the header's capacity.
ATTNLOOM_EXPORT int64_t attnloom_plan_scan(const PlanParams* params, const PlanHeader* header) {
  for (int32_t request = 0; request < header->num_requests; ++request) {
    if (params->qo_indptr[request + 1] < params->qo_indptr[request] || params->kv_lens[request] < 0)
      return -1 - request;
  }
  static thread_local std::vector<int64_t> prefix;
  prefix.resize(header->tile_capacity + 1);
  *reinterpret_cast<PlanHeader*>(params->plan) = *header;
  const int64_t tiles = plan_scan(PlanView<int32_t>{params->plan}, input_of(*params), prefix.data());
  return tiles < 0 ? -1 - header->num_requests : tiles;
}

ATTNLOOM_EXPORT int64_t attnloom_plan_algorithm1(const PlanParams* params, int64_t* worker_tiles,
                                                 int64_t* worker_cost) {
  return plan_algorithm1(PlanView<const int32_t>{params->plan}, cost_of(*params), worker_tiles, worker_cost);
}

// Most queries of a request, of `count` offsets.
ATTNLOOM_EXPORT int64_t attnloom_longest(const int32_t* qo_indptr, int64_t count) {
  int32_t most = 0;
  for (int64_t request = 0; request + 1 < count; ++request) {
    const int32_t queries = qo_indptr[request + 1] - qo_indptr[request];
    most = queries > most ? queries : most;
  }
  return most;
}

// Finds a row that a kernel could not read: returns 1 and, in `where`, the row, the block and its id when the cache
// does not hold the id, or the row, -1 and its length when the row leaves the index array.
ATTNLOOM_EXPORT int32_t attnloom_find_bad_index(const LayoutTensors* layout, int64_t num_rows, int64_t num_indices,
                                                int64_t num_blocks, int64_t* where) {
  for (int64_t row = 0; row < num_rows; ++row) {
    const int32_t length = layout->lengths[row];
    const int32_t blocks = static_cast<int32_t>((length + layout->block_size - 1) / layout->block_size);
    const int64_t start = layout->starts[row];
    const bool leaves = start < 0 || start >= num_indices || layout->entry_of(blocks - 1) >= num_indices - start;
    if (length < 0 || (blocks > 0 && leaves)) {
      where[0] = row;
      where[1] = -1;
      where[2] = length;
      return 1;
    }
    const int64_t stride = layout->index_stride;
    for (int32_t block = 0; block < blocks; ++block) {
      const int32_t index = layout->indices[start + block * stride];
      if (index < 0 || index >= num_blocks) {
        where[0] = row;
        where[1] = block;
        where[2] = index;
        return 1;
      }
    }
  }
  return 0;
}

ATTNLOOM_EXPORT int64_t attnloom_params_bytes() {
  return sizeof(PlanHeader) + sizeof(PlanParams) + sizeof(LayoutTensors) + sizeof(MergeParams) + sizeof(AppendParams);
}
