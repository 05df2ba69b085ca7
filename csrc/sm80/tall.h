// Tall query tiles, prefill and append: each warp computes every KV tile for its own rows.
#pragma once

#include <cstdint>

#include "sm80/chunks.h"
#include "sm80/epilogue.h"
#include "sm80/loader.h"
#include "sm80/merge.h"
#include "sm80/products.h"
#include "sm80/queries.h"
#include "sm80/softmax.h"
#include "sm80/transform.h"
#include "sm80/work.h"

namespace attnloom {
namespace sm80 {

#if __CUDA_ARCH__ >= 1000
constexpr int kMostGroups = 2;  // more spill there (CUDA 13.0)
#else
constexpr int kMostGroups = 4;
#endif

template <typename S>
struct Tall {
  static constexpr bool kTall = true;
  static constexpr int kStages = S::kTallStages;
  static constexpr int kFragments = S::kFragments;
  // Groups of 16 tokens at once: scores take registers, and hooks on them more, like elements that become wider.
  static constexpr int kGroups =
      S::Variant::kHasLogitsTransform || S::Variant::kHasLogitsMask
          ? 1
          : (sizeof(typename S::Key) == 1 || sizeof(typename S::Value) == 1 ? 2 : kMostGroups);
  // Where the band hides tokens of the tile: parts that none of the warp's rows sees are left out. In kAlike all tiles
  // have the same parts, since other rows decide which tiles the band cuts.
  static constexpr int kBandGroups = S::kAlike ? kGroups : smaller(kGroups, 2);

  const Cta<S>& cta;
  bool asked = false;  // the queries of the next piece are on their way
  explicit __device__ Tall(const Cta<S>& of) : cta(of) {}

  Rows<S> rows[kFragments];
  Chunks<S> chunks;  // kAlike

  __device__ void ask(const Work<S>& work) const {
    Queries<S>::share(cta, work, S::kTallRows, shared_memory + S::kTallQueriesAt);
    commit_copies();
  }

  __device__ int first_row() const { return cta.warp() * 16 * kFragments; }

  __device__ void begin(const Work<S>& work, bool any_tiles) {
    if (any_tiles && !asked) ask(work);
    if (!any_tiles && asked) wait_copies<0>();  // of queries that nobody reads
    asked = false;
#pragma unroll
    for (int m = 0; m < kFragments; ++m) rows[m].reset();
#pragma unroll
    for (int m = 0; m < kFragments; ++m) totals()[m] = make_float2(0.0f, 0.0f);
    if constexpr (S::kAlike) chunks.begin(cta, work);
    // The band of the warp's own rows: masks are needed in fewer tiles. Without rows there is nothing to do but to
    // load.
    const int count = min(16 * kFragments, work.rows - first_row());
    Seen own{{0, 0}, {0, 0}};
    if (count > 0) own = {work.any, work.band_free};
    if (count > 0 && cta.plan().header().trimmed) {
      const Band band = cta.plan().header().band;
      const QueryTile queries = work.queries_of(cta, first_row(), count);
      own.any = intersect(work.any, visible_to_any(band, queries.first, queries.last, work.kv_len));
      own.free = intersect(visible_to_all(band, queries.first, queries.last, work.kv_len), work.any);
    }
    __syncwarp();
    seen() = own;
    __syncwarp();
  }

  // Every warp's copies have landed, and every warp is done with the other stage.
  __device__ __forceinline__ void await(const Work<S>& work, const KvTiles<S>& tiles, int stage) {
    wait_copies<0>();
    transform_slice(cta, work, tiles.tile, stage);
    __syncthreads();
  }

  // `load` starts the copies of the next tile.
  template <typename Load>
  __device__ __forceinline__ void compute(const Work<S>& work, const KvTiles<S>& tiles, int stage, Load load) {
    // Inside the band of all the warp's rows.
    const bool free = Columns<S::kTileKv / 8>{tiles.tile * S::kTileKv}.inside(seen().free);
    load();
    if constexpr (S::kAlike) {
      while (chunks.over_at(tiles.tile)) turn(work, tiles.tile);
    }
    if (free) {
      compute_parts<kGroups, true>(work, tiles, stage);
    } else {
      compute_parts<kBandGroups, false>(work, tiles, stage);
    }
  }

