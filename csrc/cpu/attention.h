// The cpu kernel family: each worker runs its stretch of the plan, item by item:
//   load Q -> for each KV tile: gather, S = Q K^T, weigh, O += P V -> write the row, or leave a partial state.
// The last worker to finish a piece of a split item merges its states, in the order of the workers.
//
// kAlike is the engine's batch_invariant mode: a row has the same bits beside any other rows, on any number of workers,
// and whether its request's queries come at once or one by one. Items are cut at chunks of their KV, whose states are
// folded in their order (planner/plan.h), and a row takes one path through the arithmetic whatever its tile holds.
#pragma once

#include <atomic>
#include <cstdint>

#include "common/band.h"
#include "common/hooks.h"
#include "common/params.h"
#include "common/request.h"
#include "cpu/chunk_states.h"
#include "cpu/epilogue.h"
#include "cpu/gather.h"
#include "cpu/scratch.h"
#include "cpu/softmax.h"
#include "cpu/state.h"
#include "cpu/tile_products.h"
#include "cpu/transform.h"
#include "planner/plan.h"
#include "planner/scan.h"

namespace attnloom {
namespace cpu {

template <typename Scalar, int kDim, int kDimV, bool kAlike, typename Variant, typename HookParams>
class Worker {
 public:
  Worker(const AttentionParams& params, const HookParams& hooks)
      : p_(params),
        hooks_(hooks),
        plan_{params.plan},
        header_(plan_.header()),
        group_(header_.num_qo_heads / header_.num_kv_heads),
        epilogue_{hooks, params.out, params.lse, header_.num_qo_heads} {
    const int64_t rows = header_.tile_q;
    const int64_t sizes[] = {rows * kDim,    rows * kDimV,    rows * kTileKv, kTileKv * kDim,
                             kTileKv * kDim, kTileKv * kDimV, kMaxDim,        rows * 2};
    float** const parts[] = {&q_, &out_, &scores_, &packed_keys_, &key_rows_, &value_rows_, &line_, &states_floats_};
    int64_t floats = 0;
    for (int64_t size : sizes) floats += size;
    float* next = thread_scratch().take(floats);
    for (int part = 0; part < 8; ++part) {
      *parts[part] = next;
      next += sizes[part];
    }
    states_ = reinterpret_cast<RowState*>(states_floats_);
  }

  void run(int32_t worker) {
    const int32_t stretch = worker / header_.lockstep;
    Coordinate at = plan_.start(stretch);
    const Coordinate stop = plan_.start(stretch + 1);
    while (at < stop) {
      const Piece piece = plan_.piece_at(at, stop);
      run_piece(worker, piece);
      at = plan_.after(piece);
    }
  }

 private:
  static constexpr int kMaxDim = kDim > kDimV ? kDim : kDimV;

  struct Visible {
    Range any;        // slots that some query sees: no others are read
    Range band_free;  // slots inside the band of every query
    Range mask_free;  // slots that logits_mask leaves to every query
  };

  void run_piece(int32_t worker, const Piece& piece) {
    const int32_t kv_head = plan_.kv_head(worker, piece.head);
    const Request request(p_.layout, plan_.qo_indptr().data(), plan_.tile_request()[piece.tile]);
    const int32_t row = plan_.tile_row()[piece.tile];
    const int32_t rows = plan_.tile_rows()[piece.tile];
    const QueryTile queries{request.index, request.query_position(row / group_),
                            request.query_position((row + rows - 1) / group_), request.kv_len};
    const Visible visible = visible_to_tile(queries);
    const Range tiles = kv_tiles_of(visible.any, kTileKv);

    load_queries(request, kv_head, row, rows);
    if constexpr (kAlike) return run_chunks(worker, piece, request, queries, visible, tiles);
    for (int32_t i = 0; i < rows; ++i) states_[i] = {-kInfinity, 0.0f};
    for (int32_t i = 0; i < rows * kDimV; ++i) out_[i] = 0.0f;
    if (p_.block_mask.kinds == nullptr) {
      const int32_t begin = tiles.begin + piece.kv_begin;
      const int32_t end =
          piece.closes ? tiles.end : static_cast<int32_t>(min_of(tiles.begin + piece.kv_end, tiles.end));
      for (int32_t tile = begin; tile < end; ++tile) {
        run_tile(request, kv_head, row, rows, tile, visible, kPartialTile);
      }
    } else {
      int32_t nth = 0;  // among the tiles that the mask does not hide
      for (int32_t tile = tiles.begin; tile < tiles.end && (piece.closes || nth < piece.kv_end); ++tile) {
        const TileKind kind = tile_kind(p_.block_mask, queries, kTileKv, tile);
        if (kind == kHiddenTile) continue;
        if (nth >= piece.kv_begin) run_tile(request, kv_head, row, rows, tile, visible, kind);
        ++nth;
      }
    }

    if (piece.opens && piece.closes) {
      for (int32_t i = 0; i < rows; ++i) {
        const float lse = normalise(i);
        write(request, kv_head, row + i, out_ + i * kDimV, lse);
      }
      return;
    }
    leave_partial(worker, piece, rows);
    merge_if_last(worker, piece, kv_head, request, row, rows);
  }

