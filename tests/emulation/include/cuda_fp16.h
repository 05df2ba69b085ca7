// Stands in for CUDA's header: halves, by the compiler's own.
#pragma once

#include <cuda_runtime.h>

struct __half_raw {
  uint16_t x;
};
struct __half {
  _Float16 value;
  __half() = default;
  explicit __half(float from) : value(static_cast<_Float16>(from)) {}
};
struct __half2_raw {
  uint16_t x, y;
};
struct __half2 {
  __half x, y;
  __half2() = default;
  explicit __half2(__half2_raw raw) { std::memcpy(this, &raw, 4); }
};
inline float __half2float(__half value) { return static_cast<float>(value.value); }
inline float2 __half22float2(__half2 pair) { return {__half2float(pair.x), __half2float(pair.y)}; }
inline __half2 __floats2half2_rn(float x, float y) {
  __half2 pair;
  pair.x = __half(x);
  pair.y = __half(y);
  return pair;
}
