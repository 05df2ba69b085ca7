// The loader: gathers the KV tiles of a worker's stretch into the stages, ahead of the computation and across items.
//
// Page ids come first, as asynchronous copies like the rows themselves, as many tiles ahead of the rows as these are of
// the computation. Each warp loads its slice of 16 tokens of every tile.
#pragma once

#include <cstdint>

#include "planner/plan.h"
#include "sm80/kv_tiles.h"
#include "sm80/ptx.h"
#include "sm80/work.h"

namespace attnloom {
namespace sm80 {

// A tile of a piece on its way through the loader.
template <typename S>
struct Cursor {
  int32_t piece;  // of the warp's ring
  KvTiles<S> tiles;
};

// Moves to the next piece that has a tile to load, if its query tile is of the right kind. Not inlined: it is long, and
// called once a piece.
template <typename S>
__device__ __noinline__ Cursor<S> find_piece(int32_t piece, bool tall) {
  const Cta<S> cta = Cta<S>::again();
  Coordinate at = cta.stretch().next;
  Cursor<S> found{piece, {}};
  while (at < cta.stretch().stop && !found.tiles.has()) {
    if ((S::kAlike || cta.tile(at.tile).rows > S::kShortRows) != tall) break;
    Work<S>& work = cta.ring(piece + 1);
    work.set(cta, cta.piece_at(at));
    found.tiles.start(cta, work);
    at = work.next;
    found.piece = piece + found.tiles.has();
  }
  __syncwarp();
  cta.stretch().next = at;
  return found;
}

template <typename S, int kStages>
struct Loader {
  static constexpr int kAhead = kStages - 1;  // how far rows are ahead of the computation, and page ids of rows

  // In shared memory: registers are short, and these are needed once a tile. All lanes of a warp write the same.
  struct State {
    Cursor<S> asked;   // the next tile whose page ids are asked for, in the last piece that was found
    Cursor<S> copied;  // the next tile whose rows are copied
    int32_t place;     // of its page ids
    int32_t begun;     // pieces of the ring whose computation has begun
  };

  const Cta<S>& cta;
  const bool tall;  // the kind of query tile whose KV is loaded; the stream ends at the first piece of the other kind

  // From the piece that begins at `at`: the first kAhead tiles are on their way afterwards.
  __device__ Loader(const Cta<S>& of, Coordinate at, bool of_tall) : cta(of), tall(of_tall) {
    cta.stretch().next = at;
    __syncwarp();
    State now{find_piece<S>(0, tall), {0, {}}, 0, 0};
#pragma unroll 1
    for (int place = 0; place < kAhead; ++place) ask(now.asked, place);
    follow(now);
    commit_copies();
    wait_copies<0>();
    save(now);
#pragma unroll 1
    for (int stage = 0; stage < kAhead; ++stage) load(stage);
  }

  // Whether the piece that begins at `at` is the next in the ring.
  __device__ bool prepared(Coordinate at) const { return state().asked.piece > state().begun && next().is(at); }
  __device__ Work<S>& next() const { return cta.ring(state().begun + 1); }
  // The next piece of the ring begins.
  __device__ void begin() const {
    const int32_t begun = state().begun + 1;
    __syncwarp();
    state().begun = begun;
    cta.compute_next(begun);
  }

  // Starts the copies of the next tile, and those of the page ids of the tile kAhead after it.
  __device__ __forceinline__ void load(int stage) const {
    State now = state();
    if (now.copied.tiles.has()) {
      copy_slice(now.copied, now.place, stage);
      now.copied.tiles.next(cta, cta.ring(now.copied.piece));
      follow(now);
      ask(now.asked, now.place);
      now.place = now.place + 1 == kAhead ? 0 : now.place + 1;
      save(now);
    }
    commit_copies();
  }

 private:
  __device__ State& state() const {
    static_assert(sizeof(State) <= kLoaderBytes, "kLoaderBytes holds a State");
    return *reinterpret_cast<State*>(shared_memory + S::kLoadersAt + cta.warp() * kLoaderBytes);
  }
  __device__ void save(const State& now) const {
    __syncwarp();
    state() = now;
    __syncwarp();
  }

  // Moves on to the piece with the next tile to copy, if its page ids were asked for.
  __device__ __forceinline__ void follow(State& now) const {
    if (now.copied.tiles.has() || now.copied.piece == now.asked.piece) return;
    ++now.copied.piece;
    now.copied.tiles.start(cta, cta.ring(now.copied.piece));
  }

  // The lane's token of the warp's slice of a tile: token lane % 16.
  struct Token {
    int32_t entry;   // of its page among the request's
    int32_t offset;  // in the page
    bool seen;       // by some query; else these are of a token that is, and nothing of it is copied
  };
  __device__ __forceinline__ Token token_of(const Work<S>& work, int32_t tile) const {
    const int32_t slot = tile * S::kTileKv + cta.warp() * S::kSlice + cta.lane() % S::kSlice;
    const int32_t seen = max(min(slot, work.any.end - 1), work.any.begin);
    const int32_t entry = cta.p.block_size.divide(seen);
    return {entry, seen - entry * static_cast<int32_t>(cta.p.layout.block_size), slot == seen};
  }

  // Asks for the page ids of the next tile, for which there is room at `place`.
  __device__ __forceinline__ void ask(Cursor<S>& asked, int place) const {
    if (!asked.tiles.has()) return;
    const Work<S>& work = cta.ring(asked.piece);
    const Token token = token_of(work, asked.tiles.tile);
    if (cta.lane() < S::kSlice) {
      copy_word(shared_address(cta.page_ids(place)) + cta.lane() * 4, work.blocks + cta.p.layout.entry_of(token.entry));
      if (work.positions != nullptr) {
        copy_word(shared_address(cta.page_positions(place)) + cta.lane() * 4,
                  work.positions + cta.p.layout.entry_of(token.entry));
      }
    }
    asked.tiles.next(cta, work);
    if (!asked.tiles.has()) asked = find_piece<S>(asked.piece, tall);
  }

  __device__ __forceinline__ const char* head_of(const CacheTensor& cache, int32_t head) const {
    return multiply_add(head, static_cast<int32_t>(cache.stride_head) * static_cast<int32_t>(sizeof(typename S::Kv)),
                        static_cast<const char*>(cache.data));
  }

  // The rows of the warp's slice of the tile at `copied`, whose page ids lie at `place`, to the stage.
  __device__ __forceinline__ void copy_slice(const Cursor<S>& copied, int place, int stage) const {
    const Work<S>& work = cta.ring(copied.piece);
    const Token token = token_of(work, copied.tiles.tile);
    const uint32_t page = load_shared(shared_address(cta.page_ids(place)) + cta.lane() % S::kSlice * 4);
    if (work.positions != nullptr && cta.lane() < S::kSlice) {
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
    const char* from_k = head_of(k, work.head);
    const char* from_v = head_of(v, work.head);
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
