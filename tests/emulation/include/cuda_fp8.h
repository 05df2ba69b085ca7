// Stands in for CUDA's header: 8-bit floats (OCP 8-bit Floating Point Specification).
#pragma once

#include <cuda_fp16.h>

enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
using __nv_fp8x2_storage_t = uint16_t;

// E5M2 is the upper half of a half. E4M3 has a bias of 7, NaN where all bits are set, and no infinity.
inline float emulated_fp8(uint8_t bits, __nv_fp8_interpretation_t kind) {
  if (kind == __NV_E5M2) return emulated_half(static_cast<uint16_t>(bits << 8));
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                             : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  if ((bits & 127) == 127) size = std::numeric_limits<float>::quiet_NaN();
  return bits & 128 ? -size : size;
}
struct __nv_fp8_e4m3 {
  uint8_t bits;
  explicit operator float() const { return emulated_fp8(bits, __NV_E4M3); }
};
struct __nv_fp8_e5m2 {
  uint8_t bits;
  explicit operator float() const { return emulated_fp8(bits, __NV_E5M2); }
};
inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t pair, __nv_fp8_interpretation_t kind) {
  const __half2 both = __floats2half2_rn(emulated_fp8(pair & 255, kind), emulated_fp8(pair >> 8, kind));
  __half2_raw raw;
  std::memcpy(&raw, &both, 4);
  return raw;
}
