// merge_states on a GPU: the associative operator of attention states. A warp per row, states in the order given.

#include <cuda_runtime.h>

#include <cstdint>

#include "common/macros.h"
#include "common/params.h"
#include "cuda/prepare.h"

namespace {

using attnloom::MergeParams;

constexpr int kWarps = 4;

__global__ void __launch_bounds__(32 * kWarps) merge_kernel(const __grid_constant__ MergeParams p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= p.rows) return;
  const float no_key = __int_as_float(0xff800000);  // -inf
  float peak = no_key;
  float total = 0.0f;
  if (p.lses != nullptr) {
    for (int64_t i = 0; i < p.num_states; ++i) peak = fmaxf(peak, p.lses[i * p.rows + row]);
    for (int64_t i = 0; i < p.num_states && peak > no_key; ++i) total += expf(p.lses[i * p.rows + row] - peak);
    if (lane == 0) p.lse[row] = peak > no_key ? peak + logf(total) : no_key;
  }
  for (int64_t dim = lane; dim < p.head_dim_v; dim += 32) {
    float sum = 0.0f;
    for (int64_t i = 0; i < p.num_states; ++i) {
      float weight = 1.0f;
      if (p.lses != nullptr) {
        const float lse = p.lses[i * p.rows + row];
        if (!(lse > no_key)) continue;  // it saw no key: its values count for nothing, whatever they are
        weight = expf(lse - peak) / total;
      }
      sum += weight * p.outs[(i * p.rows + row) * p.head_dim_v + dim];
    }
    p.out[row * p.head_dim_v + dim] = sum;
  }
}

}  // namespace

namespace attnloom {
int32_t prepare_merge() { return prepare(merge_kernel); }
}  // namespace attnloom

// Returns CUDA's error.
ATTNLOOM_EXPORT int32_t attnloom_merge(const MergeParams* params) {
  if (params->rows == 0) return 0;
  const auto blocks = static_cast<unsigned>((params->rows + kWarps - 1) / kWarps);
  merge_kernel<<<blocks, 32 * kWarps, 0, static_cast<cudaStream_t>(params->stream)>>>(*params);
  return static_cast<int32_t>(cudaGetLastError());
}
