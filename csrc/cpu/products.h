// The two matrix products of attention, S = Q K^T and O += P V, in two shapes: few rows (decode: the keys are
// read once from where they lie) and many rows (prefill: a packed KV tile is used again and again).
#pragma once

#include <cstdint>

#include "cpu/vec.h"

namespace attnloom {
namespace cpu {

constexpr int kTileKv = 64;  // tokens of a KV tile
constexpr int kRowBlock = 6;
#if defined(__AVX512F__)
constexpr int kVecBlock = 4;  // 6 x 4 sums + 4 + 1 of 32 registers
#else
constexpr int kVecBlock = 2;  // 6 x 2 sums + 2 + 1 of 16 registers
#endif
constexpr int kFewRowBlock = 4;

// How a product is added to a sum.
struct Contracted {  // as the compiler likes it, loop by loop
  static inline __attribute__((always_inline)) void add(Vec* sum, Vec left, Vec right) { *sum += left * right; }
};
struct Fused {  // the same for any number of rows
  static inline __attribute__((always_inline)) void add(Vec* sum, Vec left, Vec right) {
    *sum = fused(left, right, *sum);
  }
};

// c[kRows][kVecs * kLanes] = (kAdd ? c : 0) + a[kRows][depth] * b[depth][...], row k of b at b_row(k).
// Not inlined: among the caller's variables the sums would not all stay in registers.
template <typename Sum, int kRows, int kVecs, bool kAdd, typename RowOf>
__attribute__((noinline)) void multiply_block(const float* a, int64_t a_stride, RowOf b_row, int depth, float* c,
                                              int64_t c_stride) {
  Vec sum[kRows][kVecs];
  for (int row = 0; row < kRows; ++row) {
    for (int vec = 0; vec < kVecs; ++vec) {
      sum[row][vec] = kAdd ? load(c + row * c_stride + vec * kLanes) : Vec{};
    }
  }
  for (int k = 0; k < depth; ++k) {
    const float* b = b_row(k);
    Vec right[kVecs];
    for (int vec = 0; vec < kVecs; ++vec) right[vec] = load(b + vec * kLanes);
    for (int row = 0; row < kRows; ++row) {
      const Vec left = broadcast(a[row * a_stride + k]);
      for (int vec = 0; vec < kVecs; ++vec) Sum::add(&sum[row][vec], left, right[vec]);
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int vec = 0; vec < kVecs; ++vec) store(c + row * c_stride + vec * kLanes, sum[row][vec]);
  }
}

// The rows left over after the full blocks.
template <typename Sum, int kRows, int kVecs, bool kAdd, typename RowOf>
inline void multiply_rest(int rows, const float* a, int64_t a_stride, RowOf b_row, int depth, float* c,
                          int64_t c_stride) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return multiply_block<Sum, kRows, kVecs, kAdd>(a, a_stride, b_row, depth, c, c_stride);
    multiply_rest<Sum, kRows - 1, kVecs, kAdd>(rows, a, a_stride, b_row, depth, c, c_stride);
  }
}

// c[rows][kColumns] = (kAdd ? c : 0) + a[rows][depth] * b[depth][kColumns].
template <typename Sum, int kColumns, bool kAdd, typename RowOf>
inline void multiply(int rows, const float* a, int64_t a_stride, RowOf b_row, int depth, float* c, int64_t c_stride) {
  constexpr int kAllVecs = kColumns / kLanes;
  constexpr int kRestVecs = kAllVecs % kVecBlock;
  static_assert(kColumns % kLanes == 0, "columns fill whole registers");
  int column = 0;
  for (; column + kVecBlock * kLanes <= kColumns; column += kVecBlock * kLanes) {
    const auto part = [&](int k) { return b_row(k) + column; };
    int row = 0;
    for (; row + kRowBlock <= rows; row += kRowBlock) {
      multiply_block<Sum, kRowBlock, kVecBlock, kAdd>(a + row * a_stride, a_stride, part, depth,
                                                      c + row * c_stride + column, c_stride);
    }
    multiply_rest<Sum, kRowBlock - 1, kVecBlock, kAdd>(rows - row, a + row * a_stride, a_stride, part, depth,
                                                       c + row * c_stride + column, c_stride);
  }
  if constexpr (kRestVecs > 0) {
    const auto part = [&](int k) { return b_row(k) + column; };
    int row = 0;
    for (; row + kRowBlock <= rows; row += kRowBlock) {
      multiply_block<Sum, kRowBlock, kRestVecs, kAdd>(a + row * a_stride, a_stride, part, depth,
                                                      c + row * c_stride + column, c_stride);
    }
    multiply_rest<Sum, kRowBlock - 1, kRestVecs, kAdd>(rows - row, a + row * a_stride, a_stride, part, depth,
                                                       c + row * c_stride + column, c_stride);
  }
}

