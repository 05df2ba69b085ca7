// The engine's batch_invariant mode: every chunk of an item's KV gives a state of its own, and the item is the fold of
// these states in their order, whoever computed them.
//
// Who holds an item's first chunk folds as it goes, in its slot of the arena, where a thread reads and writes what is
// its own; an item that is one chunk never leaves the registers. Who continues an item leaves the state of each chunk,
// and the last of an item's workers to arrive folds them onto what the first has left.
#pragma once

#include <cstdint>

#include "common/visible.h"
#include "planner/plan.h"
#include "sm80/merge.h"
#include "sm80/ptx.h"
#include "sm80/softmax.h"
#include "sm80/work.h"

namespace attnloom {
namespace sm80 {

// How two states of a row become one. A state that saw no key has the peak -inf and zeros: it changes no bit of the
// other, so that chunks which only other rows of a tile see do not reach a row.
template <bool kSoftmax>
struct Fold {
  float peak;
  float of_earlier;
  float of_later;

  __device__ __forceinline__ Fold(float earlier, float later) {
    peak = ATTNLOOM_NEG_INF;
    of_earlier = of_later = 1.0f;
    if constexpr (kSoftmax) {
      peak = fmaxf(earlier, later);
      const float shift = peak > ATTNLOOM_NEG_INF ? peak : 0.0f;
      of_earlier = fast_exp2(earlier - shift);
      of_later = fast_exp2(later - shift);
    }
  }
  // Every fold rounds alike, wherever it is compiled in.
  __device__ __forceinline__ float operator()(float earlier, float later) const {
    return __fmaf_rn(later, of_later, __fmul_rn(earlier, of_earlier));
  }
};

// The states of chunks in the arena, as a warp sees those of its own rows: [slots][tile_q][kDimV] values, in the order
// of the threads that hold them, then [slots][tile_q] peaks and sums; slots as planner/plan.h counts them. Other CTAs
// read what is written here: it must come from the L2. `count`: rows that there are.
template <typename S>
struct ChunkStates {
  const Cta<S>& cta;

  __device__ __forceinline__ void store(int64_t slot, int count, const Rows<S>& rows) const {
    float2* to = values(slot);
    __syncwarp();  // one lane writes a row's peak and sum, all of its lanes read them
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row(half) >= count) continue;
      if (cta.lane() % 4 == 0) __stcg(state(slot, half), make_float2(rows.peak[half], rows.total[half]));
      if (is_empty(rows.total[half])) continue;
#pragma unroll
      for (int i = 0; i < S::kDimV / 8; ++i) {
        __stcg(to + (i * 2 + half) * 32, make_float2(rows.out[i][half * 2], rows.out[i][half * 2 + 1]));
      }
    }
    __syncwarp();
  }
  // Rows become the fold of them and a slot's state, which is the later one or the earlier one.
  template <bool kLater>
  __device__ __forceinline__ void fold(int64_t slot, int count, Rows<S>& rows) const {
    const float2* from = values(slot);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row(half) >= count) continue;
      const float2 found = __ldcg(state(slot, half));
      if (is_empty(found.y)) continue;  // it would change nothing
      const Fold<S::Variant::kSoftmax> both(kLater ? rows.peak[half] : found.x, kLater ? found.x : rows.peak[half]);
      const auto join = [&](float& own, float other) { own = kLater ? both(own, other) : both(other, own); };
      rows.peak[half] = both.peak;
      join(rows.total[half], found.y);
#pragma unroll
      for (int i = 0; i < S::kDimV / 8; ++i) {
        const float2 value = __ldcg(from + (i * 2 + half) * 32);
        join(rows.out[i][half * 2], value.x);
        join(rows.out[i][half * 2 + 1], value.y);
      }
    }
  }

 private:
  // Whether a row with this sum saw no key, so that its values are not written.
  static __device__ bool is_empty(float total) { return S::Variant::kSoftmax && total == 0.0f; }
  __device__ int row(int half) const { return cta.lane() / 4 + half * 8; }  // of the warp's 16
  __device__ float2* values(int64_t slot) const {
    const int64_t row = slot * cta.plan().header().tile_q + cta.warp() * 16;
    return reinterpret_cast<float2*>(cta.p.arena + row * S::kDimV) + cta.lane();
  }
  __device__ float2* state(int64_t slot, int half) const {
    const PlanHeader& header = cta.plan().header();
    const int64_t rows = fold_slot(header, header.num_workers) * header.tile_q;
    return reinterpret_cast<float2*>(cta.p.arena + rows * S::kDimV) + slot * header.tile_q + cta.warp() * 16 +
           row(half);
  }
};

