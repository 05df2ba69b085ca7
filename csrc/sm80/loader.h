// The loader: gathers the KV tiles of a worker's stretch into the stages, ahead of the computation and across items.
//
// Page ids come first, as asynchronous copies like the rows themselves, as many tiles ahead of the rows as these are of
// the computation. Each warp loads its slice of every tile.
#pragma once

#include <cstdint>

#include "planner/plan.h"
#include "sm80/kv_tiles.h"
#include "sm80/pieces.h"
#include "sm80/ptx.h"
#include "sm80/swizzle.h"
#include "sm80/work.h"

namespace attnloom {
namespace sm80 {

template <typename S, int kStages>
struct Loader {
  static constexpr int kAhead = kStages - 1;  // how far rows are ahead of the computation, and page ids of rows
  static_assert(2 * kAhead < kLead, "the table holds every piece that the loader comes to");

  // A tile of a piece on its way through the loader.
  struct Cursor {
    int32_t piece;
    KvTiles<S> tiles;
  };
  // In shared memory: registers are short, and these are needed once a tile. All lanes of a warp write the same.
  struct State {
    Cursor asked;   // the next tile whose page ids are asked for; without tiles: the stream ends behind its piece
    Cursor copied;  // the next tile whose rows are copied
    int32_t place;  // of its page ids
  };

  const Cta<S>& cta;
  const bool tall;  // the kind of query tile whose KV is loaded; the stream ends at the first piece of the other kind

  // From piece `first` on: the first kAhead tiles are on their way afterwards.
  __device__ Loader(const Cta<S>& of, int32_t first, bool of_tall) : cta(of), tall(of_tall) {
    State now{{first - 1, {}}, {first - 1, {}}, 0};
    find(now.asked, first);
#pragma unroll 1
    for (int place = 0; place < kAhead; ++place) ask(now.asked, first, place);
    follow(now);
    commit_copies();
    wait_copies<0>();
    save(now);
#pragma unroll 1
    for (int stage = 0; stage < kAhead; ++stage) load(state(), first, stage);
  }

  // Whether the tiles of a piece come with this stream.
  __device__ bool covers(int32_t piece) const { return piece <= state().asked.piece; }

  // While piece `computing` is computed: starts the copies of the next tile, and those of the page ids of the tile
  // kAhead after it. `now`: state(), which may be read long before.
  __device__ __forceinline__ void load(State now, int32_t computing, int stage) const {
    if (now.copied.tiles.has()) {
      copy_slice(now.copied, now.place, stage);
      now.copied.tiles.next(cta, cta.work(now.copied.piece));
      follow(now);
      __syncwarp();  // every lane has read the page ids whose place is taken now, and the state
      ask(now.asked, computing, now.place);
      now.place = now.place + 1 == kAhead ? 0 : now.place + 1;
      save(now);
    }
    commit_copies();
  }

  __device__ State& state() const {
    static_assert(sizeof(State) <= kLoaderBytes, "kLoaderBytes holds a State");
    return *reinterpret_cast<State*>(shared_memory + S::kLoadersAt + cta.warp() * kLoaderBytes);
  }

 private:
  __device__ void save(const State& now) const {
    state() = now;
    __syncwarp();
  }

  // Moves on to the next piece of the stream that has a tile. At the end of what the table holds the stream ends: that
  // is far behind `computing` unless pieces without tiles lie between.
  __device__ __forceinline__ void find(Cursor& asked, int32_t computing) const {
    const int32_t known = pieces_known(cta, computing);
#pragma unroll 1
    for (int32_t piece = asked.piece + 1; piece < known; ++piece) {
      const Work<S>& work = cta.work(piece);
      if (work.tall() != tall) return;
      KvTiles<S> tiles;
      tiles.start(cta, work);
      if (tiles.has()) {
        asked = {piece, tiles};
        return;
      }
    }
  }

  // Moves on to the piece with the next tile to copy, if its page ids were asked for.
  __device__ __forceinline__ void follow(State& now) const {
    while (!now.copied.tiles.has() && now.copied.piece < now.asked.piece) {
      ++now.copied.piece;
      now.copied.tiles.start(cta, cta.work(now.copied.piece));
    }
  }

