// Split items: pieces leave their states in the arena, and the last worker to arrive merges them in the order of the
// workers. Nobody waits.
#pragma once

#include <cstdint>

#include "planner/plan.h"
#include "sm80/epilogue.h"

namespace attnloom {
namespace sm80 {

// The arena: [2 * workers][tile_q][kDimV] values, then [2 * workers][tile_q] LSEs.
template <typename S>
__device__ float* partial_values(const Cta<S>& cta, int32_t slot) {
  return cta.p.arena + static_cast<int64_t>(slot) * cta.plan().header().tile_q * S::kDimV;
}
template <typename S>
__device__ float* partial_lses(const Cta<S>& cta, int32_t slot) {
  const PlanHeader& header = cta.plan().header();
  return cta.p.arena + (static_cast<int64_t>(header.num_workers) * 2 * S::kDimV + slot) * header.tile_q;
}

// Rows of a warp's output to shared memory, as float32: those of kHalves halves of 8 from `half` on.
template <typename S, int kHalves>
__device__ __forceinline__ void share_output(const Rows<S>& rows, int half, uint32_t lane, float* to) {
#pragma unroll
  for (int own = 0; own < 2; ++own) {
    if (own < half || own >= half + kHalves) continue;
    const int row = lane / 4 + (own - half) * 8;
    if constexpr (sizeof(typename S::Value) == 2) {
#pragma unroll
      for (int i = 0; i < S::kDimV / 8; ++i) {
        *reinterpret_cast<float2*>(to + output_at<S>(row, i * 8 + lane % 4 * 2)) =
            make_float2(rows.out[i][own * 2], rows.out[i][own * 2 + 1]);
      }
    } else {  // neighbouring fragments hold even and odd dims (products.h)
#pragma unroll
      for (int i = 0; i < S::kDimV / 8; i += 2) {
        *reinterpret_cast<float4*>(to + output_at<S>(row, i * 8 + lane % 4 * 4)) = make_float4(
            rows.out[i][own * 2], rows.out[i + 1][own * 2], rows.out[i][own * 2 + 1], rows.out[i + 1][own * 2 + 1]);
      }
    }
  }
}

// Where the rows of a piece go: to the output if the piece is a whole item, else as a partial state to the arena. Like
// OutputTile: put every quad, synchronise, transform.
template <typename S>
struct PieceOutput {
  const Cta<S>& cta;
  const Work<S>& work;

  // Row `row` of those from `first` on.
  __device__ void put(int first, float* waiting, int row, int quad, float4 value, float lse) const {
    if (S::kAlike || work.piece.whole()) {
      OutputTile<S>{cta, work, first, waiting}.put(row, quad, value, lse);
    } else {
      const int32_t slot = partial_slot(blockIdx.x, work.piece.opens);
      *reinterpret_cast<float4*>(partial_values(cta, slot) + (first + row) * S::kDimV + quad * 4) = value;
      if (quad == 0) partial_lses(cta, slot)[first + row] = lse;
    }
  }
  __device__ void transform(int first, float* waiting, int count, int thread, int threads) const {
    if (S::kAlike || work.piece.whole()) OutputTile<S>{cta, work, first, waiting}.transform(count, thread, threads);
  }
};

// Which pieces an item is cut into: those of `count` stretches from `opener` on, some of which may be empty.
struct Split {
  int32_t opener;
  int32_t count;
};

// Called by the whole CTA once the state of its piece is in the arena: whether it is the last one of the item.
template <typename S>
__device__ __forceinline__ bool is_last(const Cta<S>& cta, Split split) {
  int32_t* flag = reinterpret_cast<int32_t*>(shared_memory + S::kFlagAt);
  int32_t pieces = 0;
  if (cta.warp() == 0) {
    for (int32_t i = cta.lane(); i < split.count; i += 32) pieces += cta.plan().has_work(split.opener + i);
    pieces = __reduce_add_sync(0xffffffff, pieces);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    // Fences of one thread stand for all: what others wrote before a barrier, or read after one, is ordered with it.
    __threadfence();
    int32_t* arrivals = cta.p.arrivals + cta.plan().peer(blockIdx.x, split.opener);
    const bool last = atomicAdd(arrivals, 1) + 1 == pieces;
    if (last) *arrivals = 0;  // ready for the next run
    __threadfence();
    *flag = last;
  }
  __syncthreads();
  return *flag;
}

template <typename S>
__device__ __forceinline__ Split split_of(const Cta<S>& cta, const Piece& piece) {
  const int32_t stretch = static_cast<int32_t>(blockIdx.x) / cta.plan().header().lockstep;
  const int32_t opener = piece.opens ? stretch : cta.plan().split_begin()[stretch];
  return {opener, cta.plan().split_end()[opener] - opener + 1};
}

template <typename S>
struct Merge {
  static constexpr int kRound = 32;  // pieces whose weights lie in shared memory at once
  static constexpr int kQuads = S::kDimV / 4;
  static constexpr int kPairs = (16 * kQuads + S::kThreads - 1) / S::kThreads;  // (row, quad) pairs of a thread

