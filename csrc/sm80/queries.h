// Queries of a tile, after the query hook: as fragments in registers, or in shared memory.
#pragma once

#include <cstdint>

#include "sm80/element.h"
#include "sm80/products.h"
#include "sm80/ptx.h"
#include "sm80/swizzle.h"
#include "sm80/work.h"

namespace attnloom {
namespace sm80 {

template <typename S>
struct Queries {
  using Scalar = typename S::Scalar;

  // A row of q, as a hook sees it.
  struct Vector {
    const Scalar* row;
    __device__ float operator[](int dim) const { return as_float(row[dim]); }
  };

  // A row of the tile, which lies at `from`.
  struct Row {
    const Scalar* from;
    Folded folded;

    __device__ Row(const Cta<S>& cta, const Work<S>& work, int row) : folded(work.folded(cta, row)) {
      // Strides fit into 32 bits, offsets need not.
      constexpr int kBytes = sizeof(Scalar);
      const int32_t head = work.head * cta.p.group + folded.head;
      from = reinterpret_cast<const Scalar*>(
          multiply_add(work.first_token + folded.query, static_cast<int32_t>(cta.p.q.stride_row) * kBytes,
                       multiply_add(head, static_cast<int32_t>(cta.p.q.stride_head) * kBytes,
                                    static_cast<const char*>(cta.p.q.data))));
    }

    // Dims dim and dim + 1.
    __device__ __forceinline__ uint32_t pair(const Cta<S>& cta, const Work<S>& work, int dim) const {
      if constexpr (S::Variant::kHasQueryTransform) {
        float both[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          both[i] = S::Variant::query_transform(cta.hooks, Vector{from}, dim + i, work.request,
                                                work.first_position + folded.query,
                                                work.head * cta.p.group + folded.head, work.head, folded.query);
        }
        return Half<Scalar>::pack(both[0], both[1]);
      } else {
        return *reinterpret_cast<const uint32_t*>(from + dim);
      }
    }
  };

  // Fragments of the short tile, one for each step of 16 dims.
  static __device__ void load(const Cta<S>& cta, const Work<S>& work, uint32_t (&to)[S::kDim / 16][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int index = cta.lane() / 4 + half * 8;
      const bool valid = index < work.rows;
      const Row row(cta, work, valid ? index : 0);
#pragma unroll
      for (int step = 0; step < S::kDim / 16; ++step) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int dim = step * 16 + query_dim<typename S::Key>(cta.lane() % 4 * 2 + k * 8);
          to[step][half + 2 * k] = valid ? row.pair(cta, work, dim) : 0;
        }
      }
    }
  }

  // Fragments of Scalar as halves, in place: each of the lane's two rows divided by the power of two that its largest
  // element lies at, which comes out in `scale`. No element is lost that matters beside the largest.
  static __device__ void to_halves(uint32_t (&fragments)[S::kDim / 16][4], float (&scale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = 0.0f;
#pragma unroll
      for (int i = 0; i < S::kDim / 8; ++i) {
        const float2 both = Half<Scalar>::unpack(fragments[i / 2][half + i % 2 * 2]);
        highest = fmaxf(highest, fmaxf(fabsf(both.x), fabsf(both.y)));
      }
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, 2));
      const int exponent = max(1, min(253, __float_as_int(highest) >> 23));
      scale[half] = __int_as_float(exponent << 23);
      const float inverse = __int_as_float((254 - exponent) << 23);
#pragma unroll
      for (int i = 0; i < S::kDim / 8; ++i) {
        uint32_t& bits = fragments[i / 2][half + i % 2 * 2];
        const float2 both = Half<Scalar>::unpack(bits);
        bits = Half<__half>::pack(both.x * inverse, both.y * inverse);
      }
    }
  }

  // `rows` rows of the tile to shared memory at `to`, the whole CTA together; in the order that fragments need. Rows
  // past the end of the tile become zeros.
  static __device__ void share(const Cta<S>& cta, const Work<S>& work, int rows, char* to) {
    constexpr int kChunks = S::kDim / 8;
    constexpr bool kAsTheyLie = !S::Variant::kHasQueryTransform && sizeof(typename S::Key) == 2;
    // Where the CTA takes whole rows at once, of whole queries, a thread goes from query to query by one stride.
    if constexpr (kAsTheyLie && S::kThreads % kChunks == 0) {
      constexpr int kAtOnce = S::kThreads / kChunks;
      const int queries = cta.p.by_group.divide(kAtOnce);
      if (queries * cta.p.group == kAtOnce) {
        const int thread = thread_anew();
        const int chunk = thread % kChunks;
        const int first = thread / kChunks;
        const int there = work.rows - first;
        const char* from = reinterpret_cast<const char*>(Row(cta, work, first).from + chunk * 8);
#pragma unroll 4
        for (int past = 0; past < rows; past += kAtOnce) {
          copy_async(chunk_address(shared_address(to), past + first, S::kPitchQ, chunk), from, past < there);
          from = multiply_add(queries, static_cast<int32_t>(cta.p.q.stride_row) * static_cast<int32_t>(sizeof(Scalar)),
                              from);
        }
        return;
      }
    }
#pragma unroll 4
    for (int first = 0; first < rows * kChunks; first += S::kThreads) {
      const int thread = thread_anew();
      if (rows * kChunks % S::kThreads != 0 && first + thread >= rows * kChunks) continue;
      // Where the CTA takes whole rows at once, a thread has the same chunk of all of its rows.
      const bool whole = S::kThreads % kChunks == 0;
      const int of = whole ? first / kChunks + thread / kChunks : (first + thread) / kChunks;
      const int chunk = (whole ? thread : first + thread) % kChunks;
      const bool valid = of < work.rows;
      const Row row(cta, work, valid ? of : 0);
      if constexpr (kAsTheyLie) {
        copy_async(chunk_address(shared_address(to), of, S::kPitchQ, chunk), row.from + chunk * 8, valid);
      } else {
#pragma unroll
        for (int k = 0; k < 8; k += 2) {
          const int dim = chunk / 2 * 16 + query_dim<typename S::Key>(chunk % 2 * 8 + k);
          *reinterpret_cast<uint32_t*>(to + of * S::kPitchQ + (chunk ^ (of & 7)) * 16 + k * 2) =
              valid ? row.pair(cta, work, dim) : 0;
        }
      }
    }
  }

  // Fragment m, of rows [16 m, 16 m + 16) of those at `queries`, at a step of 16 dims.
  static __device__ __forceinline__ void fragment(uint32_t queries, int m, int step, uint32_t lane, uint32_t (&to)[4]) {
    load_matrices(to,
                  chunk_of_pair(chunk_address(queries, lane % 16, S::kPitchQ, lane / 16), step) + m * 16 * S::kPitchQ);
  }
};

}  // namespace sm80
}  // namespace attnloom