  // The lane's token of the warp's slice of a tile: token lane % kSlice.
  struct Token {
    int32_t entry;   // of its page among the request's
    int32_t offset;  // in the page
    bool seen;       // by some query; else these are of a token that is, and nothing of it is copied
  };
  __device__ __forceinline__ Token token_of(const Work<S>& work, int32_t tile) const {
    const int32_t slot = tile * S::kTileKv + cta.warp() * S::kSlice + cta.lane() % S::kSlice;
    const int32_t seen = max(min(slot, work.any.end - 1), work.any.begin);
    const int32_t entry = cta.p.by_block_size.divide(seen);
    return {entry, seen - entry * static_cast<int32_t>(cta.p.layout.block_size), slot == seen};
  }

  // Asks for the page ids of the next tile, for which there is room at `place`.
  __device__ __forceinline__ void ask(Cursor& asked, int32_t computing, int place) const {
    if (!asked.tiles.has()) return;
    const Work<S>& work = cta.work(asked.piece);
    const Token token = token_of(work, asked.tiles.tile);
    if (cta.lane() < S::kSlice) {
      const int32_t pitch = static_cast<int32_t>(cta.p.layout.index_stride) * 4;
      copy_word(shared_address(cta.page_ids(place)) + cta.lane() * 4, multiply_add(token.entry, pitch, work.blocks));
      if (cta.p.layout.positions != nullptr) {
        copy_word(shared_address(cta.page_positions(place)) + cta.lane() * 4,
                  multiply_add(token.entry, pitch, work.positions));
      }
    }
    asked.tiles.next(cta, work);
    if (!asked.tiles.has()) find(asked, computing);
  }

