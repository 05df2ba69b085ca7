// The table of the pieces that are computed now and next, which all warps of a CTA read.
//
// A warp makes a batch of pieces at once, a lane each: what a piece is made from lies behind three dependent reads of
// global memory, and most pieces are short.
#pragma once

#include <cstdint>

#include "sm80/work.h"

namespace attnloom {
namespace sm80 {

// Pieces from `first` on. All lanes of one warp together.
template <typename S>
__device__ __forceinline__ void make_pieces(const Cta<S>& cta, PlanView<const int32_t> plan, const Stretch& stretch,
                                            int32_t first) {
  const int32_t piece = first + cta.lane();
  if (cta.lane() < S::kBatch && piece < stretch.pieces) {
    Work<S> made;
    made.set(cta, plan, stretch.piece(cta.p, plan, piece));
    cta.work(piece) = made;
  }
}
// The same later: not inlined, since it is long and called once a batch.
template <typename S>
__device__ __noinline__ void make_later_pieces(int32_t first) {
  const Cta<S> cta = Cta<S>::again();
  make_pieces(cta, cta.plan(), cta.stretch(), first);
}

// How far before its first piece is computed a batch is there; it is made earlier, so that a barrier lies between.
constexpr int kLead = 6;
constexpr int kMakeAt = 2;  // of the batch before

// Where the pieces end that the table holds while `computing` is computed.
template <typename S>
__device__ __forceinline__ int32_t pieces_known(const Cta<S>& cta, int32_t computing) {
  static_assert(kMakeAt < S::kBatch - kLead && S::kTable == 2 * S::kBatch, "made, seen by all, and then overwritten");
  return min(((computing + kLead) / S::kBatch + 1) * S::kBatch, cta.stretch().pieces);
}

// Before the CTA begins with a piece: makes the next batch, if it is time.
template <typename S>
__device__ __forceinline__ void look_ahead(const Cta<S>& cta, int32_t piece) {
  if (piece % S::kBatch != kMakeAt || cta.warp() != 0) return;
  const int32_t next = (piece / S::kBatch + 1) * S::kBatch;
  if (next < cta.stretch().pieces) make_later_pieces<S>(next);
}

}  // namespace sm80
}  // namespace attnloom
