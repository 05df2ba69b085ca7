// What happens once to a row, after its last merge: the sink, output_transform, and the write.
#pragma once

#include <cstdint>

#include "common/math.h"
#include "common/params.h"
#include "cpu/softmax.h"
#include "cpu/state.h"
#include "cpu/vec.h"

namespace attnloom {
namespace cpu {

template <typename Scalar, int kDimV, typename Variant, typename HookParams>
struct Epilogue {
  const HookParams& hooks;
  OutputTensor out;
  float* lse;  // or null
  int32_t num_qo_heads;

  // The state as it is, for a merge elsewhere.
  void write_state(const Row& row, int64_t token, const float* values, float row_lse) const {
    float* to = static_cast<float*>(out.data) + token * out.stride_row + row.q_head * out.stride_head;
    for (int dim = 0; dim < kDimV; ++dim) to[dim] = values[dim];
    if (lse != nullptr) lse[token * num_qo_heads + row.q_head] = row_lse;
  }

  void finish(const Row& row, int64_t token, float* values, float row_lse) const {
    if constexpr (Variant::kHasSink) {
      const float sink = Variant::sink(hooks, row.request, row.q_pos, row.q_head, row.kv_head, row.q_index);
      const float peak = math::max(row_lse, sink);
      if (peak > -kInfinity) {
        const float total = math::exp(row_lse - peak) + math::exp(sink - peak);
        const float factor = math::exp(row_lse - peak) / total;
        for (int dim = 0; dim < kDimV; ++dim) values[dim] *= factor;
        row_lse = peak + math::log(total);
      }
    }
    Scalar* to = static_cast<Scalar*>(out.data) + token * out.stride_row + row.q_head * out.stride_head;
    for (int dim = 0; dim < kDimV; ++dim) {
      float value = values[dim];
      if constexpr (Variant::kHasOutputTransform) {
        value = Variant::output_transform(hooks, static_cast<const float*>(values), dim, row.request, row.q_pos,
                                          row.q_head, row.kv_head, row.q_index);
      }
      from_float(value, to + dim);
    }
    if (lse != nullptr) lse[token * num_qo_heads + row.q_head] = row_lse;
  }
};

}  // namespace cpu
}  // namespace attnloom
