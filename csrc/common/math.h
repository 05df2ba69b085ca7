// Scalar functions that hooks call: branch-free, so that a loop over them becomes vector code on a CPU, and in a
// namespace of their own, so that a hook's `exp` never means the double one.
//
// exp and its kin reduce to |r| <= ln(2) / 2 and take the Taylor series of exp(r) - 1 to the seventh power, whose
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

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargest = std::numeric_limits<float>::max();

ATTNLOOM_HD double bits_to_double(int64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
ATTNLOOM_HD int64_t double_to_bits(double value) {
  int64_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

ATTNLOOM_HD float abs(float x) { return bits_to_float(float_to_bits(x) & 0x7fffffff); }
ATTNLOOM_HD int32_t abs(int32_t x) { return x < 0 ? -x : x; }
ATTNLOOM_HD int64_t abs(int64_t x) { return x < 0 ? -x : x; }
template <typename T>
ATTNLOOM_HD T min(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
ATTNLOOM_HD T max(T a, T b) {
  return a < b ? b : a;
}
// As torch's minimum and maximum: NaN if either is.
ATTNLOOM_HD float minimum(float a, float b) { return (a < b) | (a != a) ? a : b; }
ATTNLOOM_HD float maximum(float a, float b) { return (a > b) | (a != a) ? a : b; }
ATTNLOOM_HD float sign(float x) { return static_cast<float>((x > 0.0f) - (x < 0.0f)); }
ATTNLOOM_HD float copysign(float magnitude, float sign) {
  return bits_to_float((float_to_bits(magnitude) & 0x7fffffff) |
                       (float_to_bits(sign) & static_cast<int32_t>(0x80000000u)));
}

// x between low < 0 and high > 0; a NaN becomes one of them. By the order of bit patterns, which is that of floats away
// from 0: integers have a minimum without a choice, so that it leaves the loop where x is the same for all columns.
ATTNLOOM_HD float clamped(float x, float low, float high) {
  const int32_t below = min(float_to_bits(x), float_to_bits(high));
  const uint32_t inside = min(static_cast<uint32_t>(below), static_cast<uint32_t>(float_to_bits(low)));
  return bits_to_float(static_cast<int32_t>(inside));
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

// exp(x); 0 below the smallest normal result, so that exp(-inf) is 0 exactly; inf above the largest. Clamped at ends
// that have these results by themselves: at -88 the scale is 0, at 89 the product overflows.
ATTNLOOM_HD float exp(float x) {
  const Reduced reduced = reduce(clamped(x, -88.0f, 89.0f));
  const bool top = reduced.n > 127.0f;  // 2^128 is no float: half of it, twice
  const float scale = bits_to_float(reduced.exponent_bits - (top ? 1 << 23 : 0));
  const float value = (reduced.expm1_r * scale + scale) * (top ? 2.0f : 1.0f);
  return x != x ? x : value;
}

// exp(x) for x <= 0: the weight of a score below the row's peak. -inf gives 0, NaN gives NaN.
ATTNLOOM_HD float exp_nonpositive(float x) {
  const Reduced reduced = reduce(x < -88.0f ? -88.0f : x);
  const float scale = bits_to_float(reduced.exponent_bits);
  return reduced.expm1_r * scale + scale;
}

// exp(x) - 1 for x in [-20, 80], accurate near 0.
ATTNLOOM_HD float expm1_inside(float x) {
  const Reduced reduced = reduce(x);
  const float scale = bits_to_float(reduced.exponent_bits);
  return reduced.expm1_r * scale + (scale - 1.0f);
}
ATTNLOOM_HD float expm1(float x) {
  const float value = expm1_inside(clamped(x, -20.0f, 80.0f));
  return abs(x) <= 80.0f ? value : exp(x) - 1.0f;
}

// 2^(n + r) for an integer n in [-126, 128] and |r| <= 1/2; 0 for n = -126. Half of the power and twice the rest: 2^128
// is no float.
ATTNLOOM_HD float exp2_of(int32_t n, float r) {
  const float x = r * 0.693147180559945309f;
  float p = 1.0f / 5040;
  p = p * x + 1.0f / 720;
  p = p * x + 1.0f / 120;
  p = p * x + 1.0f / 24;
  p = p * x + 1.0f / 6;
  p = p * x + 0.5f;
  p = p * x * x + x;
  return (p + 1.0f) * 2.0f * bits_to_float((n + 126) << 23);
}

// The integer part goes into the exponent, so that no rounding grows with x.
ATTNLOOM_HD float exp2(float x) {
  constexpr float kRound = 12582912.0f;
  const float inside = clamped(x, -126.0f, 128.0f);
  const float shifted = inside + kRound;
  const float value = exp2_of(float_to_bits(shifted) - float_to_bits(kRound), inside - (shifted - kRound));
  return x != x ? x : value;
}

ATTNLOOM_HD float tanh(float x) {
  const float magnitude = abs(x) > 10.0f ? 10.0f : abs(x);  // tanh(10) is 1 in float32
  const float e = expm1_inside(2.0f * magnitude);
  return copysign(e / (e + 2.0f), x);
}

ATTNLOOM_HD float sigmoid(float x) {
  const float e = exp(-abs(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

// x = 2^e * m with m in [sqrt(1/2), sqrt(2)); log(m) is an odd series in (m - 1) / (m + 1).
struct Mantissa {
  float exponent;
  float log_m;
};
ATTNLOOM_HD Mantissa log_reduce(float x) {
  const bool small = x < 1.17549435e-38f;  // subnormal: scaled up by 2^24
  const float scaled = small ? x * 16777216.0f : x;
  const int32_t bits = float_to_bits(scaled) - 0x3f3504f3;
  const int32_t exponent = bits >> 23;
  const float m = bits_to_float((bits & 0x007fffff) + 0x3f3504f3);
  const float s = (m - 1.0f) / (m + 1.0f);
  const float z = s * s;
  float p = 2.0f / 11;
  p = p * z + 2.0f / 9;
  p = p * z + 2.0f / 7;
  p = p * z + 2.0f / 5;
  p = p * z + 2.0f / 3;
  // log(m) = 2 s + s z p, with the rounding of 2 s taken out: 2 s = f - s f for f = m - 1.
  const float f = m - 1.0f;
  return {static_cast<float>(exponent - (small ? 24 : 0)), f - s * (f - z * p)};
}
// -inf at 0, NaN below, inf at inf. By bits, not by a choice after a choice: what a compiler makes of two of them it
// does not vectorise where x is the same for all columns.
ATTNLOOM_HD float log_limits(float x, float value) {
  const float reached = x > kLargest ? x : value;
  const int32_t defined = -static_cast<int32_t>(x > 0.0f);
  const float undefined = __builtin_sqrtf(x) - kInf;
  return bits_to_float((float_to_bits(reached) & defined) | (float_to_bits(undefined) & ~defined));
}
ATTNLOOM_HD float log(float x) {
  const Mantissa reduced = log_reduce(x);
  // ln(2) in two parts, the first exact times any exponent.
  return log_limits(x, reduced.exponent * 0.693359375f + (reduced.exponent * -2.12194440e-4f + reduced.log_m));
}
ATTNLOOM_HD float log2(float x) {
  const Mantissa reduced = log_reduce(x);
  return log_limits(x, reduced.exponent + reduced.log_m * 1.44269504088896341f);
}
ATTNLOOM_HD float log1p(float x) {
  const float y = 1.0f + x;
  const float error = x - (y - 1.0f);  // what the sum lost
  const float value = log(y);
  const float corrected = (y > 3e38f) | (y <= 0.0f) ? value : value + error / y;
  return y == 1.0f ? x : corrected;
}

// x = n * pi / 2 + r, in double: exact enough for angles up to 2^30. shift 0 gives sin(x), 1 gives cos(x).
ATTNLOOM_HD float sin_shifted(float x, int64_t shift) {
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  const double wide = static_cast<double>(x);
  const double rounded = wide * 0.63661977236758134308 + kRound;
  const float r = static_cast<float>(wide - (rounded - kRound) * 1.57079632679489661923);
  const int32_t quadrant = static_cast<int32_t>(double_to_bits(rounded) + shift);
  const float z = r * r;
  float sine = 1.0f / 362880;
  sine = sine * z - 1.0f / 5040;
  sine = sine * z + 1.0f / 120;
  sine = sine * z - 1.0f / 6;
  sine = sine * z * r + r;
  float cosine = -1.0f / 3628800;
  cosine = cosine * z + 1.0f / 40320;
  cosine = cosine * z - 1.0f / 720;
  cosine = cosine * z + 1.0f / 24;
  cosine = cosine * z * z + (1.0f - 0.5f * z);
  const float value = quadrant & 1 ? cosine : sine;
  const float result = quadrant & 2 ? -value : value;
  return abs(x) <= 1073741824.0f ? result : kNan;
}
ATTNLOOM_HD float sin(float x) { return sin_shifted(x, 0); }
ATTNLOOM_HD float cos(float x) { return sin_shifted(x, 1); }

ATTNLOOM_HD float sqrt(float x) { return __builtin_sqrtf(x); }
ATTNLOOM_HD float floor(float x) { return __builtin_floorf(x); }
ATTNLOOM_HD float ceil(float x) { return __builtin_ceilf(x); }
ATTNLOOM_HD float trunc(float x) { return __builtin_truncf(x); }
ATTNLOOM_HD float round(float x) { return __builtin_rintf(x); }  // halves to even
ATTNLOOM_HD float erf(float x) { return __builtin_erff(x); }

// x^y = 2^(y * log2(x)), the product in double: an error of log2(x) counts y times, a rounding of the product not at
// all.
ATTNLOOM_HD float pow(float x, float y) {
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  const Mantissa reduced = log_reduce(abs(x));
  const double log2_x =
      static_cast<double>(reduced.exponent) + static_cast<double>(reduced.log_m) * 1.44269504088896341;
  const double product = static_cast<double>(y) * log2_x;
  const double below = product > 128.0 ? 128.0 : product;
  const double power = product < -125.5 ? -125.5 : below;
  const double shifted = power + kRound;
  const int32_t n = static_cast<int32_t>(double_to_bits(shifted));
  const float finite = exp2_of(n, static_cast<float>(power - (shifted - kRound)));
  const float upper = product >= 128.0 ? kInf : finite;
  const float value = product < -125.5 ? 0.0f : upper;
  const float at_limit = (x == 0.0f) != (y < 0.0f) ? 0.0f : kInf;  // of |x| 0 or infinite
  const float size = (x == 0.0f) | (abs(x) == kInf) ? at_limit : value;
  const bool whole = floor(y) == y;
  const bool odd = whole & (floor(0.5f * y) != 0.5f * y);
  const float negative = whole ? (odd ? -size : size) : kNan;
  const float result = (x < 0.0f) ? negative : size;
  const float known = (x != x) | (y != y) ? kNan : result;
  return (y == 0.0f) | (x == 1.0f) ? 1.0f : known;
}

// Conversions that SIMD without 64-bit integers has not: through a double's mantissa, for |x| up to 2^51.
ATTNLOOM_HD int64_t wide_int(float x) {
  constexpr double kBias = 6755399441055744.0;
  const double limit = 2251799813685248.0;
  const double whole = static_cast<double>(trunc(x));
  const double below = whole > limit ? limit : whole;
  const double within = below < -limit ? -limit : below;
  const double inside = whole != whole ? 0.0 : within;
  return double_to_bits(inside + kBias) - double_to_bits(kBias);
}
ATTNLOOM_HD float wide_float(int64_t x) {
  constexpr double kBias = 6755399441055744.0;
  return static_cast<float>(bits_to_double(x + double_to_bits(kBias)) - kBias);
}

// Division that rounds down, as Python's and torch's; by 0 it gives some number and no trap. Quotients of 32-bit
// integers are exact in double, and vectorise there.
ATTNLOOM_HD int32_t floor_div(int32_t a, int32_t b) {
  return static_cast<int32_t>(__builtin_floor(static_cast<double>(a) / static_cast<double>(b)));
}
ATTNLOOM_HD int64_t floor_div(int64_t a, int64_t b) {
  const int64_t by = b == 0 ? 1 : b;
  const int64_t quotient = by == -1 ? -a : a / by;
  return quotient - ((quotient * by != a) & ((a < 0) != (by < 0)));
}
ATTNLOOM_HD int32_t trunc_div(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<double>(a) / static_cast<double>(b));
}
ATTNLOOM_HD int64_t trunc_div(int64_t a, int64_t b) { return b == 0 ? 0 : (b == -1 ? -a : a / b); }
template <typename T>
ATTNLOOM_HD T floor_mod(T a, T b) {
  return a - floor_div(a, b) * b;
}
template <typename T>
ATTNLOOM_HD T trunc_mod(T a, T b) {
  return a - trunc_div(a, b) * b;
}
ATTNLOOM_HD float trunc_mod(float a, float b) { return __builtin_fmodf(a, b); }
ATTNLOOM_HD float floor_mod(float a, float b) {
  const float rest = trunc_mod(a, b);
  return (rest != 0.0f) & ((rest < 0.0f) != (b < 0.0f)) ? rest + b : rest;
}
ATTNLOOM_HD float floor_div(float a, float b) {
  const float whole = (a - floor_mod(a, b)) / b;  // an integer but for its rounding
  return b == 0.0f ? a / b : round(whole);
}

// Shifts by any number of bits: what leaves the integer is lost.
template <typename T>
ATTNLOOM_HD T shift_left(T x, T bits) {
  constexpr T kBits = 8 * sizeof(T);
  const T by = bits < 0 ? kBits : bits;
  return by < kBits ? static_cast<T>(static_cast<uint64_t>(x) << by) : T(0);
}
template <typename T>
ATTNLOOM_HD T shift_right(T x, T bits) {
  constexpr T kBits = 8 * sizeof(T);
  return x >> ((bits < 0) | (bits >= kBits) ? kBits - 1 : bits);
}

ATTNLOOM_HD float where(bool condition, float a, float b) { return condition ? a : b; }
ATTNLOOM_HD float softplus(float x) { return x > 20.0f ? x : log1p(exp(x)); }

}  // namespace math
}  // namespace attnloom
