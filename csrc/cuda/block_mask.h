// A block mask from a variant's logits_mask, evaluated on the device where its tensors lie: cpu/block_mask.h's twin.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/params.h"
#include "common/visible.h"
#include "cuda/launch.h"

namespace attnloom {
namespace cuda {

constexpr int32_t kMaskBlock = 64;  // positions of a block: the KV tile
constexpr int kMaskThreads = 256;

// A CTA per block: logits_mask at every (query, key) of it, for every query head.
template <typename Variant, typename HookParams>
__global__ void __launch_bounds__(kMaskThreads)
    block_mask_kernel(const __grid_constant__ BlockMaskParams p, const __grid_constant__ HookParams hooks) {
  const int32_t kv_block = blockIdx.x;
  const int32_t q_block = p.q_begin + blockIdx.y;
  const int32_t request = blockIdx.z;
  const int32_t heads = Variant::kMaskByHead ? p.num_qo_heads : 1;
  const int32_t group = p.num_qo_heads / p.num_kv_heads;
  bool any = false;
  bool all = true;
  for (int32_t index = threadIdx.x; index < heads * kMaskBlock * kMaskBlock; index += kMaskThreads) {
    const int32_t head = index / (kMaskBlock * kMaskBlock);
    const int32_t q = q_block * kMaskBlock + index / kMaskBlock % kMaskBlock;
    const int32_t kv = kv_block * kMaskBlock + index % kMaskBlock;
    if (q >= p.length || kv >= p.length) continue;
    const bool seen = Variant::logits_mask(hooks, request, q, kv, head, head / group, q, kv);
    any |= seen;
    all &= seen;
  }
  any = __syncthreads_or(any);
  all = __syncthreads_and(all);
  if (threadIdx.x == 0) {
    p.kinds[(static_cast<int64_t>(request) * p.q_blocks + q_block) * p.kv_blocks + kv_block] =
        !any ? kHiddenTile : (all ? kFullTile : kPartialTile);
  }
}

// Returns CUDA's error.
template <typename Variant, typename HookParams>
int32_t fill_block_mask(const BlockMaskParams& p) {
  const dim3 grid(p.kv_end, p.q_end - p.q_begin, static_cast<unsigned>(p.num_requests));
  launch(block_mask_kernel<Variant, HookParams>, grid, kMaskThreads, 0, p.stream, p, HookParams(p.hook_params));
  return static_cast<int32_t>(cudaGetLastError());
}

}  // namespace cuda
}  // namespace attnloom
