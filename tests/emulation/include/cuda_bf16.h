// Stands in for CUDA's header: bfloat16, the upper half of a float, rounded to nearest even.
#pragma once

#include <cuda_runtime.h>

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float from) {
    const uint32_t whole = static_cast<uint32_t>(__float_as_int(from));
    bits = from != from ? 0x7fff : static_cast<uint16_t>((whole + 0x7fff + (whole >> 16 & 1)) >> 16);
  }
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float __bfloat162float(__nv_bfloat16 value) { return __int_as_float(static_cast<int32_t>(value.bits) << 16); }
inline float2 __bfloat1622float2(__nv_bfloat162 pair) { return {__bfloat162float(pair.x), __bfloat162float(pair.y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
