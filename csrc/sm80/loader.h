// The loader: gathers the KV tiles of a worker's stretch into the stages, ahead of the computation and across items.
//
// Page ids run one tile further ahead than the copies. Each warp loads its slice of 16 tokens of every tile.
#pragma once

#include <cstdint>

#include "planner/plan.h"
#include "sm80/ptx.h"
#include "sm80/work.h"

namespace attnloom {
namespace sm80 {

template <typename S>
struct Loader {
  const Cta<S>& cta;
  Work<S>& work;
  const bool tall;  // the kind of query tile whose KV is loaded; the stream ends at the first piece of the other kind
  KvTiles<S> tiles;
  bool ready;  // the page ids of the next tile were asked for
  // Of token lane % 16 of the warp's slice in the next tile. What is loaded is not touched before the copies need it:
  // it has a whole tile's time.
  int32_t block;   // 0 for a token that nobody sees
  int32_t offset;  // in the block
  int32_t position;
  uint32_t valid;  // a bit for each token that somebody sees

  // At the piece that begins at `work.next`.
  __device__ Loader(const Cta<S>& of, Coordinate at, bool of_tall) : cta(of), work(of.loading()), tall(of_tall) {
    work.next = at;
    work.piece.tile = -1;  // none yet
    tiles.tile = tiles.end = 0;
    ready = false;
  }

  // Starts the copies of the next tile, and the fetch of the page ids of the one after. The first call has no ids yet.
  __device__ __forceinline__ void load(int stage) {
    if (ready) copy_slice<1>(cta.slice(stage, cta.warp()), 0);
    advance(stage);
  }
  // The same in kParts steps, for the time between: many copies at once keep shared memory from those who compute.
  template <int kParts>
  __device__ __forceinline__ void load_part(int stage, int part) {
    if (ready) copy_slice<kParts>(cta.slice(stage, cta.warp()), part);
    if (part == kParts - 1) advance(stage);
  }

 private:
  __device__ __forceinline__ void advance(int stage) {
    if (ready) {
      if (cta.p.layout.positions != nullptr && cta.lane() < S::kSlice) {
        cta.positions(stage)[cta.warp() * S::kSlice + cta.lane()] = position;
      }
      tiles.next(cta, work);
    }
    if (!tiles.has()) find_piece();
    ready = tiles.has();
    if (ready) fetch_pages();
    commit_copies();
  }

  // Moves to the next piece that has a tile to load.
  __device__ __forceinline__ void find_piece() {
    while (work.next < cta.constants().stop && !tiles.has()) {
      const Piece piece = cta.plan().piece_at(work.next, cta.constants().stop);
      if ((cta.plan().tile_rows()[piece.tile] > S::kShortRows) != tall) return;
      work.set(cta, piece);
      tiles.start(cta, work);
    }
  }

  __device__ __forceinline__ void fetch_pages() {
    const Range any = work.any;
    const int32_t slot = tiles.tile * S::kTileKv + cta.warp() * S::kSlice + cta.lane() % S::kSlice;
    // A token that nobody sees takes the page of one that is seen; nothing of it is copied.
    const int32_t seen = max(min(slot, any.end - 1), any.begin);
    const int32_t entry = cta.constants().block_size.divide(seen);
    offset = seen - entry * static_cast<int32_t>(cta.p.layout.block_size);
    block = __ldg(work.blocks + entry);
    valid = __ballot_sync(0xffffffff, slot == seen);
    if (cta.p.layout.positions != nullptr) position = __ldg(work.positions + entry) + offset;
  }

  // Where the lane's token lies behind the cache's first, in bytes. Strides fit into 32 bits, offsets need not.
  __device__ __forceinline__ int64_t token_in(const CacheTensor& cache) const {
    constexpr int kBytes = sizeof(typename S::Kv);
    return static_cast<int64_t>(block) * (anew(cache.stride_block) * kBytes) +
           static_cast<int64_t>(offset) * (anew(cache.stride_slot) * kBytes);
  }
  __device__ __forceinline__ const char* head_of(const CacheTensor& cache) const {
    return static_cast<const char*>(cache.data) +
           static_cast<int64_t>(work.head) * (anew(cache.stride_head) * static_cast<int32_t>(sizeof(typename S::Kv)));
  }

