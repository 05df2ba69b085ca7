// The transform stage of key and value hooks: the rows of a KV tile, float32 and dequantised before the hook sees them,
// by one of two loops. Both fetch what is read next while a hook computes, which keeps a decode at the memory's speed.
#pragma once

#include <cstdint>

#include "cpu/gather.h"
#include "cpu/products.h"
#include "cpu/softmax.h"
#include "cpu/vec.h"

namespace attnloom {
namespace cpu {

constexpr int kRowsAhead = 4;  // of the row in hand
constexpr int kStrip = 16;     // columns at a time: their keys stay in the nearest cache

// A SIMD lane is a dimension: what a hook looks up by token is one read for all of them. to[column] = the row of each
// column of [begin, end), in `storage` [kTileKv][kWidth]; `line` has room for one. `later` are rows of kLaterWidth that
// are read after this stage, or null.
template <int kWidth, int kLaterWidth, typename T, typename Hook>
inline void transform_rows(const T* const* from, const T* const* later, int begin, int end, const TileColumns& tile,
                           float scale, float* line, float* storage, const float** to, Hook hook) {
  for (int column = begin; column < end; ++column) {
    fetch_row<kWidth, kNearest>(from[column + kRowsAhead < end ? column + kRowsAhead : end - 1]);
    if (later != nullptr) fetch_row<kLaterWidth, kSecond>(later[column]);
    for (int dim = 0; dim < kWidth; dim += kLanes) store(line + dim, load(from[column] + dim) * broadcast(scale));
    const int32_t kv_pos = tile.kv_pos[column];
    const int32_t kv_index = tile.kv_index[column];
    float* row = storage + column * kWidth;
    const float* element = line;
#pragma omp simd
    for (int dim = 0; dim < kWidth; ++dim) row[dim] = hook(element, dim, kv_pos, kv_index);
    to[column] = row;
  }
  repeat_ends(begin, end, to);
}

struct PackedColumn {  // one key among the packed ones of a strip
  const float* first;
  float scale;
  ATTNLOOM_HD float operator[](int dim) const { return first[dim * kStrip] * scale; }
};

// A SIMD lane is a token: what a hook looks up by dimension, and which element of the key is its partner, is the same
// for all of them. packed[kDim][kTileKv] = the transformed keys; `strip` has room for [kDim][kStrip].
template <int kDim, int kLaterWidth, typename T, typename Hook>
inline void transform_columns(const T* const* from, const T* const* later, const TileColumns& tile, float scale,
                              float* strip, float* packed, Hook hook) {
  static_assert(kDim % kStrip == 0 && kTileKv % kStrip == 0, "one row is fetched per column of a strip");
  constexpr int kDimsPerRow = kDim / kStrip;
  for (int begin = 0; begin < kTileKv; begin += kStrip) {
    pack_keys<kDim, kStrip>(from + begin, strip);
    const int32_t* kv_pos = tile.kv_pos + begin;
    const int32_t* kv_index = tile.kv_index + begin;
    const int next = begin + kStrip < kTileKv ? begin + kStrip : begin;
    for (int nth = 0; nth < kStrip; ++nth) {
      fetch_row<kDim, kNearest>(from[next + nth]);
      fetch_row<kLaterWidth, kSecond>(later[begin + nth]);
      for (int dim = nth * kDimsPerRow; dim < (nth + 1) * kDimsPerRow; ++dim) {
        float* to = packed + dim * kTileKv + begin;
#pragma omp simd
        for (int column = 0; column < kStrip; ++column) {
          to[column] = hook(PackedColumn{strip + column, scale}, dim, kv_pos[column], kv_index[column]);
        }
      }
    }
  }
}

}  // namespace cpu
}  // namespace attnloom
