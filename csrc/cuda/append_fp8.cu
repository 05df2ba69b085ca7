// Writes new keys and values into the pages of an fp8 cache: divided by the cache's scale, rounded, held inside what
// the format has.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/params.h"
#include "cuda/append.h"
#include "cuda/prepare.h"

namespace attnloom {
namespace {

constexpr int kThreads = 128;

__device__ float widened(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ float widened(__half value) { return __half2float(value); }

template <typename Scalar, int kCount>
struct alignas(sizeof(Scalar) * kCount) Elements {
  Scalar at[kCount];
};

// One row of a token: `elements` of them for each head.
template <typename Scalar, __nv_fp8_interpretation_t kFormat, int kVector>
__device__ void convert_rows(const char* from, int64_t from_head, char* to, int64_t to_head, int heads, int elements,
                             float scale) {
  const int chunks = elements / kVector;
  for (int index = threadIdx.x; index < heads * chunks; index += kThreads) {
    const int head = index / chunks;
    const int first = index % chunks * kVector;
    const auto wide = *reinterpret_cast<const Elements<Scalar, kVector>*>(from + head * from_head +
                                                                          first * static_cast<int>(sizeof(Scalar)));
    Elements<uint8_t, kVector> narrow;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      narrow.at[i] = __nv_cvt_float_to_fp8(widened(wide.at[i]) / scale, __NV_SATFINITE, kFormat);
    }
    *reinterpret_cast<Elements<uint8_t, kVector>*>(to + head * to_head + first) = narrow;
  }
}

template <typename Scalar, __nv_fp8_interpretation_t kFormat, int kVector>
__global__ void __launch_bounds__(kThreads) append_fp8_kernel(const __grid_constant__ AppendParams p) {
  const int64_t token = blockIdx.x;
  const int64_t slot = p.slots[token];
  if (slot < 0) return;
  const int64_t block = slot / p.block_size;
  const int64_t offset = slot % p.block_size;
  const int heads = static_cast<int>(p.num_kv_heads);
  convert_rows<Scalar, kFormat, kVector>(p.k + token * p.k_stride_token, p.k_stride_head,
                                         p.k_cache + block * p.k_cache_stride_block + offset * p.k_cache_stride_slot,
                                         p.k_cache_stride_head, heads, static_cast<int>(p.k_row_bytes / sizeof(Scalar)),
                                         p.k_scale);
  convert_rows<Scalar, kFormat, kVector>(p.v + token * p.v_stride_token, p.v_stride_head,
                                         p.v_cache + block * p.v_cache_stride_block + offset * p.v_cache_stride_slot,
                                         p.v_cache_stride_head, heads, static_cast<int>(p.v_row_bytes / sizeof(Scalar)),
                                         p.v_scale);
}

using Kernel = void (*)(AppendParams);

template <typename Scalar, int kVector>
Kernel to_format(int32_t to) {
  if (to == kE4m3Element) return append_fp8_kernel<Scalar, __NV_E4M3, kVector>;
  return append_fp8_kernel<Scalar, __NV_E5M2, kVector>;
}

template <int kVector>
Kernel kernel_for(int32_t from, int32_t to) {
  return from == kBf16Element ? to_format<__nv_bfloat16, kVector>(to) : to_format<__half, kVector>(to);
}

}  // namespace

int32_t append_fp8(const AppendParams& p) {
  // Eight elements at a time: 16 bytes of a row, 8 of the cache.
  const bool wide = alignment_of_rows(p) % 16 == 0 && alignment_of_caches(p) % 8 == 0;
  const Kernel kernel = wide ? kernel_for<8>(p.from, p.to) : kernel_for<1>(p.from, p.to);
  kernel<<<static_cast<unsigned>(p.num_tokens), kThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(p);
  return static_cast<int32_t>(cudaGetLastError());
}

int32_t prepare_append_fp8() {
  int32_t error = 0;
  for (const int32_t from : {kBf16Element, kFp16Element}) {
    for (const int32_t to : {kE4m3Element, kE5m2Element}) {
      if (error == 0) error = prepare(kernel_for<8>(from, to), kernel_for<1>(from, to));
    }
  }
  return error;
}

}  // namespace attnloom
