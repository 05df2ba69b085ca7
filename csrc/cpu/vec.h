// One SIMD register of floats on whatever the target has, by the compiler's vector extension.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__) || defined(__AVX512BF16__) || defined(__F16C__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace attnloom {
namespace cpu {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UintVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfBitsVec __attribute__((vector_size(kLanes * 2)));

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  _Float16 value;
};

inline __attribute__((always_inline)) Vec load(const float* from) {
  Vec value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}
inline __attribute__((always_inline)) Vec load(const Bf16* from) {
  HalfBitsVec bits;
  std::memcpy(&bits, from, sizeof(bits));
  const UintVec wide = __builtin_convertvector(bits, UintVec) << 16;
  return (Vec)wide;  // the bits, not the value
}
inline __attribute__((always_inline)) Vec load(const Fp16* from) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Vec value;
  for (int lane = 0; lane < kLanes; ++lane) value[lane] = static_cast<float>(from[lane].value);
  return value;
#endif
}

inline __attribute__((always_inline)) void store(float* to, Vec value) { std::memcpy(to, &value, sizeof(value)); }

inline __attribute__((always_inline)) Vec broadcast(float value) {
  return value - Vec{};  // x - 0 is x, signed zeros included, so that only a broadcast is left
}

// a * b + c, rounded once where the target can. Left to contraction, a compiler decides loop by loop, and the same sum
// beside another number of rows could differ in its last bit.
inline __attribute__((always_inline)) Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

inline float to_float(float value) { return value; }
inline float to_float(Bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}
inline float to_float(Fp16 value) { return static_cast<float>(value.value); }

inline void from_float(float value, float* to) { *to = value; }
inline void from_float(float value, Bf16* to) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to->bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40 : rounded);
}
inline void from_float(float value, Fp16* to) { to->value = static_cast<_Float16>(value); }

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define ATTNLOOM_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#if !defined(ATTNLOOM_SHUFFLE)  // GCC before 12
#define ATTNLOOM_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntVec{__VA_ARGS__})
#endif

template <size_t... I>
inline __attribute__((always_inline)) Vec add_neighbours(Vec a, Vec b, std::index_sequence<I...>) {
  return ATTNLOOM_SHUFFLE(a, b, static_cast<int>(2 * I)...) + ATTNLOOM_SHUFFLE(a, b, static_cast<int>(2 * I + 1)...);
}
template <size_t... I>
inline __attribute__((always_inline)) Vec interleave_low(Vec a, Vec b, std::index_sequence<I...>) {
  return ATTNLOOM_SHUFFLE(a, b, static_cast<int>(I / 2 + (I % 2) * kLanes)...);
}
template <size_t... I>
inline __attribute__((always_inline)) Vec interleave_high(Vec a, Vec b, std::index_sequence<I...>) {
  return ATTNLOOM_SHUFFLE(a, b, static_cast<int>(kLanes / 2 + I / 2 + (I % 2) * kLanes)...);
}
using AllLanes = std::make_index_sequence<kLanes>;

// Lane j of the result is the sum over the lanes of row j. Destroys the rows.
inline __attribute__((always_inline)) Vec sum_rows(Vec (&rows)[kLanes]) {
#pragma GCC unroll 8
  for (int count = kLanes; count > 1; count /= 2) {
#pragma GCC unroll 8
    for (int pair = 0; pair < count / 2; ++pair) {
      rows[pair] = add_neighbours(rows[2 * pair], rows[2 * pair + 1], AllLanes{});
    }
  }
  return rows[0];
}

// Lane i of row j becomes lane j of row i. A perfect shuffle of the rows, log2(kLanes) times.
inline __attribute__((always_inline)) void transpose(Vec (&rows)[kLanes]) {
#pragma GCC unroll 4
  for (int step = 1; step < kLanes; step *= 2) {
    Vec next[kLanes];
#pragma GCC unroll 8
    for (int pair = 0; pair < kLanes / 2; ++pair) {
      next[2 * pair] = interleave_low(rows[pair], rows[pair + kLanes / 2], AllLanes{});
      next[2 * pair + 1] = interleave_high(rows[pair], rows[pair + kLanes / 2], AllLanes{});
    }
#pragma GCC unroll 16
    for (int row = 0; row < kLanes; ++row) rows[row] = next[row];
  }
}

}  // namespace cpu
}  // namespace attnloom
