// Split items: pieces leave their states in the arena, and the last worker to arrive merges them in the order of the
// workers. Nobody waits for another worker.
#pragma once

#include <cstdint>

#include "planner/plan.h"
#include "sm80/epilogue.h"

namespace attnloom {
namespace sm80 {

// The arena: [2 * workers][kSlotRows][kDimV] values, then [2 * workers][kSlotRows] LSEs, then room that reads may reach
// into (core/arena.py). A worker has two slots, for the item that it opens and for the one that it goes on with, and
// the workers of neighbouring stretches that compute the same heads lie side by side, so that from a piece of an item
// to the next is a constant. Rows are counted over all slots, in 32 bits.
template <typename S>
struct Partials {
  static constexpr int kSlotRows = S::kTall ? S::kTallRows : S::kShortRows;  // the launch's tile_q
  static constexpr int kQuads = S::kDimV / 4;
  const AttentionParams& p;

  static __device__ int32_t first_row(int32_t stretch, bool opens) {
    return (2 * (blockIdx.x * gridDim.y + stretch) + (opens ? 1 : 0)) * kSlotRows;
  }
  // Where piece `nth` of an item begins, of which only the first opens it.
  static constexpr int kStep = 2 * kSlotRows;  // from a piece to the next
  static __device__ int32_t first_row_of(int32_t opener, int32_t nth) {
    return first_row(opener, nth == 0) + nth * kStep;
  }
  __device__ float4* quad(int32_t row, int32_t index) const {  // of row `row` and those behind it
    return reinterpret_cast<float4*>(p.arena) + (row * kQuads + index);
  }
  __device__ float* lses() const {
    return anew(p.arena + static_cast<int64_t>(2 * p.num_workers * kSlotRows) * S::kDimV);
  }
};

// Rows of a warp's output to shared memory, as float32: those of kHalves halves of 8 from `half` on, as far as there
// are `count` of them.
template <typename S, int kHalves>
__device__ __forceinline__ void share_output(const Rows<S>& rows, int half, int count, uint32_t lane, float* to) {
#pragma unroll
  for (int own = 0; own < 2; ++own) {
    if (own < half || own >= half + kHalves || (own - half) * 8 >= count) continue;
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
      const Partials<S> partials{cta.p};
      const int32_t at = partials.first_row(cta.stretch_index(), work.piece.opens) + first + row;
      *partials.quad(at, quad) = value;
      // Without softmax a state's LSE says no more than that it is there.
      if (quad == 0) partials.lses()[at] = S::Variant::kSoftmax ? lse : 0.0f;
    }
  }
  __device__ void transform(int first, float* waiting, int count, int thread, int threads) const {
    if (S::kAlike || work.piece.whole()) OutputTile<S>{cta, work, first, waiting}.transform(count, thread, threads);
  }
};

// Called by the whole CTA once the state of its piece is in the arena: whether it is the last one of the item.
template <typename S>
__device__ __forceinline__ bool is_last(const Cta<S>& cta, const Split& split) {
  int32_t* flag = reinterpret_cast<int32_t*>(shared_memory + S::kFlagAt);
  __syncthreads();
  if (threadIdx.x == 0) {
    // One thread stands for all: what others wrote before a barrier, or read after one, is ordered with its arrival.
    int32_t* arrivals = cta.p.arrivals + cta.peer(split.opener);
    const bool last = arrive(arrivals) + 1 == split.pieces;
    if (last) *arrivals = 0;  // ready for the next run
    *flag = last;
  }
  __syncthreads();
  return *flag;
}

// A stretch without work inside the item has left nothing, and nobody but this CTA looks at its slots: they become
// states that saw no key.
template <typename S>
__device__ __forceinline__ void fill_gaps(const Cta<S>& cta, const Work<S>& work, const Split& split) {
  const Partials<S> partials{cta.p};
#pragma unroll 1
  for (int32_t nth = 1; nth < split.count; ++nth) {
    if (cta.plan().has_work(split.opener + nth)) continue;
    const int32_t at = partials.first_row_of(split.opener, nth);
#pragma unroll 1
    for (int index = thread_anew(); index < work.rows * partials.kQuads; index += S::kThreads) {
      *partials.quad(at, index) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (index < work.rows) partials.lses()[at + index] = ATTNLOOM_NEG_INF;
    }
  }
  __syncthreads();
}

// The item whose last piece has arrived. Lanes that share a row weigh its states by their LSEs, and the weights wait in
// shared memory; a thread adds up four dims of kRows rows at once, kPieces states of each. What it adds is on its way
// while the weights are made.
//
// All of it is short: code that runs once in a launch comes from DRAM like data.
template <typename S, int kRows, int kPieces>
struct Merge {
  static constexpr int kQuads = Partials<S>::kQuads;
  static constexpr int kStep = Partials<S>::kStep;
  // Rows at once; their output may lie in shared memory until output_transform has seen it.
  static constexpr int kBlock = kRows == 1 ? S::kShortRows : S::kTallRows;
  static constexpr int kGroup = kPieces < 3 ? kPieces : 3;  // pieces whose places are constants
  static constexpr int kLses = 2;                           // of a lane that weighs

