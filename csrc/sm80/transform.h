// The transform stage: the key and value hooks, applied in shared memory to the slice that a warp has loaded. Rows are
// dequantised before a hook sees them and lie there as Scalar afterwards.
#pragma once

#include <cstdint>

#include "sm80/element.h"
#include "sm80/work.h"

namespace attnloom {
namespace sm80 {

// A row of Kv in shared memory, chunks of 16 bytes permuted.
template <typename Kv>
struct SharedRow {
  const char* row;
  int swizzle;
  float scale;

  static __device__ int byte_of(int dim, int size, int swizzle) {
    const int byte = dim * size;
    return ((byte / 16) ^ swizzle) * 16 + byte % 16;
  }
  __device__ float operator[](int dim) const {
    return as_float(*reinterpret_cast<const Kv*>(row + byte_of(dim, sizeof(Kv), swizzle))) * scale;
  }
};

// hook(row, dim, kv_pos, kv_index) of a slice's tokens, from slot `first` on, in place. Tokens that nobody sees become
// zeros.
template <typename S, int kWidth, int kPitch, typename Hook>
__device__ void transform_rows(const Cta<S>& cta, const Work<S>& work, int32_t first, const int32_t* positions,
                               char* slice, float scale, Hook hook) {
  using Scalar = typename S::Scalar;
  constexpr int kEach = (kWidth + 31) / 32;
  for (int token = 0; token < S::kSlice; ++token) {
    char* row = slice + token * kPitch;
    const int32_t slot = first + token;
    const int32_t kv_pos = positions != nullptr ? positions[token] : slot;
    const bool visible = slot >= work.any.begin && slot < work.any.end;
    const SharedRow<typename S::Kv> vector{row, token & 7, scale};
    float values[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int dim = i * 32 + cta.lane();
      values[i] = visible && dim < kWidth ? hook(vector, dim, kv_pos, slot) : 0.0f;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int dim = i * 32 + cta.lane();
      if (dim < kWidth) {
        *reinterpret_cast<Scalar*>(row + SharedRow<Scalar>::byte_of(dim, sizeof(Scalar), token & 7)) =
            static_cast<Scalar>(values[i]);
      }
    }
  }
  __syncwarp();
}

template <typename S>
__device__ __forceinline__ void transform_slice(const Cta<S>& cta, const Work<S>& work, int32_t tile, int stage) {
  using Variant = typename S::Variant;
  if constexpr (Variant::kHasKeyTransform || Variant::kHasValueTransform) {
    char* slice = cta.slice(stage, cta.warp());
    const int32_t first = tile * S::kTileKv + cta.warp() * S::kSlice;
    const int32_t* positions = work.positions == nullptr ? nullptr : cta.positions(stage) + cta.warp() * S::kSlice;
    __syncwarp();
    if constexpr (Variant::kHasKeyTransform) {
      transform_rows<S, S::kDim, S::kPitchK>(
          cta, work, first, positions, slice, cta.p.k_scale,
          [&](const SharedRow<typename S::Kv>& key, int dim, int32_t kv_pos, int32_t kv_index) {
            return Variant::key_transform(cta.hooks, key, dim, work.request, kv_pos, work.head, kv_index);
          });
    }
    if constexpr (Variant::kHasValueTransform) {
      transform_rows<S, S::kDimV, S::kPitchV>(
          cta, work, first, positions, slice + S::kSlice * S::kPitchK, cta.p.v_scale,
          [&](const SharedRow<typename S::Kv>& value, int dim, int32_t kv_pos, int32_t kv_index) {
            return Variant::value_transform(cta.hooks, value, dim, work.request, kv_pos, work.head, kv_index);
          });
    }
  }
}

}  // namespace sm80
}  // namespace attnloom
