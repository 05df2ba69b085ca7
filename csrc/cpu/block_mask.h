// A block mask from a variant's logits_mask: what FlexAttention calls create_block_mask (arXiv 2412.05496).
#pragma once

#include <cstdint>

#include "common/params.h"
#include "cpu/products.h"

namespace attnloom {
namespace cpu {

// Kind of one block: logits_mask at every (query, key) of it, for every query head.
template <typename Variant, typename HookParams>
TileKind kind_of_block(const HookParams& hooks, const BlockMaskParams& p, int32_t request, int32_t q_block,
                       int32_t kv_block) {
  const int32_t q_end = math::min((q_block + 1) * kTileKv, p.length);
  const int32_t kv_end = math::min((kv_block + 1) * kTileKv, p.length);
  const int32_t heads = Variant::kMaskByHead ? p.num_qo_heads : 1;
  const int32_t group = p.num_qo_heads / p.num_kv_heads;
  int32_t seen = 0;
  for (int32_t head = 0; head < heads; ++head) {
    for (int32_t q = q_block * kTileKv; q < q_end; ++q) {
#pragma omp simd reduction(+ : seen)
      for (int32_t kv = kv_block * kTileKv; kv < kv_end; ++kv) {
        seen += Variant::logits_mask(hooks, request, q, kv, head, head / group, q, kv) ? 1 : 0;
      }
    }
  }
  const int32_t all = heads * (q_end - q_block * kTileKv) * (kv_end - kv_block * kTileKv);
  return seen == 0 ? kHiddenTile : (seen == all ? kFullTile : kPartialTile);
}

template <typename Variant, typename HookParams>
int32_t fill_block_mask(const BlockMaskParams& p) {
  const HookParams hooks(p.hook_params);
#pragma omp parallel for collapse(2) schedule(dynamic, 4) num_threads(p.num_threads) if (p.num_threads > 1)
  for (int64_t request = 0; request < p.num_requests; ++request) {
    for (int32_t q_block = p.q_begin; q_block < p.q_end; ++q_block) {
      for (int32_t kv_block = 0; kv_block < p.kv_end; ++kv_block) {
        p.kinds[(request * p.q_blocks + q_block) * p.kv_blocks + kv_block] =
            kind_of_block<Variant>(hooks, p, static_cast<int32_t>(request), q_block, kv_block);
      }
    }
  }
  return 0;
}

}  // namespace cpu
}  // namespace attnloom
