// The tensor cores' part: S = Q K^T and O += P V over 16 tokens, whatever the type of the cache.
//
// 8-bit rows are read with the same ldmatrix, which then moves pairs of elements. A lane gets four neighbouring dims of
// a key where it would have got two: a product over dims may take them in any order, so the query's dims are permuted
// alike (query_dim). Of a value it gets two neighbouring dims of two tokens: output tiles hold even and odd dims.
#pragma once

#include <cstdint>

#include "sm80/element.h"
#include "sm80/ptx.h"
#include "sm80/softmax.h"
#include "sm80/swizzle.h"
#include "sm80/work.h"

namespace attnloom {
namespace sm80 {

// Which of 16 dims the elements at k and k + 1 of a fragment are (k even).
template <typename Key>
__device__ __forceinline__ constexpr int query_dim(int k) {
  if constexpr (sizeof(Key) == 2) {
    return k;
  } else {
    return k % 8 * 2 + k / 8 * 2;
  }
}

// score[m] = queries of fragment m times the keys of kGroups groups of 16 tokens, of which keys_of(group) is the
// address: query_of(step, m, fragment) gives the queries of a step of 16 dims, as Math: what the tensor cores multiply.
template <typename S, typename Math, int kGroups, int kFragments, typename KeysOf, typename QueryOf>
__device__ __forceinline__ void multiply_keys(KeysOf keys_of, uint32_t lane, QueryOf query_of,
                                              float (&score)[kFragments][2 * kGroups][4]) {
  using Key = typename S::Key;
  constexpr int kSteps = 2 / sizeof(Key);  // of 16 dims, in a pair of chunks
  constexpr int kAllSteps = S::kDim / 16;
  constexpr int kPairs = (kAllSteps + kSteps - 1) / kSteps;
  const uint32_t first = chunk_address(keys_of(0), (lane / 16) * 8 + lane % 8, S::kPitchK, lane / 8 % 2);
  uint32_t query[2][kSteps][kFragments][4];
  uint32_t key[2][4];
  const auto load_queries = [&](int pair) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
        if (pair * kSteps + i < kAllSteps) query_of(pair * kSteps + i, m, query[pair % 2][i][m]);
      }
    }
  };
  const auto load_keys = [&](int index) {  // of group index % kGroups at pair index / kGroups
    load_matrices(key[index % 2], chunk_of_pair(first, index / kGroups) + (keys_of(index % kGroups) - keys_of(0)));
  };
#pragma unroll
  for (int m = 0; m < kFragments; ++m) {
#pragma unroll
    for (int n = 0; n < 2 * kGroups; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) score[m][n][i] = 0.0f;
    }
  }
  load_queries(0);
  load_keys(0);
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    if (pair + 1 < kPairs) load_queries(pair + 1);  // while the tensor cores work on this one
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int index = pair * kGroups + group;
      if (index + 1 < kPairs * kGroups) load_keys(index + 1);
      const uint32_t (&raw)[4] = key[index % 2];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (pair * kSteps + i >= kAllSteps) continue;
        // The keys of two groups of 8 tokens at this step, two halves of it each.
        uint32_t b[2][2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          if constexpr (sizeof(Key) == 2) {
            b[n][0] = raw[2 * n], b[n][1] = raw[2 * n + 1];
          } else {
            b[n][0] = widen<Math, Key>(raw[2 * n + i]), b[n][1] = widen<Math, Key>(raw[2 * n + i] >> 16);
          }
        }
#pragma unroll
        for (int m = 0; m < kFragments; ++m) {
          Half<Math>::multiply(score[m][2 * group], query[pair % 2][i][m], b[0][0], b[0][1]);
          Half<Math>::multiply(score[m][2 * group + 1], query[pair % 2][i][m], b[1][0], b[1][1]);
        }
      }
    }
  }
}

// out += weights[16 rows x 16 tokens] values[16 tokens x kDimV], for each of kFragments fragments of rows.
template <typename S, typename Math, int kFragments>
__device__ __forceinline__ void add_values(uint32_t values, uint32_t lane, const uint32_t (&weights)[kFragments][4],
                                           Rows<S> (&rows)[kFragments]) {
  using Value = typename S::Value;
  const uint32_t first = chunk_address(values, lane % 16, S::kPitchV, lane / 16);
  constexpr int kChunks = S::kDimV * static_cast<int>(sizeof(Value)) / 16;
  constexpr int kPairs = (kChunks + 1) / 2;
  uint32_t value[2][4];
  load_matrices_transposed(value[0], chunk_of_pair(first, 0));
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    if (pair + 1 < kPairs) load_matrices_transposed(value[(pair + 1) % 2], chunk_of_pair(first, pair + 1));
    const uint32_t (&raw)[4] = value[pair % 2];
    if constexpr (sizeof(Value) == 2) {
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
        Half<Math>::multiply(rows[m].out[2 * pair], weights[m], raw[0], raw[1]);
        Half<Math>::multiply(rows[m].out[2 * pair + 1], weights[m], raw[2], raw[3]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (pair * 2 + i >= kChunks) continue;
        // Two dims of two tokens, four bytes: to pairs of tokens.
        const uint32_t low = __byte_perm(raw[2 * i], 0, 0x3120);
        const uint32_t high = __byte_perm(raw[2 * i + 1], 0, 0x3120);
        const uint32_t even[2] = {widen<Math, Value>(low), widen<Math, Value>(high)};
        const uint32_t odd[2] = {widen<Math, Value>(low >> 16), widen<Math, Value>(high >> 16)};
#pragma unroll
        for (int m = 0; m < kFragments; ++m) {
          Half<Math>::multiply(rows[m].out[4 * pair + 2 * i], weights[m], even[0], even[1]);
          Half<Math>::multiply(rows[m].out[4 * pair + 2 * i + 1], weights[m], odd[0], odd[1]);
        }
      }
    }
  }
}

// Weights of 16 tokens (groups n and n + 1 of the scores) as the left factor of a product.
template <typename Math>
__device__ __forceinline__ void pack_weights(const float (&first)[4], const float (&second)[4], uint32_t (&packed)[4]) {
  packed[0] = Half<Math>::pack(first[0], first[1]);
  packed[1] = Half<Math>::pack(first[2], first[3]);
  packed[2] = Half<Math>::pack(second[0], second[1]);
  packed[3] = Half<Math>::pack(second[2], second[3]);
}

}  // namespace sm80
}  // namespace attnloom