  static void clear(int32_t rows, RowState* states, float* values) {
    for (int32_t i = 0; i < rows; ++i) states[i] = {-kInfinity, 0.0f};
    for (int32_t i = 0; i < rows * kDimV; ++i) values[i] = 0.0f;
  }

  // A piece of an item in the batch_invariant mode.
  void run_chunks(int32_t worker, const Piece& piece, const Request& request, const QueryTile& queries,
                  const Visible& visible, Range tiles) {
    const int32_t kv_head = plan_.kv_head(worker, piece.head);
    const int32_t row = plan_.tile_row()[piece.tile];
    const int32_t rows = plan_.tile_rows()[piece.tile];
    const Range all = chunks_of(header_, tiles);
    const Range chunks = chunks_of_piece(header_, all, piece.kv_begin, piece.kv_end, piece.closes);
    const auto arena = chunk_states();
    const int64_t own = fold_slot(header_, worker);
    if (piece.opens) clear(rows, arena.states(own), arena.values(own));
    for (int32_t chunk = chunks.begin; chunk < chunks.end; ++chunk) {
      clear(rows, states_, out_);
      const Range inside = intersect(tiles, {chunk * header_.chunk, (chunk + 1) * header_.chunk});
      for (int32_t tile = inside.begin; tile < inside.end; ++tile) {
        const TileKind kind =
            p_.block_mask.kinds == nullptr ? kPartialTile : tile_kind(p_.block_mask, queries, kTileKv, tile);
        if (kind != kHiddenTile) run_tile(request, kv_head, row, rows, tile, visible, kind);
      }
      if (piece.opens) {
        arena.fold(own, rows, states_, out_);
      } else {
        arena.leave(own, chunk - chunks.begin, rows, states_, out_);
      }
    }
    if (piece.opens && piece.closes) return write_fold(own, kv_head, request, row, rows);
    merge_if_last(worker, piece, kv_head, request, row, rows, all);
  }

  // Folds what `count` stretches from `opener` on have left of an item, the opener's own fold first.
  void merge_chunks(int32_t worker, int32_t opener, int32_t count, Range chunks, int32_t kv_head,
                    const Request& request, int32_t row, int32_t rows) {
    const int64_t fold = fold_slot(header_, plan_.peer(worker, opener));
    for (int32_t nth = 1; nth < count; ++nth) {
      const int32_t stretch = opener + nth;
      const Range left =
          chunks_of_piece(header_, chunks, plan_.start(stretch).kv, plan_.start(stretch + 1).kv, nth + 1 == count);
      chunk_states().fold_left(fold, fold_slot(header_, plan_.peer(worker, stretch)), left.end - left.begin, rows);
    }
    write_fold(fold, kv_head, request, row, rows);
  }

  // Writes the rows of an item out of its fold. Not inlined: one code, whoever folded.
  __attribute__((noinline)) void write_fold(int64_t fold, int32_t kv_head, const Request& request, int32_t row,
                                            int32_t rows) {
    for (int32_t i = 0; i < rows; ++i) {
      states_[i] = chunk_states().states(fold)[i];
      const float* from = chunk_states().values(fold) + i * kDimV;
      for (int dim = 0; dim < kDimV; dim += kLanes) store(out_ + i * kDimV + dim, load(from + dim));
      const float lse = normalise(i);
      write(request, kv_head, row + i, out_ + i * kDimV, lse);
    }
  }

  ChunkStates<kDimV, Variant::kSoftmax> chunk_states() const { return {p_.arena, header_}; }

  Visible visible_to_tile(const QueryTile& queries) const {
    if (!header_.trimmed) return {{0, queries.kv_len}, {0, 0}, {0, 0}};
    Visible visible{visible_to_any(header_.band, queries.first, queries.last, queries.kv_len),
                    visible_to_all(header_.band, queries.first, queries.last, queries.kv_len),
                    {0, 0}};
    if constexpr (Variant::kHasVisible) {
      visible.any = intersect(visible.any,
                              Variant::visible(hooks_, queries.request, queries.first, queries.last, queries.kv_len));
    }
    visible.band_free = intersect(visible.band_free, visible.any);
    if constexpr (Variant::kHasMaskFree) {
      visible.mask_free = Variant::mask_free(hooks_, queries.request, queries.first, queries.last, queries.kv_len);
    }
    return visible;
  }

