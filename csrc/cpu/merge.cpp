// merge_states: the associative operator of attention states, for ranks, levels and splits merged by the caller.

#include "common/macros.h"
#include "common/params.h"
#include "cpu/state.h"

using attnloom::MergeParams;

ATTNLOOM_EXPORT int32_t attnloom_merge(const MergeParams* params) {
  const MergeParams& p = *params;
#pragma omp parallel for num_threads(p.num_threads) if (p.num_threads > 1)
  for (int64_t row = 0; row < p.rows; ++row) {
    const auto value_of = [&p, row](int64_t i) { return p.outs + (i * p.rows + row) * p.head_dim_v; };
    const auto lse_of = [&p, row](int64_t i) { return p.lses[i * p.rows + row]; };
    float* out = p.out + row * p.head_dim_v;
    if (p.lses == nullptr) {
      attnloom::cpu::merge_row<false>(p.num_states, value_of, lse_of, p.head_dim_v, out);
    } else {
      p.lse[row] = attnloom::cpu::merge_row<true>(p.num_states, value_of, lse_of, p.head_dim_v, out);
    }
  }
  return 0;
}
