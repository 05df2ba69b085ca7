// Writes new keys and values into the pages of a cache: a CTA per token, vectors as wide as addresses and strides
// allow.

#include <cuda_runtime.h>

#include <cstdint>

#include "common/macros.h"
#include "common/params.h"
#include "cuda/append.h"
#include "cuda/prepare.h"

namespace {

using attnloom::AppendParams;

constexpr int kThreads = 128;

template <typename Vector>
__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ AppendParams p) {
  const int64_t token = blockIdx.x;
  const int64_t slot = p.slots[token];
  if (slot < 0) return;
  const int64_t block = slot / p.block_size;
  const int64_t offset = slot % p.block_size;
  const char* k = p.k + token * p.k_stride_token;
  const char* v = p.v + token * p.v_stride_token;
  char* k_to = p.k_cache + block * p.k_cache_stride_block + offset * p.k_cache_stride_slot;
  char* v_to = p.v_cache + block * p.v_cache_stride_block + offset * p.v_cache_stride_slot;
  const int k_chunks = static_cast<int>(p.k_row_bytes / sizeof(Vector));
  const int v_chunks = static_cast<int>(p.v_row_bytes / sizeof(Vector));
  const int chunks = max(k_chunks, v_chunks);
  const int count = static_cast<int>(p.num_kv_heads) * chunks;
  for (int index = threadIdx.x; index < count; index += kThreads) {
    const int head = index / chunks;
    const int64_t at = static_cast<int64_t>(index % chunks) * sizeof(Vector);
    const bool has_k = index % chunks < k_chunks;
    const bool has_v = index % chunks < v_chunks;
    Vector key;  // both loads are in flight before either is written
    Vector value;
    if (has_k) key = *reinterpret_cast<const Vector*>(k + head * p.k_stride_head + at);
    if (has_v) value = *reinterpret_cast<const Vector*>(v + head * p.v_stride_head + at);
    if (has_k) *reinterpret_cast<Vector*>(k_to + head * p.k_cache_stride_head + at) = key;
    if (has_v) *reinterpret_cast<Vector*>(v_to + head * p.v_cache_stride_head + at) = value;
  }
}

}  // namespace

namespace attnloom {
int32_t prepare_append() {
  return prepare(append_kernel<uint4>, append_kernel<uint2>, append_kernel<uint32_t>, append_kernel<uint16_t>,
                 append_kernel<uint8_t>);
}
}  // namespace attnloom

// Returns CUDA's error.
ATTNLOOM_EXPORT int32_t attnloom_append(const AppendParams* params) {
  const AppendParams& p = *params;
  if (p.to != attnloom::kSameElement) return attnloom::append_fp8(p);
  const uint64_t bits = attnloom::alignment_of_rows(p) | attnloom::alignment_of_caches(p);
  const auto kernel = bits % 16 == 0  ? append_kernel<uint4>
                      : bits % 8 == 0 ? append_kernel<uint2>
                      : bits % 4 == 0 ? append_kernel<uint32_t>
                      : bits % 2 == 0 ? append_kernel<uint16_t>
                                      : append_kernel<uint8_t>;
  kernel<<<static_cast<unsigned>(p.num_tokens), kThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(p);
  return static_cast<int32_t>(cudaGetLastError());
}
