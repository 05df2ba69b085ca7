// The scan planner: integer costs, a prefix sum, and for each worker an equal contiguous stretch of it found by
// binary search. Stream-K (Osama et al., PPoPP 2023, arXiv 2301.03598) over the work items of attention.
//
// Every step is a function of one tile or one worker, so the device planner runs the same text in parallel and
// gets the same integers.
#pragma once

#include <cstdint>

#include "common/band.h"
#include "common/macros.h"
#include "common/visible.h"
#include "planner/plan.h"

namespace attnloom {

// Cost of an item, in arbitrary integer units: item + item_row * rows + kv_tiles * (kv_tile + row * rows). `item` >= 1.
struct CostModel {
  int32_t item;      // what an item takes beside its KV tiles, whatever its rows
  int32_t item_row;  // loading a folded row of Q, writing it or its partial state
  int32_t kv_tile;   // reading one KV tile
  int32_t row;       // computing one folded row on one KV tile
};

// The range of slots that a variant declares visible to a query tile; a module with such a hook exports one.
using VisibleHook = Range (*)(const uint64_t* hook_params, const QueryTile* tile);

struct PlanInput {
  const int32_t* qo_indptr;  // [num_requests + 1]
  const int32_t* kv_lens;    // [num_requests], upper bounds of the true lengths
  CostModel cost;
  VisibleHook visible;  // or null: the band alone
  const uint64_t* hook_params;
  BlockMask block_mask;
};

ATTNLOOM_HD int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

// Folded rows of a request: its queries times the query heads that share a kv head.
ATTNLOOM_HD int64_t folded_rows(const PlanHeader& plan, int32_t qo_len) {
  return static_cast<int64_t>(qo_len) * (plan.num_qo_heads / plan.num_kv_heads);
}

// The query tile follows from the fused length of the request itself, not from the batch's mean.
ATTNLOOM_HD int32_t tile_q_for(const PlanHeader& plan, int64_t rows) {
  return rows <= plan.tile_q_short ? plan.tile_q_short : plan.tile_q;
}

ATTNLOOM_HD int64_t tiles_of_request(const PlanHeader& plan, int32_t qo_len) {
  const int64_t rows = folded_rows(plan, qo_len);
  const int32_t tile_q = tile_q_for(plan, rows);
  return (rows + tile_q - 1) / tile_q;
}

// Whether the plan has tall query tiles beside short ones.
ATTNLOOM_HD bool has_tall(const PlanHeader& plan) { return plan.tile_q > plan.tile_q_short; }

// Whether those of a request are tall.
ATTNLOOM_HD bool is_tall(const PlanHeader& plan, int32_t qo_len) {
  return has_tall(plan) && folded_rows(plan, qo_len) > plan.tile_q_short;
}

// Where the query tiles lie in the line: tall ones first, dealt to the stretches in turn, then the others, both in the
// order of the requests. So all stretches work on one request at a time, whose KV they find in the L2 cache, and each
// gets tiles from all over a causal triangle, not only long or only short ones.
struct Deal {
  int32_t tall;       // tiles that are dealt
  int32_t stretches;  // to so many
  int32_t each;       // tiles that every stretch gets,
  int32_t more;       // and stretches, the first ones, that get one more

  ATTNLOOM_HD Deal(int32_t tall, int32_t stretches)
      : tall(tall), stretches(stretches), each(tall / stretches), more(tall % stretches) {}