  // The rows of the warp's slice of the tile at `copied`, whose page ids lie at `place`, to the stage.
  __device__ __forceinline__ void copy_slice(const Cursor& copied, int place, int stage) const {
    const Work<S>& work = cta.work(copied.piece);
    if constexpr (kWholeRows<S::kDim> && S::kDim == S::kDimV) {
      const int32_t first = copied.tiles.tile * S::kTileKv + static_cast<int32_t>(cta.warp()) * S::kSlice;
      if (cta.p.caches_alike && first >= work.any.begin && first + S::kSlice <= work.any.end) {
        if (cta.p.k.slot_bytes != 0) {
#pragma unroll
          for (int group = 0; group < S::kGroups; ++group) copy_group(work, first, place, stage, group);
        } else {
          copy_tokens(work, first, place, stage);
        }
        return;
      }
    }
    const Token token = token_of(work, copied.tiles.tile);
    const uint32_t page = load_shared(shared_address(cta.page_ids(place)) + cta.lane() % S::kSlice * 4);
    if (cta.p.layout.positions != nullptr && cta.lane() < S::kSlice) {
      cta.positions(stage)[cta.warp() * S::kSlice + cta.lane()] = cta.page_positions(place)[cta.lane()] + token.offset;
    }
    const uint32_t keys = shared_address(cta.slice(stage, cta.warp()));
    const uint32_t values = keys + S::kSlice * S::kPitchK;
    const CacheTensor& k = cta.p.k;
    const CacheTensor& v = cta.p.v;
    // A token's offset behind the cache's first, in the cache's units.
    const auto offset_in = [&](const CacheTensor& cache) {
      return token.seen ? page * cache.units_block + token.offset * cache.units_slot : kNowhere;
    };
    const uint32_t offset = offset_in(k);
    const char* from_k = work.keys;
    const char* from_v = work.values;
    if (S::kDim == S::kDimV && k.unit == v.unit && k.units_block == v.units_block && k.units_slot == v.units_slot) {
      // As caches mostly are: one offset for both.
      for_chunks<S::kDim>(offset, [&](uint32_t at, int copy, int row, int chunk) {
        copy_async(place_of<S::kDim, S::kPitchK>(keys, copy, row, chunk), from_k + chunk * 16, at, k.unit);
        copy_async(place_of<S::kDimV, S::kPitchV>(values, copy, row, chunk), from_v + chunk * 16, at, k.unit);
      });
    } else {
      for_chunks<S::kDim>(offset, [&](uint32_t at, int copy, int row, int chunk) {
        copy_async(place_of<S::kDim, S::kPitchK>(keys, copy, row, chunk), from_k + chunk * 16, at, k.unit);
      });
      for_chunks<S::kDimV>(offset_in(v), [&](uint32_t at, int copy, int row, int chunk) {
        copy_async(place_of<S::kDimV, S::kPitchV>(values, copy, row, chunk), from_v + chunk * 16, at, v.unit);
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

  // The slice from token `slice` on, of tokens that all are seen, in caches that are laid out alike.
  __device__ __forceinline__ void copy_tokens(const Work<S>& work, int32_t slice, int place, int stage) const {
    const CacheTensor& cache = cta.p.k;
    const int32_t slot = slice + cta.lane() % S::kSlice;
    const int32_t entry = cta.p.by_block_size.divide(slot);
    const uint32_t page = load_shared(shared_address(cta.page_ids(place)) + cta.lane() % S::kSlice * 4);
    const uint32_t offset = slot - entry * static_cast<int32_t>(cta.p.layout.block_size);
    const uint32_t keys = shared_address(cta.slice(stage, cta.warp()));
    const uint32_t values = keys + S::kSlice * S::kPitchK;
    const char* const from_k = work.keys;
    const char* const from_v = work.values;
    for_chunks<S::kDim>(page * cache.units_block + offset * cache.units_slot,
                        [&](uint32_t at, int copy, int row, int chunk) {
                          copy_async(place_of<S::kDim, S::kPitchK>(keys, copy, row, chunk),
                                     multiply_add(at, cache.unit, from_k + chunk * 16));
                          copy_async(place_of<S::kDimV, S::kPitchV>(values, copy, row, chunk),
                                     multiply_add(at, cache.unit, from_v + chunk * 16));
                        });
  }

  // The same for group `group` of a slice, 16 tokens that lie one after the other in a block.
  __device__ __forceinline__ void copy_group(const Work<S>& work, int32_t slice, int place, int stage,
                                             int group) const {
    const CacheTensor& cache = cta.p.k;
    const int32_t slot = slice + group * 16;
    const int32_t entry = cta.p.by_block_size.divide(slot);
    const uint32_t page = load_shared(shared_address(cta.page_ids(place)) + group * 64);
    const uint32_t lane = cta.lane();
    const uint32_t row = lane / kChunks<S::kDim>;
    const uint32_t chunk = lane % kChunks<S::kDim>;
    const uint32_t offset = slot - entry * static_cast<int32_t>(cta.p.layout.block_size) + row;
    const char* const key =
        multiply_add(page * cache.units_block + offset * cache.units_slot, cache.unit, work.keys + chunk * 16);
    const char* const value = key + cta.p.values_behind_keys;
    const uint32_t keys = shared_address(cta.slice(stage, cta.warp()));
    const uint32_t values = keys + S::kSlice * S::kPitchK;
    constexpr int kRowsAtOnce = kRows<S::kDim>;
    constexpr int kCopies = 16 / kRowsAtOnce;
#pragma unroll
    for (int copy = 0; copy < kCopies; ++copy) {
      const int of_slice = group * kCopies + copy;
      copy_async(place_of<S::kDim, S::kPitchK>(keys, of_slice, of_slice * kRowsAtOnce + row, chunk),
                 multiply_add(cache.slot_bytes, static_cast<uint32_t>(copy * kRowsAtOnce), key));
    }
#pragma unroll
    for (int copy = 0; copy < kCopies; ++copy) {
      const int of_slice = group * kCopies + copy;
      copy_async(place_of<S::kDimV, S::kPitchV>(values, of_slice, of_slice * kRowsAtOnce + row, chunk),
                 multiply_add(cache.slot_bytes, static_cast<uint32_t>(copy * kRowsAtOnce), value));
    }
  }

  // copy(at, which, row, chunk) for every chunk of the slice's rows that falls to this lane: `at` is the offset of the
  // row's token, of which the lane of that token has `offset`.
  template <int kWidth, typename Copy>
  __device__ __forceinline__ void for_chunks(uint32_t offset, Copy copy) const {
    constexpr int kAll = S::kSlice * kChunks<kWidth>;
    const uint32_t lane = cta.lane();
#pragma unroll
    for (int which = 0; which < (kAll + 31) / 32; ++which) {
      const uint32_t index = which * 32 + lane;
      uint32_t row = index / kChunks<kWidth>;
      uint32_t chunk = index % kChunks<kWidth>;
      if constexpr (kWholeRows<kWidth>) {
        row = lane / kChunks<kWidth> + which * kRows<kWidth>;
        chunk = lane % kChunks<kWidth>;
      }
      const uint32_t at = __shfl_sync(0xffffffff, offset, row);
      if (kAll % 32 != 0 && index >= kAll) continue;
      copy(at, which, row, chunk);
    }
  }

  // Where a chunk of a row goes. Where whole rows are copied at once, what the swizzle does to a lane's chunk is one
  // exclusive or per copy; written so, no place is kept in a register from tile to tile.
  template <int kWidth, int kPitch>
  static __device__ __forceinline__ uint32_t place_of(uint32_t rows, int copy, int row, int chunk) {
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
