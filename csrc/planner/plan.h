// The plan of one step: a header and flat int32 arrays in one buffer, written by the planner on the host or
// on the device, read by every kernel family.
//
// An item is (query tile, kv head); the items of a step lie in one line: by tile, then by kv head, then by kv
// tile inside the item. Worker w runs the contiguous stretch from start(w) to start(w + 1).
//
// Tiles lie in the order of the requests. Where tile_q is above tile_q_short, those of requests that do not fit into a
// short tile come before all others, dealt to the stretches in turn (Deal in scan.h).
//
// With lockstep L > 1, L neighbouring workers run the same stretch, each on another kv head of a group of L: they read
// the same pages at the same time, and heads of a token that lie side by side come from one row of DRAM. The line
// then holds groups of heads, and everything per worker below is per stretch.
//
// With chunks (the engine's batch_invariant mode) the kv tiles of an item count from the begin of the chunk that holds
// its first visible tile, chunks being aligned to slot 0 as tiles are. Every chunk gives a state of its own, and an
// item is the fold of its chunks' states in their order, whoever computed them.
#pragma once

#include <cstdint>

#include "common/band.h"
#include "common/macros.h"

namespace attnloom {

struct PlanHeader {
  int32_t num_requests;
  int32_t num_tiles;
  int32_t num_workers;
  int32_t lockstep;  // divides num_workers and num_kv_heads
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t tile_q_short;  // query tile, in folded rows, of requests that fit into one such tile
  int32_t tile_q;        // query tile of all others
  int32_t tile_kv;       // KV tile, in tokens
  Band band;
  int32_t trimmed;        // 1: the band trims the KV range of a tile; 0: slots are not at their own positions
  int32_t tile_capacity;  // room in the tile arrays; a captured shape keeps it while num_tiles changes
  int32_t chunk;          // KV tiles of a chunk, at whole numbers of which items are cut; 0: at any tile
  int32_t chunk_states;   // room for the states of the chunks of a piece that continues an item, at least 1
  int32_t chunk_room;     // which may be at most as much, 2 or more; 0: any
};
constexpr int32_t kPlanHeaderWords = sizeof(PlanHeader) / sizeof(int32_t);

// Where a stretch begins: kv tile `kv` (counted from the first visible tile) of item (tile, head).
struct Coordinate {
  int32_t tile;
  int32_t head;  // of the line: a group of `lockstep` kv heads
  int32_t kv;
};

ATTNLOOM_HD bool operator==(Coordinate a, Coordinate b) { return a.tile == b.tile && a.head == b.head && a.kv == b.kv; }
ATTNLOOM_HD bool same_item(Coordinate a, Coordinate b) { return a.tile == b.tile && a.head == b.head; }
ATTNLOOM_HD bool operator<(Coordinate a, Coordinate b) {
  if (a.tile != b.tile) return a.tile < b.tile;
  if (a.head != b.head) return a.head < b.head;
  return a.kv < b.kv;
}

// A contiguous part of one item, run by one worker.
struct Piece {
  int32_t tile;
  int32_t head;
  int32_t kv_begin;
  int32_t kv_end;  // meaningless when `closes`: the last piece runs to the end that the true length gives
  bool opens;      // holds the first kv tile of the item
  bool closes;     // holds the last kv tile of the item

  ATTNLOOM_HD bool whole() const { return opens && closes; }
};

// The piece that begins at `at`, in an item of `kv_tiles`, in the stretch that ends at `stop` (at < stop).
ATTNLOOM_HD Piece piece_of(Coordinate at, Coordinate stop, int32_t kv_tiles) {
  const bool closes = !same_item(at, stop);
  return {at.tile, at.head, at.kv, closes ? kv_tiles : stop.kv, at.kv == 0, closes};
}

template <typename Word>  // int32_t to write, const int32_t to read
struct PlanView {
  // An array of the plan, which lies `at` words behind its begin: an entry's place is found in 32 bits.
  struct Array {
    Word* buffer;
    int32_t at;

    ATTNLOOM_HD Word& operator[](int32_t index) const { return buffer[at + index]; }
    ATTNLOOM_HD Word* data() const { return buffer + at; }
  };

  Word* buffer;
  int32_t num_stretches;
  int32_t num_requests;
  int32_t tile_capacity;

  ATTNLOOM_HD PlanView(Word* plan, const PlanHeader& header)
      : PlanView(plan, header.num_workers / header.lockstep, header.num_requests, header.tile_capacity) {}
  // Of a plan whose header is there.
  ATTNLOOM_HD explicit PlanView(Word* plan) : PlanView(plan, *reinterpret_cast<const PlanHeader*>(plan)) {}
  ATTNLOOM_HD PlanView(Word* plan, int32_t stretches, int32_t requests, int32_t tiles)
      : buffer(plan), num_stretches(stretches), num_requests(requests), tile_capacity(tiles) {}

  ATTNLOOM_HD const PlanHeader& header() const { return *reinterpret_cast<const PlanHeader*>(buffer); }

