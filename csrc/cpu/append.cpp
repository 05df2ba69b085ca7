// Writes new keys and values into the pages of a cache.

#include <cstring>

#include "common/macros.h"
#include "common/params.h"

using attnloom::AppendParams;

ATTNLOOM_EXPORT int32_t attnloom_append(const AppendParams* params) {
  const AppendParams& p = *params;
#pragma omp parallel for num_threads(p.num_threads) if (p.num_threads > 1)
  for (int64_t token = 0; token < p.num_tokens; ++token) {
    const int64_t slot = p.slots[token];
    if (slot < 0) continue;
    const int64_t block = slot / p.block_size;
    const int64_t offset = slot % p.block_size;
    char* k = p.k_cache + block * p.k_cache_stride_block + offset * p.k_cache_stride_slot;
    char* v = p.v_cache + block * p.v_cache_stride_block + offset * p.v_cache_stride_slot;
    for (int64_t head = 0; head < p.num_kv_heads; ++head) {
      std::memcpy(k + head * p.k_cache_stride_head, p.k + token * p.k_stride_token + head * p.k_stride_head,
                  p.k_row_bytes);
      std::memcpy(v + head * p.v_cache_stride_head, p.v + token * p.v_stride_token + head * p.v_stride_head,
                  p.v_row_bytes);
    }
  }
  return 0;
}