  // Of a tall tile (or of another), before which there are `rank` tall tiles (or others).
  ATTNLOOM_HD int32_t place(bool of_tall, int32_t rank) const {
    if (!of_tall) return tall + rank;
    const int32_t round = rank / stretches;
    const int32_t stretch = rank - round * stretches;
    return stretch * each + (stretch < more ? stretch : more) + round;
  }
};

// KV tiles that some row of a query tile may see: rows [row, row + rows) of a request with these lengths.
ATTNLOOM_HD int32_t visible_kv_tiles(const PlanHeader& plan, const PlanInput& in, int32_t request, int32_t row,
                                     int32_t rows, int32_t qo_len, int32_t kv_len) {
  if (!plan.trimmed) return (kv_len + plan.tile_kv - 1) / plan.tile_kv;
  const int32_t group = plan.num_qo_heads / plan.num_kv_heads;
  const QueryTile tile{request, kv_len - qo_len + row / group, kv_len - qo_len + (row + rows - 1) / group, kv_len};
  Range slots = visible_to_any(plan.band, tile.first, tile.last, kv_len);
  if (in.visible != nullptr) slots = intersect(slots, in.visible(in.hook_params, &tile));
  const Range tiles = kv_tiles_of(slots, plan.tile_kv);
  if (plan.chunk > 0) return tiles.end - tiles.begin;  // chunks lie where they lie without a mask
  return count_tiles(in.block_mask, tile, plan.tile_kv, tiles);
}

// Fills the arrays of tile `index` of a request.
ATTNLOOM_HD void fill_tile(PlanView<int32_t> plan, const PlanInput& in, int32_t request, int32_t index, int32_t tile) {
  const PlanHeader& header = plan.header();
  const int32_t qo_len = in.qo_indptr[request + 1] - in.qo_indptr[request];
  const int64_t total = folded_rows(header, qo_len);
  const int32_t tile_q = tile_q_for(header, total);
  const int32_t row = index * tile_q;
  const int32_t rows = static_cast<int32_t>(min_of(tile_q, total - row));
  plan.tile_request()[tile] = request;
  plan.tile_row()[tile] = row;
  plan.tile_rows()[tile] = rows;
  const int32_t kv_len = clamp_to(in.kv_lens[request], 0, INT32_MAX);
  plan.tile_kv_tiles()[tile] = visible_kv_tiles(header, in, request, row, rows, qo_len, kv_len);
}

ATTNLOOM_HD int64_t unit_cost(const CostModel& cost, int32_t rows) {
  return cost.kv_tile + static_cast<int64_t>(cost.row) * rows;
}

// Of an item beside its KV tiles.
ATTNLOOM_HD int64_t fixed_cost(const CostModel& cost, int32_t rows) {
  return cost.item + static_cast<int64_t>(cost.item_row) * rows;
}

ATTNLOOM_HD int64_t item_cost(const CostModel& cost, int32_t rows, int32_t kv_tiles) {
  return fixed_cost(cost, rows) + kv_tiles * unit_cost(cost, rows);
}

// With bounded room for the states of chunks (PlanHeader::chunk_room): a cut at `kv` inside an item of `kv_tiles`
// behind which a stretch could continue it over more chunks than there is room for moves to where the rest has room, or
// to the item's begin, whichever is nearer. `share`: the cost of a stretch; `unit`: of a chunk.
ATTNLOOM_HD int32_t within_room(const PlanHeader& plan, int64_t share, int64_t unit, int32_t kv, int32_t kv_tiles) {
  if (plan.chunk_room == 0) return kv;
  // States that a piece leaves at most: of a stretch's cost, rounded to chunks at both ends, and of the item's rest;
  // one more where it closes the item (chunk_states_of).
  const int64_t of_stretch = (share + 1) / unit + 3;
  const int32_t chunks = (kv_tiles + plan.chunk - 1) / plan.chunk;
  const int32_t of_rest = chunks - kv / plan.chunk + 1;
  if (min_of(of_stretch, of_rest) <= plan.chunk_room) return kv;
  const int32_t latest = (chunks + 1 - plan.chunk_room) * plan.chunk;
  return 2 * static_cast<int64_t>(kv) < latest ? 0 : latest;
}

// Where stretch `stretch` begins: at the fraction stretch / stretches of the line's cost, moved to the nearest border
// between KV tiles, or with `whole` between items. prefix[t]: cost of all tiles before t, over all kv heads of the
// line; [T + 1].
ATTNLOOM_HD Coordinate locate(PlanView<const int32_t> plan, const CostModel& cost, const int64_t* prefix,
                              int32_t stretch, bool whole) {
  const PlanHeader& header = plan.header();
  const int32_t num_stretches = plan.num_stretches;
  const int32_t num_tiles = header.num_tiles;
  if (stretch >= num_stretches || num_tiles == 0) return {num_tiles, 0, 0};
  const int64_t total = prefix[num_tiles];
  // total * stretch / num_stretches without leaving 64 bits.
  const int64_t share = total / num_stretches;
  const int64_t rest = total % num_stretches;
  const int64_t position = share * stretch + rest * stretch / num_stretches;

  int32_t low = 0;  // prefix[low] <= position < prefix[high]
  int32_t high = num_tiles;
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (prefix[middle] <= position) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int32_t rows = plan.tile_rows()[low];
  const int32_t kv_tiles = plan.tile_kv_tiles()[low];
  const int64_t each = item_cost(cost, rows, kv_tiles);
  const int32_t step = header.chunk > 0 ? header.chunk : 1;  // a cut lies at a whole number of steps
  const int64_t unit = unit_cost(cost, rows) * step;
  const int32_t head = static_cast<int32_t>((position - prefix[low]) / each);
  const int64_t into = position - prefix[low] - head * each;
  const int64_t past = into - fixed_cost(cost, rows) + unit / 2;
  bool next = false;
  int32_t kv = 0;
  if (whole) {
    next = 2 * into >= each;
  } else {
    kv = past < 0 ? 0 : static_cast<int32_t>(min_of(past / unit * step, kv_tiles));
    next = kv > 0 && kv == kv_tiles;
    if (kv > 0 && !next) kv = within_room(header, share, unit, kv, kv_tiles);
  }
  if (!next) return {low, head, kv};
  if (head + 1 < header.num_kv_heads / header.lockstep) return {low, head + 1, 0};
  return {low + 1, 0, 0};
}

// Cost of the line before an item.
ATTNLOOM_HD int64_t cost_before(PlanView<const int32_t> plan, const CostModel& cost, const int64_t* prefix,
                                Coordinate item) {
  if (item.head == 0) return prefix[item.tile];
  return prefix[item.tile] + item.head * item_cost(cost, plan.tile_rows()[item.tile], plan.tile_kv_tiles()[item.tile]);
}

// Whether no item need be cut: the dearest stretch of whole items is beyond a fair share by no more than what cuts
// cost, states written and merged at the end, when nothing else is left to do.
ATTNLOOM_HD bool cut_between_items(int64_t dearest, int64_t total, int32_t num_stretches, const CostModel& cost) {
  return 2 * (dearest - total / num_stretches) <= 5 * int64_t{cost.item};
}

// The first stretch of [low, high) that begins after `at`, or high: starts ascend.
ATTNLOOM_HD int32_t first_beyond(PlanView<int32_t> plan, Coordinate at, int32_t low, int32_t high) {
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (at < plan.start(middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Which stretches share an item with `stretch`. split_begin: the one that opened the item inside which it begins,
// else -1. split_end: the last one of the item that it opens and leaves open, else -1.
ATTNLOOM_HD void fill_splits(PlanView<int32_t> plan, int32_t stretch) {
  const Coordinate start = plan.start(stretch);
  const Coordinate stop = plan.start(stretch + 1);
  int32_t opener = -1;
  if (start.kv > 0) opener = first_beyond(plan, {start.tile, start.head, 0}, 0, stretch) - 1;
  int32_t last = -1;
  const bool opens = stop.kv > 0 && !(Coordinate{stop.tile, stop.head, 0} < start);
  if (opens) last = first_beyond(plan, {stop.tile, stop.head, INT32_MAX}, stretch + 1, plan.num_stretches) - 1;
  plan.split_begin()[stretch] = opener;
  plan.split_end()[stretch] = last;
}

// States of chunks that a stretch leaves in the arena: those of the piece with which it continues an item. One more for
// true lengths whose visible tiles touch a chunk more than the planned ones.
ATTNLOOM_HD int32_t chunk_states_of(PlanView<const int32_t> plan, int32_t stretch) {
  const Coordinate start = plan.start(stretch);
  const Coordinate stop = plan.start(stretch + 1);
  if (start.kv == 0 || !(start < stop)) return 0;
  const Piece piece = plan.piece_at(start, stop);
  const int32_t chunk = plan.header().chunk;
  const int32_t room = plan.header().chunk_room;
  const int32_t states = (piece.kv_end - piece.kv_begin + chunk - 1) / chunk + (piece.closes ? 1 : 0);
  return room > 0 && states > room ? room : states;  // it never is more; what others have in the arena stays theirs
}

// The host's form: header filled in but for num_tiles; prefix has room for tile_capacity + 1. Returns the
// number of tiles, or -1 when they exceed the capacity.
inline int64_t plan_scan(PlanView<int32_t> plan, const PlanInput& in, int64_t* prefix) {
  PlanHeader& header = *reinterpret_cast<PlanHeader*>(plan.buffer);
  const int32_t heads_of_line = header.num_kv_heads / header.lockstep;
  int64_t all_tall = 0;
  for (int32_t request = 0; has_tall(header) && request < header.num_requests; ++request) {
    const int32_t qo_len = in.qo_indptr[request + 1] - in.qo_indptr[request];
    if (is_tall(header, qo_len)) all_tall += tiles_of_request(header, qo_len);
  }
  if (all_tall > header.tile_capacity) return -1;
  const Deal deal(static_cast<int32_t>(all_tall), plan.num_stretches);
  int32_t tall = 0;
  int32_t others = 0;
  for (int32_t request = 0; request < header.num_requests; ++request) {
    plan.qo_indptr()[request] = in.qo_indptr[request];
    const int32_t qo_len = in.qo_indptr[request + 1] - in.qo_indptr[request];
    const bool of_tall = is_tall(header, qo_len);
    const int64_t count = tiles_of_request(header, qo_len);
    if (!of_tall && deal.tall + others + count > header.tile_capacity) return -1;
    int32_t& rank = of_tall ? tall : others;
    for (int32_t index = 0; index < count; ++index, ++rank) {
      fill_tile(plan, in, request, index, deal.place(of_tall, rank));
    }
  }
  header.num_tiles = tall + others;
  plan.qo_indptr()[header.num_requests] = in.qo_indptr[header.num_requests];
  int64_t sum = 0;
  for (int32_t tile = 0; tile < header.num_tiles; ++tile) {
    prefix[tile] = sum;
    sum += heads_of_line * item_cost(in.cost, plan.tile_rows()[tile], plan.tile_kv_tiles()[tile]);
  }
  prefix[header.num_tiles] = sum;
  const PlanView<const int32_t> made{plan.buffer};
  int64_t dearest = 0;
  int64_t before = 0;
  for (int32_t stretch = 1; stretch <= plan.num_stretches; ++stretch) {
    const int64_t until = cost_before(made, in.cost, prefix, locate(made, in.cost, prefix, stretch, true));
    if (dearest < until - before) dearest = until - before;
    before = until;
  }
  const bool whole = cut_between_items(dearest, sum, plan.num_stretches, in.cost);
  for (int32_t stretch = 0; stretch <= plan.num_stretches; ++stretch) {
    const Coordinate start = locate(made, in.cost, prefix, stretch, whole);
    plan.worker_tile()[stretch] = start.tile;
    plan.worker_head()[stretch] = start.head;
    plan.worker_kv()[stretch] = start.kv;
  }
  for (int32_t stretch = 0; stretch < plan.num_stretches; ++stretch) fill_splits(plan, stretch);
  for (int32_t stretch = 0; header.chunk > 0 && stretch < plan.num_stretches; ++stretch) {
    const int32_t states = chunk_states_of(made, stretch);
    if (header.chunk_states < states) header.chunk_states = states;
  }
  return header.num_tiles;
}

}  // namespace attnloom