  // Of a row: the largest LSE so far, in powers of two; the sum of the weights against it; what sums before it are to
  // be multiplied with.
  struct Total {
    float peak;
    float sum;
    float factor;
  };
  // Shared memory, in floats: rows that wait for output_transform, then the weights of as many pieces as there is room
  // for, then totals.
  static constexpr int kWeightsAt = S::Variant::kHasOutputTransform ? kBlock * S::kPitchOut : 0;
  static constexpr int kKnown = (S::kStageBytes / 4 - kWeightsAt - kBlock * 3) / kBlock / kPieces * kPieces;
  static constexpr int kTotalsAt = kWeightsAt + kBlock * kKnown;
  static_assert(kKnown > 0 && kPieces % kGroup == 0, "a stage has room");

  const Cta<S>& cta;
  const Work<S>& work;
  const Split& split;
  float* room;  // a stage that nobody uses

  __device__ __forceinline__ void run() const {
#pragma unroll 1
    for (int from = 0; from < work.rows; from += kBlock) {
      const int rows = min(kBlock, work.rows - from);
      merge_rows(from, rows);
      if constexpr (S::Variant::kHasOutputTransform) {
        __syncthreads();
        OutputTile<S>{cta, work, from, room}.transform(rows, thread_anew(), S::kThreads);
      }
      __syncthreads();
    }
  }

 private:
  // The lanes of a row, a power of two, and who the thread is among them.
  struct Weigher {
    int log_lanes;
    int row;
    int lane;
    bool mine;  // there is such a row

    __device__ explicit Weigher(int rows) : log_lanes(5) {
#pragma unroll
      for (int most = S::kThreads >> 5; most < kBlock; most *= 2) log_lanes -= rows > most;
      const int thread = thread_anew();
      row = min(thread >> log_lanes, rows - 1);
      lane = thread & ((1 << log_lanes) - 1);
      mine = thread >> log_lanes < rows;
    }
    __device__ int piece(int i) const { return lane + (i << log_lanes); }
    template <typename Combine>
    __device__ float reduce(float value, Combine combine) const {
#pragma unroll 1
      for (int step = 1; step < 1 << log_lanes; step *= 2) {
        value = combine(value, __shfl_xor_sync(0xffffffff, value, step));
      }
      return value;
    }
  };

  __device__ Total& total(int row) const { return reinterpret_cast<Total*>(room + kTotalsAt)[row]; }
  __device__ float* weights(int row) const { return room + kWeightsAt + row * kKnown; }

  // LSEs of the thread's row, of its own pieces from `begin` on; always of a piece that exists. `lses`: of piece 0, had
  // it not opened the item.
  __device__ __forceinline__ void read_lses(const Weigher& who, const float* lses, int32_t begin,
                                            float (&to)[kLses]) const {
#pragma unroll
    for (int i = 0; i < kLses; ++i) {
      const uint32_t piece = min(begin + who.piece(i), split.count - 1);
      to[i] = __ldcg(lses + (piece * kStep + (i == 0 && piece == 0 ? kStep / 2 : 0)));
    }
  }

  // The weights of pieces [begin, begin + kKnown) for all rows. `lse`: the thread's first ones. Leaves the CTA in step.
  __device__ __forceinline__ void weigh(const Weigher& who, const float* lses, int32_t begin,
                                        float (&lse)[kLses]) const {
    const int32_t end = min(kKnown, split.count - begin);
    float* const own = weights(who.row);
    Total sum{ATTNLOOM_NEG_INF, 0.0f, 0.0f};
    if (begin > 0) {
      __syncthreads();  // nobody needs the weights before these
      if (who.mine) sum = total(who.row);
    }
    float peak = sum.peak;
#pragma unroll 1
    for (int32_t from = 0;;) {
#pragma unroll
      for (int i = 0; i < kLses; ++i) {
        const int32_t piece = from + who.piece(i);
        if (piece < end && who.mine) {
          own[piece] = lse[i] * kLog2e;
          peak = fmaxf(peak, lse[i] * kLog2e);
        }
      }
      from += kLses << who.log_lanes;
      if (from >= end) break;
      read_lses(who, lses, begin + from, lse);
    }
    peak = who.reduce(peak, [](float a, float b) { return fmaxf(a, b); });
    const float shift = peak > ATTNLOOM_NEG_INF ? peak : 0.0f;
    float added = 0.0f;
    if (who.mine) {
#pragma unroll 1
      for (int32_t piece = who.lane; piece < end; piece += 1 << who.log_lanes) {
        const float weight = fast_exp2(own[piece] - shift);
        own[piece] = weight;
        added += weight;
      }
    }
    added = who.reduce(added, [](float a, float b) { return a + b; });
    const float factor = fast_exp2(sum.peak - shift);
    if (who.mine && who.lane == 0) total(who.row) = {peak, sum.sum * factor + added, factor};
    __syncthreads();
  }