  template <int kParts>
  __device__ __forceinline__ void copy_slice(char* slice, int part) const {
    const uint32_t keys = shared_address(slice);
    const uint32_t values = keys + S::kSlice * S::kPitchK;
    const int64_t token = token_in(cta.p.k);
    const char* k = head_of(cta.p.k);
    const char* v = head_of(cta.p.v);
    const bool alike =
        anew(cta.p.k.stride_block) == cta.p.v.stride_block && anew(cta.p.k.stride_slot) == cta.p.v.stride_slot;
    if (S::kDim == S::kDimV && alike) {  // as caches mostly are: one offset for both
      for_chunks<S::kDim, kParts>(part, token, [&](int64_t from, int copy, int row, int chunk, bool wanted) {
        copy_async(place<S::kDim, S::kPitchK>(keys, copy, row, chunk), k + from, wanted);
        copy_async(place<S::kDimV, S::kPitchV>(values, copy, row, chunk), v + from, wanted);
      });
    } else {
      for_chunks<S::kDim, kParts>(part, token, [&](int64_t from, int copy, int row, int chunk, bool wanted) {
        copy_async(place<S::kDim, S::kPitchK>(keys, copy, row, chunk), k + from, wanted);
      });
      for_chunks<S::kDimV, kParts>(
          part, token_in(cta.p.v), [&](int64_t from, int copy, int row, int chunk, bool wanted) {
            copy_async(place<S::kDimV, S::kPitchV>(values, copy, row, chunk), v + from, wanted);
          });
    }
  }

  template <int kWidth>
  static constexpr int kChunks = kWidth * static_cast<int>(sizeof(typename S::Kv)) / 16;  // of a row of kWidth elements
  // Whether a warp copies whole rows at once, kRows of them.
  template <int kWidth>
  static constexpr bool kWholeRows = 32 % kChunks<kWidth> == 0;
  template <int kWidth>
  static constexpr int kRows = 32 / kChunks<kWidth>;

  // copy(from, which, row, chunk, wanted) for every chunk of the slice's rows that falls to this lane in this part of
  // kParts: `from` is where it lies, behind a token at 0. `token` is that of the lane's token.
  template <int kWidth, int kParts, typename Copy>
  __device__ __forceinline__ void for_chunks(int part, int64_t token, Copy copy) const {
    constexpr int kCopies = (S::kSlice * kChunks<kWidth> + 31) / 32;
    constexpr int kCopiesOfPart = (kCopies + kParts - 1) / kParts;
    const uint32_t lane = cta.lane();
#pragma unroll
    for (int i = 0; i < kCopiesOfPart; ++i) {
      const uint32_t which = part * kCopiesOfPart + i;
      const uint32_t index = which * 32 + lane;
      uint32_t row = index / kChunks<kWidth>;
      uint32_t chunk = index % kChunks<kWidth>;
      if constexpr (kWholeRows<kWidth>) {
        row = lane / kChunks<kWidth> + which * kRows<kWidth>;
        chunk = lane % kChunks<kWidth>;
      }
      const int64_t from = __shfl_sync(0xffffffff, token, row) + chunk * 16;
      if (kCopiesOfPart * kParts * 32 != S::kSlice * kChunks<kWidth> && index >= S::kSlice * kChunks<kWidth>) continue;
      copy(from, which, row, chunk, (valid >> row & 1) != 0);
    }
  }

  // Where a chunk of a row goes. Where whole rows are copied at once, what the swizzle does to a lane's chunk is one
  // exclusive or per copy; written so, no place is kept in a register from tile to tile.
  template <int kWidth, int kPitch>
  static __device__ __forceinline__ uint32_t place(uint32_t rows, int copy, int row, int chunk) {
    if constexpr (kWholeRows<kWidth>) {
      const uint32_t first = chunk_address(rows, row - copy * kRows<kWidth>, kPitch, chunk);
      return (first ^ (copy * kRows<kWidth> % 8 * 16)) + copy * kRows<kWidth> * kPitch;
    } else {
      return chunk_address(rows, row, kPitch, chunk);
    }
  }
};

}  // namespace sm80
}  // namespace attnloom
