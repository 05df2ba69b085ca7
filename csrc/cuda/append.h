// What the two kinds of append share.
#pragma once

#include <cstdint>

#include "common/params.h"

namespace attnloom {

// Bits that are set in some address, stride or row size that a vector must divide.
inline uint64_t alignment_of_rows(const AppendParams& p) {
  const int64_t sizes =
      p.k_row_bytes | p.v_row_bytes | p.k_stride_token | p.k_stride_head | p.v_stride_token | p.v_stride_head;
  return static_cast<uint64_t>(sizes) | reinterpret_cast<uint64_t>(p.k) | reinterpret_cast<uint64_t>(p.v);
}
inline uint64_t alignment_of_caches(const AppendParams& p) {
  const int64_t strides = p.k_cache_stride_block | p.k_cache_stride_slot | p.k_cache_stride_head |
                          p.v_cache_stride_block | p.v_cache_stride_slot | p.v_cache_stride_head;
  return static_cast<uint64_t>(strides) | reinterpret_cast<uint64_t>(p.k_cache) | reinterpret_cast<uint64_t>(p.v_cache);
}

// append_fp8.cu; returns CUDA's error.
int32_t append_fp8(const AppendParams& params);

}  // namespace attnloom