  Row row_of(const Request& request, int32_t kv_head, int32_t folded) const {
    const int32_t query = folded / group_;
    return {request.index, query, request.query_position(query), kv_head * group_ + folded % group_, kv_head};
  }

  void write(const Request& request, int32_t kv_head, int32_t folded, float* values, float lse) const {
    const Row row = row_of(request, kv_head, folded);
    const int64_t token = request.first_token + row.q_index;
    if (p_.unfinished) {
      epilogue_.write_state(row, token, values, lse);
    } else {
      epilogue_.finish(row, token, values, lse);
    }
  }

  void load_queries(const Request& request, int32_t kv_head, int32_t first_row, int32_t rows) {
    const Scalar* q = static_cast<const Scalar*>(p_.q.data);
    for (int32_t i = 0; i < rows; ++i) {
      const Row row = row_of(request, kv_head, first_row + i);
      const Scalar* from = q + (request.first_token + row.q_index) * p_.q.stride_row + row.q_head * p_.q.stride_head;
      float* to = q_ + i * kDim;
      for (int dim = 0; dim < kDim; dim += kLanes) store(to + dim, load(from + dim));
      if constexpr (Variant::kHasQueryTransform) {
        const HookParams hooks = hooks_;
        for (int dim = 0; dim < kDim; ++dim) line_[dim] = to[dim];
#pragma omp simd
        for (int dim = 0; dim < kDim; ++dim) {
          to[dim] =
              Variant::query_transform(hooks, line_, dim, row.request, row.q_pos, row.q_head, row.kv_head, row.q_index);
        }
      }
    }
  }

  static bool holds(Range slots, int32_t first_slot) {
    return first_slot >= slots.begin && first_slot + kTileKv <= slots.end;
  }

  void run_tile(const Request& request, int32_t kv_head, int32_t first_row, int32_t rows, int32_t tile,
                const Visible& visible, TileKind kind) {
    const int32_t first_slot = tile * kTileKv;
    const int begin = visible.any.begin > first_slot ? visible.any.begin - first_slot : 0;
    const int end = visible.any.end - first_slot < kTileKv ? visible.any.end - first_slot : kTileKv;
    for (int column = begin; column < end; ++column) {
      kv_index_[column] = first_slot + column;
      kv_pos_[column] = request.position(first_slot + column);
    }
    repeat_ends(begin, end, kv_index_);
    repeat_ends(begin, end, kv_pos_);
    const Scalar* keys[kTileKv];
    const Scalar* values[kTileKv];
    locate_rows(request, p_.k, kv_head, first_slot, begin, end, keys);
    locate_rows(request, p_.v, kv_head, first_slot, begin, end, values);

    const TileColumns columns{kv_pos_, kv_index_};
    if constexpr (Variant::kHasKeyTransform && Variant::kKeysByColumn) {
      transform_columns<kDim, kDimV>(keys, values, columns, p_.k_scale, key_rows_, packed_keys_,
                                     KeyHook{hooks_, request.index, kv_head});
      score_packed<kAlike, kDim>(rows, q_, packed_keys_, scores_);
    } else if constexpr (Variant::kHasKeyTransform) {
      const float* rows_of_keys[kTileKv];
      transform_rows<kDim, kDimV>(keys, values, begin, end, columns, p_.k_scale, line_, key_rows_, rows_of_keys,
                                  KeyHook{hooks_, request.index, kv_head});
      score_rows<kAlike, kDim>(rows, q_, rows_of_keys, begin, end, packed_keys_, scores_);
    } else {
      if (rows <= kFewRows) {  // a decode waits for memory: the values come nearer while the keys are scored
        for (int column = begin; column < end; ++column) fetch_row<kDimV, kSecond>(values[column]);
      }
      score_rows<kAlike, kDim>(rows, q_, keys, begin, end, packed_keys_, scores_);
    }

    const bool band_free = !kAlike && holds(visible.band_free, first_slot);
    const bool mask_free =
        !Variant::kHasLogitsMask || (!kAlike && (kind == kFullTile || holds(visible.mask_free, first_slot)));
    const float scale = Variant::kHasKeyTransform ? p_.sm_scale : p_.sm_scale * p_.k_scale;
    for (int32_t i = 0; i < rows; ++i) {
      const Row row = row_of(request, kv_head, first_row + i);
      float* scores = scores_ + i * kTileKv;
      float factor;
      if (band_free) {
        factor = weigh<Columns::kAll>(row, columns, Range{}, mask_free, scale, scores, &states_[i]);
      } else if (header_.trimmed) {
        const Range seen = intersect(visible_to(header_.band, row.q_pos, request.kv_len), visible.any);
        const Range inside{seen.begin - first_slot, seen.end - first_slot};
        factor = weigh<Columns::kRange>(row, columns, inside, mask_free, scale, scores, &states_[i]);
      } else {
        factor = weigh<Columns::kByBand>(row, columns, Range{begin, end}, mask_free, scale, scores, &states_[i]);
      }
      if (factor != 1.0f) {
        float* out = out_ + i * kDimV;
        for (int dim = 0; dim < kDimV; dim += kLanes) store(out + dim, load(out + dim) * broadcast(factor));
      }
    }

    if constexpr (Variant::kHasValueTransform) {
      const float* rows_of_values[kTileKv];
      const Scalar* const* nothing = nullptr;
      transform_rows<kDimV, 0>(values, nothing, begin, end, columns, p_.v_scale, line_, value_rows_, rows_of_values,
                               ValueHook{hooks_, request.index, kv_head});
      add_values<kAlike, kDimV>(rows, scores_, rows_of_values, begin, end, value_rows_, out_);
    } else {
      add_values<kAlike, kDimV>(rows, scores_, values, begin, end, value_rows_, out_);
    }
  }

