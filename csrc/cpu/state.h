// Attention states (O, LSE): how partial results of one row over disjoint parts of its KV become one.
#pragma once

#include <cstdint>
#include <limits>

#include "common/math.h"

namespace attnloom {
namespace cpu {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Merges `count` states of one row in the order of i: value_of(i) gives the values of state i, or null where there
// is none, lse_of(i) its LSE. kSoftmax false: states add. Returns the LSE of the merged row.
template <bool kSoftmax, typename ValueOf, typename LseOf>
inline float merge_row(int64_t count, ValueOf value_of, LseOf lse_of, int64_t dims, float* out) {
  float peak = -kInfinity;
  float total = 0.0f;
  if constexpr (kSoftmax) {
    for (int64_t i = 0; i < count; ++i) {
      if (value_of(i) != nullptr) peak = math::max(peak, lse_of(i));
    }
    for (int64_t i = 0; i < count && peak > -kInfinity; ++i) {
      if (value_of(i) != nullptr) total += math::exp(lse_of(i) - peak);
    }
  }
  for (int64_t dim = 0; dim < dims; ++dim) out[dim] = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float* value = value_of(i);
    if (value == nullptr) continue;
    float weight = 1.0f;
    if constexpr (kSoftmax) {
      if (!(lse_of(i) > -kInfinity)) continue;  // it saw no key
      weight = math::exp(lse_of(i) - peak) / total;
    }
#pragma omp simd
    for (int64_t dim = 0; dim < dims; ++dim) out[dim] += weight * value[dim];
  }
  return peak > -kInfinity ? peak + math::log(total) : -kInfinity;
}

}  // namespace cpu
}  // namespace attnloom
