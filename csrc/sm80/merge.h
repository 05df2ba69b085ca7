// Split items: pieces leave their states in the arena, and the last worker to arrive merges them in the order of the
// workers. Nobody waits for another worker.
#pragma once

#include <cstdint>

#include "planner/plan.h"
#include "sm80/epilogue.h"

namespace attnloom {
namespace sm80 {

// The arena: [2 * workers][tile_q][kDimV] values, then [2 * workers][tile_q] LSEs. Rows are counted over all slots, in
// 32 bits.
template <typename S>
struct Partials {
  static constexpr int kQuads = S::kDimV / 4;
  const AttentionParams& p;

  __device__ int32_t first_row(int32_t slot) const { return slot * p.tile_q; }
  __device__ float4* quad(int32_t row, int32_t index) const {  // of row `row` and those behind it
    return reinterpret_cast<float4*>(p.arena) + (row * kQuads + index);
  }
  __device__ float* lses() const {
    return anew(p.arena + static_cast<int64_t>(2 * p.num_workers * p.tile_q) * S::kDimV);
  }
};

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
      const Partials<S> partials{cta.p};
      const int32_t at = partials.first_row(partial_slot(cta.worker(), work.piece.opens)) + first + row;
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

// The item whose last piece has arrived. A thread merges four dims of a row, of one row after the other; it computes
// the weights from the LSEs by itself, so that these come with the values and nobody waits for another.
//
// All of it is short: code that runs once in a launch comes from DRAM like data.
template <typename S>
struct Merge {
  static constexpr int kQuads = S::kDimV / 4;
  // Rows whose output lies in shared memory until output_transform has seen it.
  static constexpr int kBlock = S::Variant::kHasOutputTransform ? 16 : S::kTallRows;
  static_assert(!S::Variant::kHasOutputTransform || kBlock * S::kPitchOut * 4 <= S::kStageBytes, "a stage has room");
  // As many loads at once as hide the L2 and registers have room for: rows of a thread, and pieces of each.
  static constexpr int kRows = S::kTall ? 8 : 1;
  static constexpr int kPieces =
      S::kTall ? 2 : (S::kCtasPerSm < 4 ? 17 : 8);  // an H200's 264 workers cut 8 heads in 33

  const Cta<S>& cta;
  const Work<S>& work;
  const Split split;
  float* room;  // a stage that nobody uses

  __device__ void run() const {
    if (split.pieces != split.count) fill_gaps();
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
  // Where the state of piece `nth` begins in the arena: partial_slot() of neighbours that lie `lockstep` workers apart,
  // of which only the first opens the item.
  struct Places {
    int32_t first;
    int32_t step;
    int32_t last;

    __device__ explicit Places(const Merge& of)
        : first(2 * of.cta.peer(of.split.opener) * of.cta.p.tile_q),
          step(2 * of.cta.lockstep() * of.cta.p.tile_q),
          last(first + (of.split.count - 1) * step) {}
    // Of the last piece where there are fewer. Made anew: the places of all would be kept from round to round.
    __device__ __forceinline__ int32_t of_piece(int32_t nth, int32_t tile_q) const {
      return min(max(first + nth * anew(step), first + tile_q), last);
    }
  };

  // A stretch without work inside the item has left nothing, and nobody but this CTA looks at its slots: they become
  // states that saw no key.
  __device__ void fill_gaps() const {
    const Partials<S> partials{cta.p};
    const Places places(*this);
#pragma unroll 1
    for (int32_t nth = 1; nth < split.count; ++nth) {
      if (cta.plan().has_work(split.opener + nth)) continue;
      const int32_t at = places.of_piece(nth, cta.p.tile_q);
#pragma unroll 1
      for (int index = thread_anew(); index < work.rows * kQuads; index += S::kThreads) {
        *partials.quad(at, index) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (index < work.rows) partials.lses()[at + index] = ATTNLOOM_NEG_INF;
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ void merge_rows(int from, int rows) const {
    const int all = rows * kQuads;
    const OutputTile<S> tile{cta, work, from, room};
    const Partials<S> partials{cta.p};
    const float* const lses = partials.lses();
    const Places places(*this);
    const int32_t tile_q = cta.p.tile_q;
#pragma unroll 1
    for (int begin = thread_anew(); begin < all; begin += kRows * S::kThreads) {
      float4 merged[kRows];
      float peak[kRows];
      float sum[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        merged[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        peak[r] = ATTNLOOM_NEG_INF;
        sum[r] = 0.0f;
      }
#pragma unroll 1
      for (int32_t piece = 0; piece < split.count; piece += kPieces) {
        // Other CTAs wrote them, so they must come from the L2. Always from a piece and a row that exist: an array that
        // is loaded under a condition keeps its registers all the time.
        float4 value[kRows][kPieces];
        float lse[kRows][kPieces];
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const int32_t row = places.of_piece(piece + i, tile_q) + from;
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            const int index = min(begin + r * S::kThreads, all - 1);
            value[r][i] = __ldcg(partials.quad(row, index));
            lse[r][i] = __ldcg(lses + (row + index / kQuads));
          }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float next = peak[r];
#pragma unroll
          for (int i = 0; i < kPieces; ++i) {
            lse[r][i] = piece + i < split.count ? lse[r][i] * kLog2e : ATTNLOOM_NEG_INF;
            next = fmaxf(next, lse[r][i]);
          }
          const float shift = next > ATTNLOOM_NEG_INF ? next : 0.0f;
          const float factor = fast_exp2(peak[r] - shift);
          peak[r] = next;
          sum[r] *= factor;
          scale_quad(merged[r], factor);
#pragma unroll
          for (int i = 0; i < kPieces; ++i) {
            const float weight = fast_exp2(lse[r][i] - shift);
            sum[r] += weight;
            add_quad(merged[r], weight, value[r][i]);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int index = begin + r * S::kThreads;
        if (index >= all) continue;
        if constexpr (S::Variant::kSoftmax) scale_quad(merged[r], sum[r] == 0.0f ? 0.0f : __fdividef(1.0f, sum[r]));
        const float lse = sum[r] == 0.0f ? ATTNLOOM_NEG_INF : (peak[r] + fast_log2(sum[r])) * kLn2;
        tile.put(index / kQuads, index % kQuads, merged[r], lse);
      }
    }
  }
};

// Not inlined: it is long, and little of the main loop is alive here. `room`: a stage.
template <typename S>
__device__ __noinline__ void merge_if_last(int32_t piece, float* room) {
  const Cta<S> cta = Cta<S>::again();
  const Work<S>& work = cta.work(piece);
  const Split& split = cta.split_of(work.piece);
  if (is_last(cta, split)) Merge<S>{cta, work, split, room}.run();
}

}  // namespace sm80
}  // namespace attnloom