  template <Columns kColumns>
  float weigh(const Row& row, const TileColumns& columns, Range inside, bool mask_free, float scale, float* scores,
              RowState* state) const {
    if constexpr (Variant::kHasLogitsMask) {
      if (!mask_free) {
        return weigh_row<Variant, kColumns, true>(hooks_, row, columns, inside, header_.band, scale, scores, state);
      }
    }
    return weigh_row<Variant, kColumns, false>(hooks_, row, columns, inside, header_.band, scale, scores, state);
  }

  // What a K or V hook is told besides the element; the parameters are a copy, which no store of a row can change.
  struct KeyHook {
    const HookParams hooks;
    const int32_t request;
    const int32_t kv_head;
    template <typename Vector>
    ATTNLOOM_HD float operator()(const Vector& key, int dim, int32_t kv_pos, int32_t kv_index) const {
      return Variant::key_transform(hooks, key, dim, request, kv_pos, kv_head, kv_index);
    }
  };
  struct ValueHook {
    const HookParams hooks;
    const int32_t request;
    const int32_t kv_head;
    template <typename Vector>
    ATTNLOOM_HD float operator()(const Vector& value, int dim, int32_t kv_pos, int32_t kv_index) const {
      return Variant::value_transform(hooks, value, dim, request, kv_pos, kv_head, kv_index);
    }
  };

  // Divides row i of the accumulator by its sum; returns its LSE.
  float normalise(int32_t i) {
    const RowState state = states_[i];
    float factor = Variant::kHasValueTransform ? 1.0f : p_.v_scale;
    if constexpr (Variant::kSoftmax) factor = state.total == 0.0f ? 0.0f : factor / state.total;
    float* out = out_ + i * kDimV;
    for (int dim = 0; dim < kDimV; dim += kLanes) store(out + dim, load(out + dim) * broadcast(factor));
    return state.total == 0.0f ? -kInfinity : state.peak + math::log(state.total);
  }

  // The arena: [2 * workers][tile_q][kDimV] values, then [2 * workers][tile_q] LSEs.
  float* partial_values(int32_t slot) const { return p_.arena + static_cast<int64_t>(slot) * header_.tile_q * kDimV; }
  float* partial_lses(int32_t slot) const {
    return p_.arena + static_cast<int64_t>(header_.num_workers) * 2 * header_.tile_q * kDimV +
           static_cast<int64_t>(slot) * header_.tile_q;
  }

  void leave_partial(int32_t worker, const Piece& piece, int32_t rows) {
    const int32_t slot = partial_slot(worker, piece.opens);
    float* values = partial_values(slot);
    float* lses = partial_lses(slot);
    for (int32_t i = 0; i < rows; ++i) {
      lses[i] = normalise(i);
      for (int dim = 0; dim < kDimV; dim += kLanes) {
        store(values + i * kDimV + dim, load(out_ + i * kDimV + dim));
      }
    }
  }

