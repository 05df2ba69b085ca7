// Stands in for CUDA's header: halves.
#pragma once

#include <cuda_runtime.h>

// A half's bits shifted are a float's of a smaller exponent, subnormal ones too; 31 is that of infinities and NaN.
inline float emulated_half(uint16_t bits) {
  const int32_t sign = (bits & 0x8000) << 16, size = (bits & 0x7fff) << 13;
  const float scaled = __int_as_float(size) * 0x1p112f;
  const int32_t value = size < 31 << 23 ? __float_as_int(scaled) : size | 0x7f800000;
  return __int_as_float(sign | value);
}
// Rounds to nearest even. Below the normal halves the last place is 2^-24 everywhere.
inline uint16_t emulated_half_bits(float value) {
  const uint32_t whole = static_cast<uint32_t>(__float_as_int(value));
  const uint32_t sign = whole >> 16 & 0x8000, size = whole & 0x7fffffff;
  if (value != value) return 0x7fff;
  if (size < 113u << 23) return sign | static_cast<uint32_t>(std::nearbyint(std::fabs(value) * 0x1p24f));
  const uint32_t rounded = (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13;
  return sign | min(rounded, 0x7c00u);
}
struct __half {
  uint16_t bits;
  __half() = default;
  explicit __half(float from) : bits(emulated_half_bits(from)) {}
};
struct __half2_raw {
  uint16_t x, y;
};
struct __half2 {
  __half x, y;
  __half2() = default;
  explicit __half2(__half2_raw raw) { std::memcpy(this, &raw, 4); }
};
inline float __half2float(__half value) { return emulated_half(value.bits); }
inline float2 __half22float2(__half2 pair) { return {__half2float(pair.x), __half2float(pair.y)}; }
inline __half2 __floats2half2_rn(float x, float y) {
  __half2 pair;
  pair.x = __half(x);
  pair.y = __half(y);
  return pair;
}