// packed[kDim][kKeys] = keys, transposed.
template <int kDim, int kKeys, typename T>
__attribute__((noinline)) void pack_keys(const T* const* keys, float* packed) {
  for (int group = 0; group < kKeys; group += kLanes) {
    for (int dim = 0; dim < kDim; dim += kLanes) {
      Vec rows[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) rows[lane] = load(keys[group + lane] + dim);
      transpose(rows);
      for (int lane = 0; lane < kLanes; ++lane) store(packed + (dim + lane) * kKeys + group, rows[lane]);
    }
  }
}

// scores[kRows][kTileKv] for the registers that hold the keys [begin, end): each key is read once for kRows rows.
template <int kRows, int kDim, typename T>
__attribute__((noinline)) void score_few_rows(const float* q, const T* const* keys, int begin, int end, float* scores) {
  constexpr int kKeys = 2;  // at once: halves the loads of q
  for (int group = begin / kLanes * kLanes; group < end; group += kLanes) {
    Vec partial[kRows][kLanes];
    for (int lane = 0; lane < kLanes; lane += kKeys) {
      const T* key[kKeys];
      Vec sum[kKeys][kRows];
      for (int each = 0; each < kKeys; ++each) {
        key[each] = keys[group + lane + each];
        for (int row = 0; row < kRows; ++row) sum[each][row] = Vec{};
      }
      for (int dim = 0; dim < kDim; dim += kLanes) {
        Vec part[kKeys];
        for (int each = 0; each < kKeys; ++each) part[each] = load(key[each] + dim);
        for (int row = 0; row < kRows; ++row) {
          const Vec left = load(q + row * kDim + dim);
          for (int each = 0; each < kKeys; ++each) sum[each][row] += left * part[each];
        }
      }
      for (int each = 0; each < kKeys; ++each) {
        for (int row = 0; row < kRows; ++row) partial[row][lane + each] = sum[each][row];
      }
    }
    for (int row = 0; row < kRows; ++row) store(scores + row * kTileKv + group, sum_rows(partial[row]));
  }
}

// out[kRows][kDimV] += weights[kRows][kTileKv] * values, over the keys [begin, end).
template <int kRows, int kDimV, typename T>
__attribute__((noinline)) void add_values_few_rows(const float* weights, const T* const* values, int begin, int end,
                                                   float* out) {
  constexpr int kChunk = kVecBlock * kLanes;
  constexpr int kWidth = kDimV % kChunk == 0 ? kChunk : kLanes;
  constexpr int kVecs = kWidth / kLanes;
  for (int dim = 0; dim < kDimV; dim += kWidth) {
    Vec sum[kRows][kVecs];
    for (int row = 0; row < kRows; ++row) {
      for (int vec = 0; vec < kVecs; ++vec) sum[row][vec] = load(out + row * kDimV + dim + vec * kLanes);
    }
    for (int key = begin; key < end; ++key) {
      Vec value[kVecs];
      for (int vec = 0; vec < kVecs; ++vec) value[vec] = load(values[key] + dim + vec * kLanes);
      for (int row = 0; row < kRows; ++row) {
        const Vec weight = broadcast(weights[row * kTileKv + key]);
        for (int vec = 0; vec < kVecs; ++vec) sum[row][vec] += weight * value[vec];
      }
    }
    for (int row = 0; row < kRows; ++row) {
      for (int vec = 0; vec < kVecs; ++vec) store(out + row * kDimV + dim + vec * kLanes, sum[row][vec]);
    }
  }
}

}  // namespace cpu
}  // namespace attnloom
