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
    tiles.tile = tiles.end = 0;
    ready = false;
  }

  // Starts the copies of the next tile, and the fetch of the page ids of the one after. The first call has no ids yet.
  __device__ __forceinline__ void load(int stage) {
    if (ready) {
      copy_slice(cta.slice(stage, cta.warp));
      if (work.positions != nullptr && cta.lane < S::kSlice) {
        cta.positions(stage)[cta.warp * S::kSlice + cta.lane] = position;
      }
      tiles.next(cta, work);
    }
    if (!tiles.has()) find_piece();
    ready = tiles.has();
    if (ready) fetch_pages();
    commit_copies();
  }

 private:
  // Moves to the next piece that has a tile to load.
  __device__ __forceinline__ void find_piece() {
    while (work.next < cta.stop() && !tiles.has()) {
      const Piece piece = cta.plan().piece_at(work.next, cta.stop());
      if ((cta.plan().tile_rows()[piece.tile] > S::kShortRows) != tall) return;
      work.set(cta, piece);
      tiles.start(cta, work);
    }
  }

  __device__ __forceinline__ void fetch_pages() {
    const int32_t slot = tiles.tile * S::kTileKv + cta.warp * S::kSlice + cta.lane % S::kSlice;
    const bool inside = slot >= work.any.begin && slot < work.any.end;
    const int32_t entry = cta.constants().block_size.divide(slot);
    const int32_t block_size = static_cast<int32_t>(cta.p.layout.block_size);
    offset = slot - entry * block_size;
    block = inside ? __ldg(work.blocks + entry) : 0;
    valid = __ballot_sync(0xffffffff, inside);
    if (work.positions != nullptr) position = inside ? __ldg(work.positions + entry) + offset : work.last_position;
  }

  // Where the rows of a cache lie, in bytes. Strides fit into 32 bits, offsets need not.
  struct Source {
    const char* head;
    int32_t stride_block;
    int32_t stride_slot;

    __device__ __forceinline__ Source(const CacheTensor& cache, int32_t of_head) {
      constexpr int kBytes = sizeof(typename S::Kv);
      head = static_cast<const char*>(cache.data) + of_head * cache.stride_head * kBytes;
      stride_block = static_cast<int32_t>(cache.stride_block) * kBytes;
      stride_slot = static_cast<int32_t>(cache.stride_slot) * kBytes;
    }
    __device__ __forceinline__ const char* row(int32_t of_block, int32_t of_offset) const {
      return multiply_add(of_offset, stride_slot, multiply_add(of_block, stride_block, head));
    }
  };

  __device__ __forceinline__ void copy_slice(char* slice) const {
    const Source k(cta.p.k, work.head);
    const Source v(cta.p.v, work.head);
    const uint32_t keys = shared_address(slice);
    const uint32_t values = keys + S::kSlice * S::kPitchK;
    if constexpr (S::kDim == S::kDimV) {  // one look at each token for both
      for_chunks<S::kDim>([&](int copy, int row, int chunk, int32_t of_block, int32_t of_offset, bool wanted) {
        copy_async(place<S::kDim, S::kPitchK>(keys, copy, row, chunk), k.row(of_block, of_offset) + chunk * 16, wanted);
        copy_async(place<S::kDimV, S::kPitchV>(values, copy, row, chunk), v.row(of_block, of_offset) + chunk * 16,
                   wanted);
      });
    } else {
      for_chunks<S::kDim>([&](int copy, int row, int chunk, int32_t of_block, int32_t of_offset, bool wanted) {
        copy_async(place<S::kDim, S::kPitchK>(keys, copy, row, chunk), k.row(of_block, of_offset) + chunk * 16, wanted);
      });
      for_chunks<S::kDimV>([&](int copy, int row, int chunk, int32_t of_block, int32_t of_offset, bool wanted) {
        copy_async(place<S::kDimV, S::kPitchV>(values, copy, row, chunk), v.row(of_block, of_offset) + chunk * 16,
                   wanted);
      });
    }
  }

  template <int kWidth>
  static constexpr int kChunks = kWidth * static_cast<int>(sizeof(typename S::Kv)) / 16;  // of a row of kWidth elements

  // copy(which, row, chunk, block, offset, wanted) for every chunk of the slice's rows that falls to this lane.
  template <int kWidth, typename Copy>
  __device__ __forceinline__ void for_chunks(Copy copy) const {
    constexpr int kCopies = S::kSlice * kChunks<kWidth>;
    const uint32_t lane = lane_anew();
#pragma unroll
    for (int i = 0; i < (kCopies + 31) / 32; ++i) {
      const uint32_t index = i * 32 + lane;
      const uint32_t row = index / kChunks<kWidth>;
      const int32_t of_block = __shfl_sync(0xffffffff, block, row);
      const int32_t of_offset = __shfl_sync(0xffffffff, offset, row);
      if (kCopies % 32 != 0 && index >= kCopies) break;
      copy(i, row, index % kChunks<kWidth>, of_block, of_offset, (valid >> row & 1) != 0);
    }
  }

  // Where a chunk of a row goes. Where whole rows are copied at once, what the swizzle does to a lane's chunk is one
  // exclusive or per copy; written so, no place is kept in a register from tile to tile.
  template <int kWidth, int kPitch>
  static __device__ __forceinline__ uint32_t place(uint32_t rows, int copy, int row, int chunk) {
    if constexpr (32 % kChunks<kWidth> == 0) {
      constexpr int kRows = 32 / kChunks<kWidth>;
      const uint32_t first = chunk_address(rows, row - copy * kRows, kPitch, chunk);
      return (first ^ (copy * kRows % 8 * 16)) + copy * kRows * kPitch;
    } else {
      return chunk_address(rows, row, kPitch, chunk);
    }
  }
};

}  // namespace sm80
}  // namespace attnloom