  __device__ __forceinline__ void merge_rows(int from, int rows) const {
    const int all = rows * kQuads;
    const OutputTile<S> tile{cta, work, from, room};
    const Partials<S> partials{cta.p};
    const Weigher who(rows);
    const int32_t first_row = partials.first_row(split.opener, false) + from;
    const float* const lses = partials.lses() + (first_row + who.row);
#pragma unroll 1
    for (int base = 0; base < all; base += kRows * S::kThreads) {
      const int begin = base + thread_anew();
      const float4* const states = partials.quad(first_row, begin);
      float4 merged[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) merged[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      int32_t known = 0;  // the piece from which on the weights are there
#pragma unroll 1
      for (int32_t piece = 0; piece < split.count; piece += kPieces) {
        const bool later = piece - known == kKnown;  // an item in more pieces than there is room for
        if (later) known = piece;
        const bool unknown = later || (piece == 0 && (base == 0 || split.count > kKnown));
        // All of what is read has been written by other CTAs, so it must come from the L2. Nothing is read under a
        // condition: an array that is keeps its registers all the time. So groups behind the last are that one again,
        // and in it, and behind the last row, the reads run into what others have written or will write; it is not
        // used.
        float lse[kLses];
        read_lses(who, lses, piece, lse);
        float4 value[kPieces][kRows];
#pragma unroll
        for (int group = 0; group < kPieces; group += kGroup) {
          const uint32_t first = min(piece + group, (split.count - 1) / kGroup * kGroup);
          const float4* const at = states + first * (kStep * kQuads);
          const int opened = group == 0 && piece == 0 ? kStep / 2 * kQuads : 0;
#pragma unroll
          for (int i = 0; i < kGroup; ++i) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              value[group + i][r] = __ldcg(at + (i == 0 ? opened : i * (kStep * kQuads)) + r * S::kThreads);
            }
          }
        }
        if (unknown) {
          weigh(who, lses, piece, lse);
          if (later) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) scale_quad(merged[r], total(row_of(begin, r, rows)).factor);
          }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float* const weight = weights(row_of(begin, r, rows)) + (piece - known);
#pragma unroll
          for (int i = 0; i < kPieces; ++i) {
            if (piece + i < split.count) add_quad(merged[r], weight[i], value[i][r]);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int index = begin + r * S::kThreads;
        if (index >= all) continue;
        const Total& sum = total(index / kQuads);
        if constexpr (S::Variant::kSoftmax) scale_quad(merged[r], sum.sum == 0.0f ? 0.0f : __fdividef(1.0f, sum.sum));
        const float lse = sum.sum == 0.0f ? ATTNLOOM_NEG_INF : (sum.peak + fast_log2(sum.sum)) * kLn2;
        tile.put(index / kQuads, index % kQuads, merged[r], lse);
      }
      if (split.count > kKnown) __syncthreads();
    }
  }

  static __device__ int row_of(int begin, int r, int rows) { return min((begin + r * S::kThreads) / kQuads, rows - 1); }
};

#if __CUDA_ARCH__ >= 1000
constexpr int kMergedAtOnce = 3;  // more spill there (CUDA 13.0)
#else
constexpr int kMergedAtOnce = 9;
#endif

// Not inlined: it is long, and little of the main loop is alive here. `room`: a stage.
template <typename S>
__device__ __noinline__ void merge_if_last(int32_t piece, float* room) {
  const Cta<S> cta = Cta<S>::again();
  const Work<S>& work = cta.work(piece);
  const Split& split = cta.split_of(work.piece);
  if (!is_last(cta, split)) return;
  if (split.pieces != split.count) fill_gaps(cta, work, split);
  if constexpr (S::kTall && !S::Variant::kHasOutputTransform) {
    if (work.rows > S::kShortRows) return Merge<S, 8, 2>{cta, work, split, room}.run();
  }
  Merge<S, 1, kMergedAtOnce>{cta, work, split, room}.run();
}

}  // namespace sm80
}  // namespace attnloom