  // Arrays, in the order in which they lie; S is the number of stretches. A worker begins with its stretch, so those
  // arrays come first: a GPU, which knows S beforehand, finds them without waiting for the header.
  ATTNLOOM_HD Array worker_tile() const { return {buffer, kPlanHeaderWords}; }   // [S + 1]
  ATTNLOOM_HD Array worker_head() const { return {buffer, at_stretch(1) + 1}; }  // [S + 1]
  ATTNLOOM_HD Array worker_kv() const { return {buffer, at_stretch(2) + 2}; }    // [S + 1]
  ATTNLOOM_HD Array split_begin() const { return {buffer, at_stretch(3) + 3}; }  // [S]
  ATTNLOOM_HD Array split_end() const { return {buffer, at_stretch(4) + 3}; }    // [S]
  ATTNLOOM_HD Array qo_indptr() const { return {buffer, at_stretch(5) + 3}; }    // [R + 1]
  ATTNLOOM_HD Array tile_request() const { return {buffer, at_tile(0)}; }        // [T]
  ATTNLOOM_HD Array tile_row() const { return {buffer, at_tile(1)}; }            // [T]
  ATTNLOOM_HD Array tile_rows() const { return {buffer, at_tile(2)}; }           // [T]
  ATTNLOOM_HD Array tile_kv_tiles() const { return {buffer, at_tile(3)}; }       // [T]

  ATTNLOOM_HD Coordinate start(int32_t stretch) const {
    return {worker_tile()[stretch], worker_head()[stretch], worker_kv()[stretch]};
  }

  // The kv head that `worker` computes for a head of the line.
  ATTNLOOM_HD int32_t kv_head(int32_t worker, int32_t head) const {
    return head * header().lockstep + worker % header().lockstep;
  }
  // The worker of another stretch that computes the same kv heads as `worker`.
  ATTNLOOM_HD int32_t peer(int32_t worker, int32_t stretch) const {
    return stretch * header().lockstep + worker % header().lockstep;
  }
  // Starts ascend. All of both is read at once, where an order would wait for one part after the other.
  ATTNLOOM_HD bool has_work(int32_t stretch) const {
    const Coordinate from = start(stretch);
    const Coordinate to = start(stretch + 1);
    return ((from.tile ^ to.tile) | (from.head ^ to.head) | (from.kv ^ to.kv)) != 0;
  }

  // The piece that begins at `at` in the stretch that ends at `stop` (at < stop).
  ATTNLOOM_HD Piece piece_at(Coordinate at, Coordinate stop) const {
    return piece_of(at, stop, tile_kv_tiles()[at.tile]);
  }

  // Where the stretch goes on after `piece`.
  ATTNLOOM_HD Coordinate after(const Piece& piece) const {
    if (!piece.closes) return {piece.tile, piece.head, piece.kv_end};
    if (piece.head + 1 < header().num_kv_heads / header().lockstep) return {piece.tile, piece.head + 1, 0};
    return {piece.tile + 1, 0, 0};
  }

 private:
  ATTNLOOM_HD int32_t at_stretch(int32_t arrays) const { return kPlanHeaderWords + arrays * num_stretches; }
  ATTNLOOM_HD int32_t at_tile(int32_t arrays) const {
    return at_stretch(5) + 3 + num_requests + 1 + arrays * tile_capacity;
  }
};

// The chunks of an item whose visible tiles are `tiles`, counted from slot 0.
ATTNLOOM_HD Range chunks_of(const PlanHeader& plan, Range tiles) { return kv_tiles_of(tiles, plan.chunk); }

// Those of them in the piece [kv_begin, kv_end) of the item; a piece that closes runs to the end.
ATTNLOOM_HD Range chunks_of_piece(const PlanHeader& plan, Range chunks, int32_t kv_begin, int32_t kv_end, bool closes) {
  const int32_t begin = chunks.begin + kv_begin / plan.chunk;
  const int32_t end = chunks.begin + kv_end / plan.chunk;
  return {begin, closes || end > chunks.end ? chunks.end : end};
}

// With chunks: where the kv tiles of an item are counted from, `tiles` being the visible ones.
ATTNLOOM_HD int32_t first_of_item(const PlanHeader& plan, Range tiles) {
  return tiles.begin == 0 ? 0 : tiles.begin - tiles.begin % plan.chunk;
}
// The visible tiles of a piece.
ATTNLOOM_HD Range tiles_of_piece(const PlanHeader& plan, Range tiles, const Piece& piece) {
  const int32_t first = first_of_item(plan, tiles);
  const int32_t begin = first + piece.kv_begin;
  const int32_t end = first + piece.kv_end;
  const int32_t last = piece.closes || end > tiles.end ? tiles.end : end;
  const int32_t from = begin < tiles.begin ? tiles.begin : begin;
  return {from < last ? from : last, last};
}

// Words a plan needs; `tile_capacity` bounds the number of query tiles.
ATTNLOOM_HD int64_t plan_words(int64_t num_requests, int64_t tile_capacity, int64_t num_stretches) {
  return kPlanHeaderWords + (num_requests + 1) + 4 * tile_capacity + 3 * (num_stretches + 1) + 2 * num_stretches;
}

// The arena slot of a partial state. A worker has at most two: the piece it continues, and the piece it opens
// and leaves to the next stretch.
ATTNLOOM_HD int32_t partial_slot(int32_t worker, bool opens) { return 2 * worker + (opens ? 1 : 0); }

// With chunks: the fold of the item that the worker opened last, and behind it the states of the chunks of the piece
// with which the worker continues an item.
ATTNLOOM_HD int64_t fold_slot(const PlanHeader& plan, int32_t worker) {
  return static_cast<int64_t>(worker) * (1 + plan.chunk_states);
}

}  // namespace attnloom
