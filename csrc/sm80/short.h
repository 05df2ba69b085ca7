// Short query tiles, decode and verify: at most 16 folded rows, so that reading KV is all that takes time. Each warp
// computes its own slice of every KV tile for all rows and keeps a state of its own: the main loop needs no barrier.
#pragma once

#include <cstdint>
#include <type_traits>

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

template <typename S>
struct Short {
  static constexpr bool kTall = false;
  static constexpr int kStages = S::kShortStages;

  const Cta<S>& cta;
  bool asked = false;  // the queries of the next piece are on their way
  explicit __device__ Short(const Cta<S>& of) : cta(of) {}

  // 8-bit elements become halves in one instruction, bfloat16 in four; so with 8-bit caches the products are of halves.
  // Weights are at most 2^8 then; a row of queries is scaled by a power of two.
  static constexpr bool kHalfKeys = S::kQueriesInRegisters && sizeof(typename S::Key) == 1;
  static constexpr bool kHalfValues = S::Variant::kSoftmax && sizeof(typename S::Value) == 1;
  using KeyMath = std::conditional_t<kHalfKeys, __half, typename S::Scalar>;
  using ValueMath = std::conditional_t<kHalfValues, __half, typename S::Scalar>;

  Rows<S> rows[1];
  float query_scale[2];
  uint32_t queries[S::kQueriesInRegisters ? S::kDim / 16 : 1][4];

  __device__ void begin(const Work<S>& work, bool) {
    if constexpr (S::kQueriesInRegisters) {
      if (!asked) Queries<S>::load(cta, work, queries);
      asked = false;
      if constexpr (!std::is_same_v<KeyMath, typename S::Scalar>) Queries<S>::to_halves(queries, query_scale);
    } else {
      Queries<S>::share(cta, work, S::kShortRows, shared_memory + S::kShortQueriesAt);
      commit_copies();
      wait_copies<0>();
      __syncthreads();
    }
    rows[0].reset();
  }

  // The warp's own copies have landed.
  __device__ __forceinline__ void await(const Work<S>& work, const KvTiles<S>& tiles, int stage) const {
    wait_copies<kStages - 2>();
    __syncwarp();
    transform_slice(cta, work, tiles.tile, stage);
  }

  // `load` starts the copies of the next tile.
  template <typename Load>
  __device__ __forceinline__ void compute(const Work<S>& work, const KvTiles<S>& tiles, int stage, Load load) {
    load();
    const int first = cta.warp() * S::kGroups;
    float score[1][2 * S::kGroups][4];
    multiply_keys<S, KeyMath, S::kGroups, 1>(
        [&](int group) { return cta.keys_of(stage, first) + group * (16 * S::kPitchK); }, cta.lane(),
        [&](int step, int, uint32_t (&fragment)[4]) {
          if constexpr (S::kQueriesInRegisters) {
#pragma unroll
            for (int i = 0; i < 4; ++i) fragment[i] = queries[step][i];
          } else {
            Queries<S>::fragment(shared_address(shared_memory + S::kShortQueriesAt), 0, step, cta.lane(), fragment);
          }
        },
        score);
    if constexpr (!std::is_same_v<KeyMath, typename S::Scalar>) {
#pragma unroll
      for (int n = 0; n < 2 * S::kGroups; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) score[0][n][i] *= query_scale[i / 2];
      }
    }
    const Columns<2 * S::kGroups> columns{tiles.tile * S::kTileKv + static_cast<int32_t>(cta.warp()) * S::kSlice,
                                          shared_address(cta.positions(stage) + cta.warp() * S::kSlice)};
    Softmax<S, 1, 2 * S::kGroups>::weigh(cta, work, 0, columns, columns.inside(work.band_free), tiles.is_full(cta),
                                         score, rows);
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group) {
      uint32_t weights[1][4];
      pack_weights<ValueMath>(score[0][2 * group], score[0][2 * group + 1], weights[0]);
      add_values<S, ValueMath, 1>(cta.values_of(stage, first) + group * (16 * S::kPitchV), cta.lane(), weights, rows);
    }
    __syncwarp();
  }

  // Asks for the queries of the next piece, if that is known: nobody needs the registers any more. Beside tall tiles
  // they would not stay in registers until the next piece begins.
  __device__ __forceinline__ void ask(bool known, const Work<S>& next) {
    if constexpr (S::kQueriesInRegisters && !S::kTall) {
      if (known) Queries<S>::load(cta, next, queries);
      asked = known;
    }
  }

  // Writes the rows. Leaves the CTA in step.
  __device__ void end(const Work<S>& work, bool known, const Work<S>& next, int stage) {
    if (work.piece.whole()) ask(known, next);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = rows[0].sum(half);
      if (cta.lane() % 4 == 0) {
        float* state = cta.states() + (cta.warp() * 16 + cta.lane() / 4 + half * 8) * 2;
        state[0] = rows[0].peak[half];
        state[1] = sum;
      }
    }
    const PieceOutput<S> to{cta, work};