  const Cta<S>& cta;
  int32_t opener = 0;  // of the item's stretches
  int32_t first = 0;   // of its workers on this kv head; the others follow at a distance of `lockstep`
  int32_t lockstep = 1;

  // Called by the whole CTA once its piece's state is in the arena; `room` is what nobody uses.
  __device__ void arrive(const Work<S>& work, float* room) {
    const Split split = split_of(cta, work.piece);
    if (!is_last(cta, split)) return;
    opener = split.opener;
    lockstep = cta.plan().header().lockstep;
    first = cta.plan().peer(blockIdx.x, opener);
    for (int row = 0; row < work.rows; row += 16) merge_rows(split.count, work, row, room);
  }

 private:
  // Of the nth worker that shares the item, in the arena.
  __device__ __forceinline__ int32_t slot(int32_t nth) const { return partial_slot(first + nth * lockstep, nth == 0); }

  // The thread's pair `pair`.
  static __device__ int row_of(int pair) { return (thread_anew() + pair * S::kThreads) / kQuads; }
  static __device__ int quad_of(int pair) { return (thread_anew() + pair * S::kThreads) % kQuads; }

  // Its value of a piece; other CTAs wrote it, so it must come from the L2.
  __device__ __forceinline__ float4 value_of(int32_t nth, int row, int quad) const {
    const float* values = partial_values(cta, slot(nth)) + row * S::kDimV;
    return __ldcg(reinterpret_cast<const float4*>(values + quad * 4));
  }

  // The pieces' values with their weights, of the thread's first kUsed pairs: eight loads at once.
  template <int kUsed>
  __device__ __forceinline__ void add_values(int32_t begin, int32_t pieces, int from, int rows, const float* weights,
                                             float4 (&merged)[kPairs]) const {
    constexpr int kStep = kUsed == 1 ? 8 : 1;
#pragma unroll 1
    for (int i = 0; i < pieces; i += kStep) {
      float4 value[kStep][kUsed];
#pragma unroll
      for (int v = 0; v < kStep; ++v) {
#pragma unroll
        for (int pair = 0; pair < kUsed; ++pair) {
          value[v][pair] = value_of(begin + min(i + v, pieces - 1), from + min(row_of(pair), rows - 1), quad_of(pair));
        }
      }
#pragma unroll
      for (int v = 0; v < kStep; ++v) {
#pragma unroll
        for (int pair = 0; pair < kUsed; ++pair) {
          const int row = row_of(pair);
          const float weight = row < rows && i + v < pieces ? weights[(i + v) * rows + row] : 0.0f;
          if (weight != 0.0f) add_quad(merged[pair], weight, value[v][pair]);  // an empty piece has left nothing
        }
      }
    }
  }

