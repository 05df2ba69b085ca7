// The products of one query tile with one KV tile: which shape of cpu/products.h serves how many rows.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/products.h"

namespace attnloom {
namespace cpu {

template <bool kAlike>
using SumOf = std::conditional_t<kAlike, Fused, Contracted>;

constexpr int32_t kFewRows = 8;  // up to here reading keys in place beats packing them

template <int kRows, int kDim, typename T>
inline void score_block(int32_t rows, const float* q, const T* const* keys, int begin, int end, float* scores) {
  if constexpr (kRows > 0) {
    if (rows >= kRows) return score_few_rows<kRows, kDim>(q, keys, begin, end, scores);
    score_block<kRows - 1, kDim>(rows, q, keys, begin, end, scores);
  }
}

// scores[rows][kTileKv] = q[rows][kDim] . packed[kDim][kTileKv]. kAlike, here and below: a row's result has the same
// bits beside any number of others.
template <bool kAlike, int kDim>
inline void score_packed(int32_t rows, const float* q, const float* packed, float* scores) {
  multiply<SumOf<kAlike>, kTileKv, false>(
      rows, q, kDim, [packed](int dim) { return packed + dim * kTileKv; }, kDim, scores, kTileKv);
}

// scores[rows][kTileKv] = q[rows][kDim] . keys; `packed` has room for [kDim][kTileKv].
template <bool kAlike, int kDim, typename T>
inline void score_rows(int32_t rows, const float* q, const T* const* keys, int begin, int end, float* packed,
                       float* scores) {
  if (!kAlike && rows <= kFewRows) {
    for (int32_t row = 0; row < rows; row += kFewRowBlock) {
      score_block<kFewRowBlock, kDim>(rows - row, q + row * kDim, keys, begin, end, scores + row * kTileKv);
    }
    return;
  }
  pack_keys<kDim, kTileKv>(keys, packed);
  score_packed<kAlike, kDim>(rows, q, packed, scores);
}

template <int kRows, int kDimV, typename T>
inline void add_values_block(int32_t rows, const float* weights, const T* const* values, int begin, int end,
                             float* out) {
  if constexpr (kRows > 0) {
    if (rows >= kRows) return add_values_few_rows<kRows, kDimV>(weights, values, begin, end, out);
    add_values_block<kRows - 1, kDimV>(rows, weights, values, begin, end, out);
  }
}

// out[rows][kDimV] += weights[rows][kTileKv] . values over the columns [begin, end); `converted` has room for
// [kTileKv][kDimV].
template <bool kAlike, int kDimV, typename T>
inline void add_values(int32_t rows, const float* weights, const T* const* values, int begin, int end, float* converted,
                       float* out) {
  if (!kAlike && rows <= kFewRows) {
    for (int32_t row = 0; row < rows; row += kFewRowBlock) {
      add_values_block<kFewRowBlock, kDimV>(rows - row, weights + row * kTileKv, values, begin, end, out + row * kDimV);
    }
    return;
  }
  const auto product = [=](const float* const* lines) {
    multiply<SumOf<kAlike>, kDimV, true>(
        rows, weights + begin, kTileKv, [=](int column) { return lines[begin + column]; }, end - begin, out, kDimV);
  };
  if constexpr (std::is_same<T, float>::value) {
    product(values);
  } else {
    const float* lines[kTileKv];
    for (int column = begin; column < end; ++column) {
      float* to = converted + column * kDimV;
      for (int dim = 0; dim < kDimV; dim += kLanes) store(to + dim, load(values[column] + dim));
      lines[column] = to;
    }
    product(lines);
  }
}

}  // namespace cpu
}  // namespace attnloom
