// Where the rows of a KV tile lie, whatever the block size, and how they come nearer: the loader's half of a gather.
#pragma once

#include <cstdint>

#include "common/params.h"
#include "common/request.h"
#include "cpu/products.h"

namespace attnloom {
namespace cpu {

// Columns outside [begin, end) repeat the nearest inside: what they give is dropped by the mask.
template <typename T>
inline void repeat_ends(int begin, int end, T* columns) {
  for (int column = 0; column < begin; ++column) columns[column] = columns[begin];
  for (int column = end; column < kTileKv; ++column) columns[column] = columns[end - 1];
}

// Addresses of the tile's columns, the first of which is slot `first_slot` of the request. Only the slots of
// [begin, end) may be read.
template <typename T>
inline void locate_rows(const Request& request, const CacheTensor& cache, int32_t kv_head, int32_t first_slot,
                        int begin, int end, const T** rows) {
  const int64_t block_size = request.layout.block_size;
  const int64_t index_stride = request.layout.index_stride;
  const T* base = static_cast<const T*>(cache.data) + kv_head * cache.stride_head;
  int64_t offset = (first_slot + begin) % block_size;
  const int32_t block = static_cast<int32_t>((first_slot + begin) / block_size);
  const int32_t* entry = request.blocks + request.layout.entry_of(block);
  const T* page = base + *entry * cache.stride_block;
  for (int column = begin; column < end; ++column, ++offset) {
    if (offset == block_size) {
      offset = 0;
      entry += index_stride;
      page = base + *entry * cache.stride_block;
    }
    rows[column] = page + offset * cache.stride_slot;
  }
  repeat_ends(begin, end, rows);
}

constexpr int kNearest = 3;  // of the caches, as __builtin_prefetch counts them
constexpr int kSecond = 2;

// Brings a row that is read later into a cache.
template <int kWidth, int kCache, typename T>
inline void fetch_row(const T* row) {
  constexpr int kLine = 64 / sizeof(T);
  for (int dim = 0; dim < kWidth; dim += kLine) __builtin_prefetch(row + dim, 0, kCache);
}

}  // namespace cpu
}  // namespace attnloom
