// Attention states (O, LSE): how partial results of one row over disjoint parts of its KV become one.
#pragma once

#include <cstdint>
#include <limits>

#include "common/math.h"
#include "cpu/vec.h"

namespace attnloom {
namespace cpu {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct RowState {
  float peak;   // largest score so far
  float total;  // sum of exp(score - peak)
};

// Folds the state that comes next, of keys after all those before, into (state, values); values are not divided by the
// totals yet. A state that saw no key changes nothing, and what it is folded into (0, and no key) becomes the first
// one: a row's bits do not depend on chunks that only other rows of its tile see. Not inlined: one code for every fold.
template <bool kSoftmax, int kDimV>
__attribute__((noinline)) void fold_state(const RowState& next, const float* next_values, RowState* state,
                                          float* values) {
  float factor = 1.0f;
  float next_factor = 1.0f;
  if constexpr (kSoftmax) {
    if (next.total == 0.0f) return;
    const float peak = math::max(state->peak, next.peak);
    factor = math::exp_nonpositive(state->peak - peak);
    next_factor = math::exp_nonpositive(next.peak - peak);
    *state = {peak, state->total * factor + next.total * next_factor};
  }
  for (int dim = 0; dim < kDimV; dim += kLanes) {
    const Vec value =
        load(next_values + dim) + Vec{};  // -0 becomes 0: a weight of 0 times a value may have either sign
    store(values + dim, fused(value, broadcast(next_factor), load(values + dim) * broadcast(factor)));
  }
}

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