#pragma unroll
    for (int half = 0; half < 2; half += S::kOutputRows / 8) {
      const int first = half * 8;
      const int count = min(S::kOutputRows, work.rows - first);
      if (count <= 0) break;
      share_output<S, S::kOutputRows / 8>(rows[0], half, count, cta.lane(), output(stage, cta.warp()));
      __syncthreads();
      // The sum takes the place of the first warp's part, which nobody else reads.
      constexpr int kQuads = S::kDimV / 4;
      for (int index = thread_anew(); index < count * kQuads; index += S::kThreads) {
        const int row = index / kQuads;
        const int quad = index % kQuads;
        const RowWeights weights = weights_of(first + row);
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < S::kWarps; ++w) {
          add_quad(sum, weights.of_warp[w],
                   *reinterpret_cast<const float4*>(output(stage, w) + output_at<S>(row, quad * 4)));
        }
        to.put(first, output(stage, 0), row, quad, sum, weights.lse);
      }
      __syncthreads();
      to.transform(first, output(stage, 0), count, thread_anew(), S::kThreads);
      if constexpr (S::Variant::kHasOutputTransform) __syncthreads();
    }
  }

  // After a merge, through which the queries were not carried.
  __device__ __forceinline__ void merged(bool known, const Work<S>& next) { ask(known, next); }

 private:
  // What the warps' states of a row weigh, and the row's LSE.
  struct RowWeights {
    float of_warp[S::kWarps];
    float lse;
  };
  __device__ RowWeights weights_of(int row) const {
    const float* state = cta.states() + row * 2;
    RowWeights weights;
    float highest = ATTNLOOM_NEG_INF;
    if constexpr (S::Variant::kSoftmax) {
#pragma unroll
      for (int w = 0; w < S::kWarps; ++w) highest = fmaxf(highest, state[w * 32]);
    }
    const float shift = highest > ATTNLOOM_NEG_INF ? highest : 0.0f;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) {
      weights.of_warp[w] = S::Variant::kSoftmax ? fast_exp2(state[w * 32] - shift) : 1.0f;
      sum += weights.of_warp[w] * state[w * 32 + 1];
    }
    float factor = S::Variant::kHasValueTransform ? 1.0f : cta.p.v_scale;
    if constexpr (S::Variant::kSoftmax) factor = sum == 0.0f ? 0.0f : __fdividef(factor, sum);
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) weights.of_warp[w] *= factor;
    weights.lse = sum == 0.0f ? ATTNLOOM_NEG_INF : (highest + fast_log2(sum)) * kLn2;
    return weights;
  }

  // Room for rows of a warp's output, in the stage computed last.
  __device__ float* output(int stage, int warp) const { return reinterpret_cast<float*>(cta.slice(stage, warp)); }
};

}  // namespace sm80
}  // namespace attnloom
