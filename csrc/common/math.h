// Scalar functions that hooks call: branch-free, so that a loop over them becomes vector code on a CPU, and in a
// namespace of their own, so that a hook's `exp` never means the double one.
//
// exp and expm1 reduce to |r| <= ln(2) / 2 and take the Taylor series of exp(r) - 1 to the seventh power, whose
// remainder r^8 / 8! is below half a unit in the last place; tanh follows from expm1, without cancellation at 0.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "common/macros.h"

namespace attnloom {
namespace math {

ATTNLOOM_HD float bits_to_float(int32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
ATTNLOOM_HD int32_t float_to_bits(float value) {
  int32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

ATTNLOOM_HD float abs(float x) { return bits_to_float(float_to_bits(x) & 0x7fffffff); }
ATTNLOOM_HD int32_t abs(int32_t x) { return x < 0 ? -x : x; }
template <typename T>
ATTNLOOM_HD T min(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
ATTNLOOM_HD T max(T a, T b) {
  return a < b ? b : a;
}
ATTNLOOM_HD float copysign(float magnitude, float sign) {
  return bits_to_float((float_to_bits(magnitude) & 0x7fffffff) |
                       (float_to_bits(sign) & static_cast<int32_t>(0x80000000u)));
}

struct Reduced {  // x = n * ln(2) + r
  float n;
  float expm1_r;
  int32_t exponent_bits;  // 2^n
};

ATTNLOOM_HD Reduced reduce(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const float shifted = x * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  float r = x - n * 0.693359375f;  // ln(2) in two parts, the first exact in few bits
  r = r - n * -2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r * r + r;
  return {n, p, (float_to_bits(shifted) - float_to_bits(kRound) + 127) << 23};
}

// exp(x); 0 below the smallest normal result, so that exp(-inf) is 0 exactly; inf above the largest.
ATTNLOOM_HD float exp(float x) {
  const float low = -87.33654f;
  const float high = 88.37626f;
  const float inside = x < low ? low : (x > high ? high : x);
  const Reduced reduced = reduce(inside);
  const float scale = bits_to_float(reduced.exponent_bits);
  const float value = reduced.expm1_r * scale + scale;
  const float upper = x > high ? std::numeric_limits<float>::infinity() : value;
  const float result = x < low ? 0.0f : upper;
  return x != x ? x : result;
}

// exp(x) for x <= 0: the weight of a score below the row's peak. -inf gives 0, NaN gives NaN.
ATTNLOOM_HD float exp_nonpositive(float x) {
  const float low = -87.33654f;
  const Reduced reduced = reduce(x < low ? low : x);
  const float scale = bits_to_float(reduced.exponent_bits);
  const float value = reduced.expm1_r * scale + scale;
  return x < low ? 0.0f : value;
}

// exp(x) - 1 for x in [-20, 80], accurate near 0.
ATTNLOOM_HD float expm1_inside(float x) {
  const Reduced reduced = reduce(x);
  const float scale = bits_to_float(reduced.exponent_bits);
  return reduced.expm1_r * scale + (scale - 1.0f);
}

ATTNLOOM_HD float tanh(float x) {
  const float magnitude = min(abs(x), 10.0f);  // tanh(10) is 1 in float32
  const float e = expm1_inside(2.0f * magnitude);
  const float result = copysign(e / (e + 2.0f), x);
  return x != x ? x : result;
}

ATTNLOOM_HD float sigmoid(float x) {
  const float e = exp(-abs(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

ATTNLOOM_HD float log(float x) { return __builtin_logf(x); }
ATTNLOOM_HD float log2(float x) { return __builtin_log2f(x); }
ATTNLOOM_HD float exp2(float x) { return exp(x * 0.693147180559945309f); }
ATTNLOOM_HD float sqrt(float x) { return __builtin_sqrtf(x); }
ATTNLOOM_HD float floor(float x) { return __builtin_floorf(x); }
ATTNLOOM_HD float sin(float x) { return __builtin_sinf(x); }
ATTNLOOM_HD float cos(float x) { return __builtin_cosf(x); }
ATTNLOOM_HD float pow(float x, float y) { return __builtin_powf(x, y); }
ATTNLOOM_HD float where(bool condition, float a, float b) { return condition ? a : b; }

}  // namespace math
}  // namespace attnloom