  void merge_if_last(int32_t worker, const Piece& piece, int32_t kv_head, const Request& request, int32_t row,
                     int32_t rows, Range chunks = {}) {
    const int32_t stretch = worker / header_.lockstep;
    const int32_t opener = piece.opens ? stretch : plan_.split_begin()[stretch];
    const int32_t count = plan_.split_end()[opener] - opener + 1;
    int32_t pieces = 0;
    for (int32_t i = 0; i < count; ++i) pieces += plan_.has_work(opener + i);
    std::atomic<int32_t>& arrivals = reinterpret_cast<std::atomic<int32_t>&>(p_.arrivals[plan_.peer(worker, opener)]);
    if (arrivals.fetch_add(1, std::memory_order_acq_rel) + 1 < pieces) return;
    arrivals.store(0, std::memory_order_relaxed);  // ready for the next run

    if constexpr (kAlike) return merge_chunks(worker, opener, count, chunks, kv_head, request, row, rows);
    for (int32_t i = 0; i < rows; ++i) {
      const auto slot_of = [this, worker, opener](int64_t nth) {
        return partial_slot(plan_.peer(worker, opener + static_cast<int32_t>(nth)), nth == 0);
      };
      const auto value_of = [this, opener, i, &slot_of](int64_t nth) -> const float* {
        return plan_.has_work(opener + static_cast<int32_t>(nth)) ? partial_values(slot_of(nth)) + i * kDimV : nullptr;
      };
      const auto lse_of = [this, i, &slot_of](int64_t nth) { return partial_lses(slot_of(nth))[i]; };
      const float lse = merge_row<Variant::kSoftmax>(count, value_of, lse_of, kDimV, line_);
      write(request, kv_head, row + i, line_, lse);
    }
  }

  const AttentionParams& p_;
  const HookParams& hooks_;
  PlanView<const int32_t> plan_;
  const PlanHeader& header_;
  const int32_t group_;

  Epilogue<Scalar, kDimV, Variant, HookParams> epilogue_;

  float* q_;            // [tile_q][kDim]
  float* out_;          // [tile_q][kDimV]
  float* scores_;       // [tile_q][kTileKv]
  float* packed_keys_;  // [kDim][kTileKv]
  float* key_rows_;     // [kTileKv][kDim], after the key hook
  float* value_rows_;   // [kTileKv][kDimV], float32 or after the value hook
  float* line_;         // one row
  float* states_floats_;
  RowState* states_;  // [tile_q]
  int32_t kv_pos_[kTileKv];
  int32_t kv_index_[kTileKv];
};

template <typename Scalar, int kDim, int kDimV, bool kAlike, typename Variant, typename HookParams>
int32_t run_attention(const AttentionParams& params) {
  const HookParams hooks(params.hook_params);
  const PlanHeader& header = PlanView<const int32_t>{params.plan}.header();
  if (header.tile_kv != kTileKv || (kAlike && header.chunk <= 0)) return 1;
#pragma omp parallel num_threads(params.num_threads) if (params.num_threads > 1)
  {
    Worker<Scalar, kDim, kDimV, kAlike, Variant, HookParams> worker(params, hooks);
#pragma omp for schedule(dynamic, 1) nowait
    for (int32_t index = 0; index < header.num_workers; ++index) worker.run(index);
  }
  return 0;
}

// Finishes states that were merged elsewhere: every row of every request of the plan.
template <typename Scalar, int kDimV, typename Variant, typename HookParams>
int32_t finish_attention(const FinishParams& params) {
  const HookParams hooks(params.hook_params);
  const PlanView<const int32_t> plan{params.plan};
  const PlanHeader& header = plan.header();
  const int32_t group = header.num_qo_heads / header.num_kv_heads;
  const Epilogue<Scalar, kDimV, Variant, HookParams> epilogue{hooks, params.out, params.lse, header.num_qo_heads};
#pragma omp parallel for num_threads(params.num_threads) if (params.num_threads > 1)
  for (int32_t index = 0; index < header.num_requests; ++index) {
    const Request request(params.layout, plan.qo_indptr().data(), index);
    float values[kDimV];
    for (int32_t query = 0; query < request.qo_len; ++query) {
      const int64_t token = request.first_token + query;
      for (int32_t head = 0; head < header.num_qo_heads; ++head) {
        const Row row{index, query, request.query_position(query), head, head / group};
        const int64_t at = token * header.num_qo_heads + head;
        for (int dim = 0; dim < kDimV; ++dim) values[dim] = params.state_out[at * kDimV + dim];
        epilogue.finish(row, token, values, params.state_lse == nullptr ? 0.0f : params.state_lse[at]);
      }
    }
  }
  return 0;
}

}  // namespace cpu
}  // namespace attnloom