  // Rows [from, from + 16) of the query tile.
  __device__ void merge_rows(int32_t count, const Work<S>& work, int from, float* room) const {
    constexpr bool kSoftmax = S::Variant::kSoftmax;
    const int rows = min(16, work.rows - from);
    float* weights = room;                   // [kRound][rows]
    float* factors = weights + kRound * 16;  // [16]
    float* ends = factors + 16;              // [16]: 1 / sum
    const int my_row = thread_anew() / 8;    // eight threads keep the state of a row
    const int my_lane = thread_anew() % 8;
    float highest = ATTNLOOM_NEG_INF;
    float sum = 0.0f;
    float4 merged[kPairs];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) merged[pair] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int32_t begin = 0; begin < count; begin += kRound) {
      const int32_t pieces = min(kRound, count - begin);
      for (int32_t index = thread_anew(); index < pieces * rows; index += S::kThreads) {
        const int32_t nth = begin + index / rows;
        const float* lses = partial_lses(cta, slot(nth)) + from;
        // Without softmax a state's LSE says no more than that it is there.
        weights[index] =
            cta.plan().has_work(opener + nth) ? (kSoftmax ? __ldcg(lses + index % rows) : 0.0f) : ATTNLOOM_NEG_INF;
      }
      __syncthreads();
      if (my_row < rows) {
        float next = highest;
        for (int i = my_lane; i < pieces; i += 8) next = fmaxf(next, weights[i * rows + my_row]);
        next = max_of_eight(next);
        const float shift = next > ATTNLOOM_NEG_INF ? next : 0.0f;
        const float factor = kSoftmax ? exp2f((highest - shift) * kLog2e) : 1.0f;
        float part = 0.0f;
        for (int i = my_lane; i < pieces; i += 8) {
          float& value = weights[i * rows + my_row];
          value = exp2f((value - shift) * kLog2e);
          part += value;
        }
        sum = sum * factor + sum_of_eight(part);
        highest = next;
        if (my_lane == 0) factors[my_row] = factor;
      }
      __syncthreads();
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        if (row_of(pair) < rows) scale_quad(merged[pair], factors[row_of(pair)]);
      }
      if (rows * kQuads <= S::kThreads) {
        add_values<1>(begin, pieces, from, rows, weights, merged);
      } else {
        add_values<kPairs>(begin, pieces, from, rows, weights, merged);
      }
      __syncthreads();
    }
    if (my_row < rows && my_lane == 0) {
      ends[my_row] = kSoftmax ? (sum == 0.0f ? 0.0f : 1.0f / sum) : 1.0f;
      factors[my_row] = sum == 0.0f ? ATTNLOOM_NEG_INF : highest + log2f(sum) * kLn2;
    }
    __syncthreads();
    const OutputTile<S> tile{cta, work, from, weights + kMergeFloats};
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const int row = row_of(pair);
      if (row >= rows) continue;
      scale_quad(merged[pair], ends[row]);
      tile.put(row, quad_of(pair), merged[pair], factors[row]);
    }
    __syncthreads();
    tile.transform(rows, thread_anew(), S::kThreads);
    __syncthreads();
  }

  static constexpr int kMergeFloats = kRound * 16 + 32;
  static_assert((kMergeFloats + 16 * S::kPitchOut) * 4 <= S::kStageBytes, "a stage has room for the merge");

  static __device__ float max_of_eight(float value) {
    const uint32_t lanes = 0xffu << (thread_anew() % 32 / 8 * 8);
#pragma unroll
    for (int step = 1; step < 8; step *= 2) value = fmaxf(value, __shfl_xor_sync(lanes, value, step));
    return value;
  }
  static __device__ float sum_of_eight(float value) {
    const uint32_t lanes = 0xffu << (thread_anew() % 32 / 8 * 8);
#pragma unroll
    for (int step = 1; step < 8; step *= 2) value += __shfl_xor_sync(lanes, value, step);
    return value;
  }
};

// Not inlined: it is long, and little of the main loop is alive here. `room`: a stage.
template <typename S>
__device__ __noinline__ void merge_if_last(int32_t piece, float* room) {
  const Cta<S> cta = Cta<S>::again();
  Merge<S> merge{cta};
  merge.arrive(cta.work(piece), room);
}

}  // namespace sm80
}  // namespace attnloom
