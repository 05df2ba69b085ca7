// The element types: the two 16-bit ones that the tensor cores multiply, and the 8-bit ones that caches may hold.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "sm80/ptx.h"

namespace attnloom {
namespace sm80 {

template <typename Scalar>
struct Half;  // what differs between the two 16-bit types

template <>
struct Half<__nv_bfloat16> {
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<uint32_t&>(pair);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t bits) {
    return __bfloat1622float2(reinterpret_cast<__nv_bfloat162&>(bits));
  }
  static __device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
  static __device__ __forceinline__ uint32_t from_half2(__half2 pair) {
    const float2 both = __half22float2(pair);
    return pack(both.x, both.y);
  }
  // c[16x8] += a[16x16] b[16x8]
  static __device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    multiply_bf16(c, a, b0, b1);
  }
};

template <>
struct Half<__half> {
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<uint32_t&>(pair);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t bits) {
    return __half22float2(reinterpret_cast<__half2&>(bits));
  }
  static __device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
  static __device__ __forceinline__ uint32_t from_half2(__half2 pair) { return reinterpret_cast<uint32_t&>(pair); }
  static __device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    multiply_f16(c, a, b0, b1);
  }
};

// 8-bit types: how one is read.
template <typename Kv>
struct Eighth;
template <>
struct Eighth<__nv_fp8_e4m3> {
  static constexpr __nv_fp8_interpretation_t kKind = __NV_E4M3;
};
template <>
struct Eighth<__nv_fp8_e5m2> {
  static constexpr __nv_fp8_interpretation_t kKind = __NV_E5M2;
};

// The two 8-bit elements in the low half of `bits` as a pair of Scalar, exactly.
template <typename Scalar, typename Kv>
__device__ __forceinline__ uint32_t widen(uint32_t bits) {
  const __half2_raw raw =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bits & 0xffff), Eighth<Kv>::kKind);
  return Half<Scalar>::from_half2(__half2(raw));
}

template <typename Scalar>
__device__ __forceinline__ float as_float(Scalar value) {
  if constexpr (sizeof(Scalar) == 1) {
    return static_cast<float>(value);
  } else {
    return Half<Scalar>::to_float(value);
  }
}

}  // namespace sm80
}  // namespace attnloom