// The chunks of the piece that is computed, one after the other.
template <typename S>
struct Chunks {
  int32_t nth;   // the current one, of the piece
  int32_t turn;  // the first KV tile behind it
  bool kept;     // of an item that is opened: whether the worker's slot has the fold of the chunks before

  __device__ void begin(const Cta<S>& cta, const Work<S>& work) {
    const PlanHeader& header = cta.plan().header();
    nth = 0;
    kept = false;
    turn = first_of_item(header, kv_tiles_of(work.any, S::kTileKv)) + work.piece.kv_begin + header.chunk;
  }
  __device__ bool over_at(int32_t tile) const { return tile >= turn; }
  // On to the next chunk; but to that of `tile` where those between, which a block mask hides, need no state.
  __device__ void next(const Cta<S>& cta, const Work<S>& work, int32_t tile) {
    do {
      ++nth;
      turn += cta.plan().header().chunk;
    } while (work.piece.opens && over_at(tile));
  }

  // Puts the state of the current chunk, settled, where the others of the item are.
  __device__ __forceinline__ void put(const Cta<S>& cta, const Work<S>& work, Rows<S>& rows) {
    const int count = rows_of_warp(cta, work);
    if (count <= 0) return;
    const int32_t room = cta.plan().header().chunk_states;
    int64_t slot = fold_slot(cta.plan().header(), cta.worker());
    bool beside = kept;
    kept = true;
    if (!work.piece.opens) {
      // Only true lengths beyond the planned ones have more chunks than there is room for: those share the last slot,
      // which is right, but not the same on any number of workers.
      slot += 1 + min(nth, room - 1);
      beside = nth >= room;
    }
    const ChunkStates<S> states{cta};
    if (beside) states.template fold<false>(slot, count, rows);
    states.store(slot, count, rows);
  }

  // The piece is over; rows hold the settled state of the last chunk that was begun. Returns whether rows are now those
  // of the whole item, for this CTA to write. Called by the whole CTA.
  __device__ __forceinline__ bool end(const Cta<S>& cta, const Work<S>& work, Rows<S>& rows) {
    const ChunkStates<S> states{cta};
    const int count = rows_of_warp(cta, work);
    if (work.piece.whole()) {
      if (kept && count > 0) states.template fold<false>(fold_slot(cta.plan().header(), cta.worker()), count, rows);
      return true;
    }
    const Range chunks = chunks_of(cta.plan().header(), kv_tiles_of(work.any, S::kTileKv));
    if (work.piece.opens) {
      put(cta, work, rows);
    } else {
      const Piece& piece = work.piece;
      const Range own = chunks_of_piece(cta.plan().header(), chunks, piece.kv_begin, piece.kv_end, piece.closes);
      for (; nth < own.end - own.begin; ++nth) {
        put(cta, work, rows);
        rows.reset();
      }
    }
    const Split& split = cta.split_of(work.piece);
    if (!is_last(cta, split)) return false;
    if (count > 0) gather(cta, split, chunks, count, rows);
    return true;
  }

 private:
  static __device__ int rows_of_warp(const Cta<S>& cta, const Work<S>& work) {
    return min(16, work.rows - static_cast<int>(cta.warp()) * 16);
  }

  // Folds what the stretches of an item have left.
  __device__ __forceinline__ void gather(const Cta<S>& cta, const Split& split, Range chunks, int count,
                                         Rows<S>& rows) const {
    const ChunkStates<S> states{cta};
    const auto slot_of = [&](int32_t of) { return fold_slot(cta.plan().header(), cta.peer(split.opener + of)); };
    rows.reset();
    states.template fold<true>(slot_of(0), count, rows);
    for (int32_t of = 1; of < split.count; ++of) {
      const PlanHeader& header = cta.plan().header();
      const int32_t stretch = split.opener + of;
      const Range left = chunks_of_piece(header, chunks, cta.plan().start(stretch).kv, cta.plan().start(stretch + 1).kv,
                                         of + 1 == split.count);
      const int32_t most = min(left.end - left.begin, header.chunk_states);
      for (int32_t i = 0; i < most; ++i) states.template fold<true>(slot_of(of) + 1 + i, count, rows);
    }
  }
};

}  // namespace sm80
}  // namespace attnloom