  // Writes the rows, while the queries of the next piece come, if that is known.
  __device__ void end(const Work<S>& work, bool known, const Work<S>& next, int stage) {
    __syncthreads();  // every warp is done with the stage and the queries
    if (known) ask(next);
    asked = known;
    take_totals();
    if constexpr (S::kAlike) {
      rows[0].settle();
      if (!chunks.end(cta, work, rows[0])) return;
    }
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
      const OutputTile<S> tile{cta, work, first_row() + m * 16, nullptr};
      if ((S::kAlike || work.piece.whole()) && tile.direct()) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Finished row = finished(m, half);
          tile.write(rows[m], half, row.factor, row.lse);
        }
      } else {
        leave(work, m, stage);
      }
    }
  }

  __device__ void merged(bool, const Work<S>&) const {}

 private:
  struct Seen {
    Range any;   // slots that some query of the warp's own rows sees
    Range free;  // slots inside the band of all of them
  };
  // In shared memory, for the piece that is computed.
  __device__ Seen& seen() const { return reinterpret_cast<Seen*>(shared_memory + S::kSeenAt)[cta.warp()]; }

  // From the first of kGroups groups to another.
  template <int kPitch>
  static __device__ constexpr uint32_t offset_of(int group) {
    return group / S::kGroups * S::kSliceBytes + group % S::kGroups * (16 * kPitch);
  }

  struct Finished {
    float factor;  // of the values
    float lse;
  };
  // The lane's row of half `half` of fragment m.
  __device__ __forceinline__ Finished finished(int m, int half) const {
    const float sum = S::kAlike ? rows[m].total[half] : rows[m].sum(half);
    float factor = S::Variant::kHasValueTransform ? 1.0f : cta.p.v_scale;
    if constexpr (S::Variant::kSoftmax) factor = sum == 0.0f ? 0.0f : __fdividef(factor, sum);
    return {factor, sum == 0.0f ? ATTNLOOM_NEG_INF : (rows[m].peak[half] + fast_log2(sum)) * kLn2};
  }

  // A tile in parts of kCount groups of 16 tokens.
  template <int kCount, bool kFree>
  __device__ __forceinline__ void compute_parts(const Work<S>& work, const KvTiles<S>& tiles, int stage) {
#pragma unroll 1
    for (int part = 0; part < S::kTileKv / (16 * kCount); ++part) {
      const Columns<2 * kCount> columns{tiles.tile * S::kTileKv + part * (16 * kCount),
                                        shared_address(cta.positions(stage) + part * (16 * kCount))};
      if (!kFree && (columns.first >= seen().any.end || columns.first + 16 * kCount <= seen().any.begin)) continue;
      const uint32_t lane = cta.lane();
      const uint32_t queries = shared_address(shared_memory + S::kTallQueriesAt + first_row() * S::kPitchQ);
      float score[kFragments][2 * kCount][4];
      multiply_keys<S, typename S::Scalar, kCount, kFragments>(
          [&](int group) { return cta.keys_of(stage, part * kCount) + offset_of<S::kPitchK>(group); }, lane,
          [&](int step, int m, uint32_t (&fragment)[4]) { Queries<S>::fragment(queries, m, step, lane, fragment); },
          score);
      take_totals();
      Softmax<S, kFragments, 2 * kCount>::weigh(cta, work, first_row(), columns, kFree || columns.inside(seen().free),
                                                tiles.is_full(cta), score, rows);
      keep_totals();
#pragma unroll
      for (int group = 0; group < kCount; ++group) {
        uint32_t weights[kFragments][4];
#pragma unroll
        for (int m = 0; m < kFragments; ++m) {
          pack_weights<typename S::Scalar>(score[m][2 * group], score[m][2 * group + 1], weights[m]);
        }
        add_values<S, typename S::Scalar, kFragments>(
            cta.values_of(stage, part * kCount) + offset_of<S::kPitchV>(group), lane, weights, rows);
      }
    }
  }

  // kAlike: a chunk is over before KV tile `tile`.
  __device__ __forceinline__ void turn(const Work<S>& work, int32_t tile) {
    take_totals();
    rows[0].settle();
    chunks.put(cta, work, rows[0]);
    chunks.next(cta, work, tile);
    rows[0].reset();
    keep_totals();
  }

  // The thread's parts of its rows' sums are needed once a tile: they lie in shared memory.
  __device__ float2* totals() const {
    return reinterpret_cast<float2*>(shared_memory + S::kTotalsAt) + thread_anew() * kFragments;
  }
  __device__ __forceinline__ void take_totals() {
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
      const float2 kept = totals()[m];
      rows[m].total[0] = kept.x;
      rows[m].total[1] = kept.y;
    }
  }
  __device__ __forceinline__ void keep_totals() const {
#pragma unroll
    for (int m = 0; m < kFragments; ++m) totals()[m] = make_float2(rows[m].total[0], rows[m].total[1]);
  }

  // Rows of fragment m by way of shared memory: a state, or what output_transform is to see whole.
  __device__ void leave(const Work<S>& work, int m, int stage) {
    const PieceOutput<S> to{cta, work};
    float* mine = reinterpret_cast<float*>(cta.slice(stage, cta.warp()));
    float* lses = cta.states() + cta.warp() * 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Finished row = finished(m, half);
#pragma unroll
      for (int i = 0; i < S::kDimV / 8; ++i) {
        rows[m].out[i][half * 2] *= row.factor;
        rows[m].out[i][half * 2 + 1] *= row.factor;
      }
      if (cta.lane() % 4 == 0) lses[cta.lane() / 4 + half * 8] = row.lse;
    }
#pragma unroll
    for (int half = 0; half < 2; half += S::kOutputRows / 8) {
      const int first = first_row() + m * 16 + half * 8;
      const int count = min(S::kOutputRows, work.rows - first);
      share_output<S, S::kOutputRows / 8>(rows[m], half, count, cta.lane(), mine);
      __syncwarp();
      constexpr int kQuads = S::kDimV / 4;
      for (int index = cta.lane(); index < count * kQuads; index += 32) {
        const int row = index / kQuads;
        const int quad = index % kQuads;
        to.put(first, mine, row, quad, *reinterpret_cast<const float4*>(mine + output_at<S>(row, quad * 4)),
               lses[half * 8 + row]);
      }
      __syncwarp();
      to.transform(first, mine, count, cta.lane(), 32);
      if constexpr (S::Variant::kHasOutputTransform) __syncwarp();
    }
  }
};

}  // namespace sm80
}  // namespace attnloom
