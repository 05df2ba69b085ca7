// Decode and verify: query tiles of at most 16 folded rows, so that reading KV is all that takes time.
//
// A CTA of four warps is a worker. Each warp takes 16 tokens of every KV tile of 64 and keeps a state of its own, so
// the main loop needs no barrier: a warp waits for its own copies only. The copies run ahead of the computation by
// kStages - 1 tiles along the worker's whole stretch, across items; page ids run one tile further ahead.
#pragma once

#include <cstdint>

#include "common/band.h"
#include "common/hooks.h"
#include "common/params.h"
#include "common/request.h"
#include "common/visible.h"
#include "planner/plan.h"
#include "sm80/ptx.h"

namespace attnloom {
namespace sm80 {

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

// 2^x to two units in the last place; -inf gives 0.
__device__ __forceinline__ float fast_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
#define ATTNLOOM_NEG_INF (__int_as_float(0xff800000))

template <typename Scalar, int kDim, int kDimV, typename Variant, typename HookParams>
struct Decode {
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kSlice = 16;  // tokens of a warp in a KV tile
  static constexpr int kTileKv = kWarps * kSlice;
  static constexpr int kRows = 16;  // of the query tile
  static constexpr int kStages = 3;
  // Rows in shared memory are padded to whole groups of 8 chunks of 16 bytes, over which the swizzle permutes.
  static constexpr int kPitchK = (kDim + 63) / 64 * 64;
  static constexpr int kPitchV = (kDimV + 63) / 64 * 64;
  static constexpr int kSliceBytes = kSlice * (kPitchK + kPitchV) * 2;
  static constexpr int kStageBytes = kWarps * kSliceBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes + kWarps * kRows * 2 * 4 + 16;
  static_assert(kSlice * (kPitchK + kPitchV) * 2 >= kRows * kPitchV * 4, "a slice has room for the warp's output");

  // What a piece covers, as the true lengths say.
  struct Work {
    int32_t request;
    int32_t row;
    int32_t rows;
    int32_t head;
    int32_t qo_len;
    int32_t kv_len;
    int32_t first_position;  // of the request's first query
    int32_t first_token;
    const int32_t* blocks;
    Range any;
    Range free;
    int32_t tile;
    int32_t tile_end;
  };

  const AttentionParams& p;
  const HookParams& hooks;
  PlanView<const int32_t> plan;
  const int32_t group;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  char* shared;

  __device__ Decode(const AttentionParams& params, const HookParams& hook_params, char* memory)
      : p(params),
        hooks(hook_params),
        plan{params.plan},
        group(plan.header().num_qo_heads / plan.header().num_kv_heads),
        shared(memory) {}

  __device__ Work work_of(const Piece& piece) const {
    const PlanHeader& header = plan.header();
    Work work;
    work.request = plan.tile_request()[piece.tile];
    work.row = plan.tile_row()[piece.tile];
    work.rows = plan.tile_rows()[piece.tile];
    work.head = plan.kv_head(blockIdx.x, piece.head);
    work.first_token = plan.qo_indptr()[work.request];
    work.qo_len = plan.qo_indptr()[work.request + 1] - work.first_token;
    work.kv_len = p.layout.lengths[work.request];
    work.blocks = p.layout.indices + p.layout.starts[work.request];
    work.first_position = work.kv_len - work.qo_len;
    const int32_t first = work.first_position + work.row / group;
    const int32_t last = work.first_position + (work.row + work.rows - 1) / group;
    work.any = visible_to_any(header.band, first, last, work.kv_len);
    work.free = visible_to_all(header.band, first, last, work.kv_len);
    const Range tiles = kv_tiles_of(work.any, kTileKv);
    work.tile = tiles.begin + piece.kv_begin;
    work.tile_end = piece.closes ? tiles.end : min(tiles.begin + piece.kv_end, tiles.end);
    return work;
  }

  // The loader: a position in the worker's stream of KV tiles, and the addresses of the tile it is at.
  Coordinate load_at;
  Coordinate load_stop;
  Work loading;
  bool loads_left;
  // Of token lane % 16 of the warp's slice. The block id is not touched before the copies need it: the load that
  // brings it has a whole tile's time.
  bool token_valid;
  int32_t token_block;
  int32_t token_offset;  // in the block

  __device__ void begin_loading(Coordinate at, Coordinate stop) {
    load_at = at;
    load_stop = stop;
    loads_left = find_tile();
    if (loads_left) fetch_pages();
  }

  // Moves to the next piece with a tile to load.
  __device__ bool find_tile() {
    while (load_at < load_stop) {
      const Piece piece = plan.piece_at(load_at, load_stop);
      load_at = plan.after(piece);
      loading = work_of(piece);
      if (loading.tile < loading.tile_end) return true;
    }
    return false;
  }

  __device__ void fetch_pages() {
    const int32_t slot = loading.tile * kTileKv + warp * kSlice + lane % kSlice;
    token_valid = slot >= loading.any.begin && slot < loading.any.end;
    const int32_t block_size = static_cast<int32_t>(p.layout.block_size);
    const int32_t entry = slot / block_size;
    token_block = token_valid ? __ldg(loading.blocks + entry) : 0;
    token_offset = slot - entry * block_size;
  }

  template <int kWidth, int kPitch>
  __device__ void copy_rows(const CacheTensor& cache, uint32_t valid, uint32_t to) const {
    const int64_t token = token_block * cache.stride_block + token_offset * cache.stride_slot;
    const Scalar* base = static_cast<const Scalar*>(cache.data) + loading.head * cache.stride_head;
    constexpr int kChunks = kWidth / 8;
    static_assert(kSlice * kChunks % 32 == 0, "every lane copies the same number of chunks");
#pragma unroll
    for (int i = 0; i < kSlice * kChunks / 32; ++i) {
      const int index = i * 32 + lane;
      const int row = index / kChunks;
      const int chunk = index % kChunks;
      const int64_t offset = __shfl_sync(0xffffffff, token, row);
      copy_async(to + row * kPitch * 2 + ((chunk ^ (row & 7)) * 16),
                 base + (((valid >> row) & 1) ? offset + chunk * 8 : 0), (valid >> row) & 1);
    }
  }

  __device__ uint32_t slice_address(int stage) const {
    return shared_address(shared) + stage * kStageBytes + warp * kSliceBytes;
  }

  // Starts the copies of the next tile, and the fetch of the page ids of the one after.
  __device__ void load_next(int stage) {
    if (loads_left) {
      const uint32_t valid = __ballot_sync(0xffffffff, token_valid);
      const uint32_t to = slice_address(stage);
      copy_rows<kDim, kPitchK>(p.k, valid, to);
      copy_rows<kDimV, kPitchV>(p.v, valid, to + kSlice * kPitchK * 2);
      if (++loading.tile == loading.tile_end) loads_left = find_tile();
      if (loads_left) fetch_pages();
    }
    commit_copies();
  }

  uint32_t q[kDim / 16][4];
  float out[kDimV / 8][4];
  float peak[2];   // reference of rows lane / 4 and lane / 4 + 8, in units of log2
  float total[2];  // this thread's part of the sum

  __device__ void load_queries(const Work& work) {
    const Scalar* base = static_cast<const Scalar*>(p.q.data);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + half * 8;
      const bool valid = row < work.rows;
      const int folded = work.row + row;
      const Scalar* from = base + (work.first_token + folded / group) * p.q.stride_row +
                           (work.head * group + folded % group) * p.q.stride_head + lane % 4 * 2;
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        q[step][half] = valid ? *reinterpret_cast<const uint32_t*>(from + step * 16) : 0;
        q[step][half + 2] = valid ? *reinterpret_cast<const uint32_t*>(from + step * 16 + 8) : 0;
      }
    }
  }

  __device__ void reset() {
#pragma unroll
    for (int i = 0; i < kDimV / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[i][j] = 0.0f;
    }
    peak[0] = peak[1] = ATTNLOOM_NEG_INF;
    total[0] = total[1] = 0.0f;
  }

  __device__ void compute(const Work& work, int stage) {
    const uint32_t keys = slice_address(stage);
    const uint32_t values = keys + kSlice * kPitchK * 2;
    float score[2][4] = {};
    {
      const int token = (lane / 16) * 8 + lane % 8;
      const int chunk = (lane / 8) % 2;
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        uint32_t k[4];
        load_matrices(k, keys + token * kPitchK * 2 + (((step * 2 + chunk) ^ (token & 7)) * 16));
        Half<Scalar>::multiply(score[0], q[step], k[0], k[1]);
        Half<Scalar>::multiply(score[1], q[step], k[2], k[3]);
      }
    }
    const int32_t first_slot = work.tile * kTileKv + warp * kSlice;
    weigh(work, first_slot, score);
    uint32_t weights[4];
    weights[0] = Half<Scalar>::pack(score[0][0], score[0][1]);
    weights[1] = Half<Scalar>::pack(score[0][2], score[0][3]);
    weights[2] = Half<Scalar>::pack(score[1][0], score[1][1]);
    weights[3] = Half<Scalar>::pack(score[1][2], score[1][3]);
    {
      const int token = lane % 16;
      const int chunk = lane / 16;
#pragma unroll
      for (int pair = 0; pair < kDimV / 16; ++pair) {
        uint32_t v[4];
        load_matrices_transposed(v, values + token * kPitchV * 2 + (((pair * 2 + chunk) ^ (token & 7)) * 16));
        Half<Scalar>::multiply(out[2 * pair], weights, v[0], v[1]);
        Half<Scalar>::multiply(out[2 * pair + 1], weights, v[2], v[3]);
      }
    }
  }

  // Scores to weights in place: scale, hooks, masks, online softmax.
  __device__ void weigh(const Work& work, int32_t first_slot, float (&score)[2][4]) {
    const bool free = first_slot >= work.free.begin && first_slot + kSlice <= work.free.end;
    constexpr bool kPlain = !Variant::kHasLogitsTransform && Variant::kSoftmax;
    const float scale = p.sm_scale * p.k_scale * (kPlain ? kLog2e : 1.0f);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) score[tile][i] *= scale;
    }
    if constexpr (!kPlain || Variant::kHasLogitsMask) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t folded = work.row + lane / 4 + half * 8;
        const int32_t query = folded / group;
        const int32_t q_head = work.head * group + folded % group;
        const bool row_valid = lane / 4 + half * 8 < work.rows;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& value = score[i / 2][half * 2 + i % 2];
          // A column outside the request repeats the last one inside: hooks meet no index of another request.
          const int32_t column = first_slot + i / 2 * 8 + lane % 4 * 2 + i % 2;
          const int32_t kv = max(min(column, work.any.end - 1), work.any.begin);
          if (!row_valid) continue;
          if constexpr (Variant::kHasLogitsTransform) {
            value = Variant::logits_transform(hooks, value, work.request, work.first_position + query, kv, q_head,
                                              work.head, query, kv) *
                    (Variant::kSoftmax ? kLog2e : 1.0f);
          }
          if constexpr (Variant::kHasLogitsMask) {
            const bool keep = Variant::logits_mask(hooks, work.request, work.first_position + query, kv, q_head,
                                                   work.head, query, kv);
            value = keep ? value : (Variant::kSoftmax ? ATTNLOOM_NEG_INF : 0.0f);
          }
        }
      }
    }
    if (!free) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t query = (work.row + lane / 4 + half * 8) / group;
        const Range seen =
            intersect(visible_to(plan.header().band, work.first_position + query, work.kv_len), work.any);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int32_t column = first_slot + i / 2 * 8 + lane % 4 * 2 + i % 2;
          float& value = score[i / 2][half * 2 + i % 2];
          value = column >= seen.begin && column < seen.end ? value : (Variant::kSoftmax ? ATTNLOOM_NEG_INF : 0.0f);
        }
      }
    }
    if constexpr (Variant::kSoftmax) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float tile_peak =
            fmaxf(fmaxf(score[0][half * 2], score[0][half * 2 + 1]), fmaxf(score[1][half * 2], score[1][half * 2 + 1]));
        tile_peak = fmaxf(tile_peak, __shfl_xor_sync(0xffffffff, tile_peak, 1));
        tile_peak = fmaxf(tile_peak, __shfl_xor_sync(0xffffffff, tile_peak, 2));
        // The reference follows the largest score only when it falls behind by 2^8: the weights stay far from overflow,
        // and a rescaling of the output becomes rare (as FlashAttention-4 does).
        if (__any_sync(0xffffffff, tile_peak > peak[half] + 8.0f)) {
          const float next = fmaxf(peak[half], tile_peak);
          const float factor = fast_exp2(peak[half] - (next > ATTNLOOM_NEG_INF ? next : 0.0f));
          total[half] *= factor;
#pragma unroll
          for (int i = 0; i < kDimV / 8; ++i) {
            out[i][half * 2] *= factor;
            out[i][half * 2 + 1] *= factor;
          }
          peak[half] = next;
        }
        const float shift = peak[half] > ATTNLOOM_NEG_INF ? peak[half] : 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& value = score[i / 2][half * 2 + i % 2];
          value = fast_exp2(value - shift);
          total[half] += value;
        }
      }
    }
  }

  // --- The end of a piece -------------------------------------------------------------------------------------

  __device__ float* warp_out(int stage, int of_warp) const {
    return reinterpret_cast<float*>(shared + stage * kStageBytes + of_warp * kSliceBytes);
  }
  __device__ float* warp_states() const {
    return reinterpret_cast<float*>(shared + kStages * kStageBytes);
  }  // [kWarps][kRows][2]
  __device__ int32_t* flag() const { return reinterpret_cast<int32_t*>(warp_states() + kWarps * kRows * 2); }

  // Row r of a warp's output lies with its groups of 8 floats permuted, so that eight rows meet different banks.
  static __device__ int swizzled(int row, int dim) { return row * kPitchV + (dim ^ ((row & 7) << 3)); }

  __device__ void share_state(int stage) {
    float* to = warp_out(stage, warp);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + half * 8;
      float sum = total[half];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      if (lane % 4 == 0) {
        warp_states()[(warp * kRows + row) * 2] = peak[half];
        warp_states()[(warp * kRows + row) * 2 + 1] = sum;
      }
#pragma unroll
      for (int i = 0; i < kDimV / 8; ++i) {
        *reinterpret_cast<float2*>(to + swizzled(row, i * 8 + lane % 4 * 2)) =
            make_float2(out[i][half * 2], out[i][half * 2 + 1]);
      }
    }
  }

  __device__ float* partial_values(int32_t slot) const {
    return p.arena + static_cast<int64_t>(slot) * plan.header().tile_q * kDimV;
  }
  __device__ float* partial_lses(int32_t slot) const {
    return p.arena + static_cast<int64_t>(plan.header().num_workers) * 2 * plan.header().tile_q * kDimV +
           static_cast<int64_t>(slot) * plan.header().tile_q;
  }

  static __device__ void scale_quad(float4& quad, float factor) {
    quad.x *= factor;
    quad.y *= factor;
    quad.z *= factor;
    quad.w *= factor;
  }
  static __device__ void add_quad(float4& to, float weight, const float4& value) {
    to.x += weight * value.x;
    to.y += weight * value.y;
    to.z += weight * value.z;
    to.w += weight * value.w;
  }

  // What the warps' states of a row weigh, and the row's LSE.
  struct RowWeights {
    float of_warp[kWarps];
    float lse;
  };
  __device__ RowWeights weights_of(int row) const {
    const float* states = warp_states() + row * 2;
    RowWeights row_weights;
    float highest = ATTNLOOM_NEG_INF;
    if constexpr (Variant::kSoftmax) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) highest = fmaxf(highest, states[w * kRows * 2]);
    }
    const float shift = highest > ATTNLOOM_NEG_INF ? highest : 0.0f;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      row_weights.of_warp[w] = Variant::kSoftmax ? exp2f(states[w * kRows * 2] - shift) : 1.0f;
      sum += row_weights.of_warp[w] * states[w * kRows * 2 + 1];
    }
    float factor = p.v_scale;
    if constexpr (Variant::kSoftmax) factor = sum == 0.0f ? 0.0f : factor / sum;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) row_weights.of_warp[w] *= factor;
    row_weights.lse = sum == 0.0f ? ATTNLOOM_NEG_INF : (highest + log2f(sum)) * kLn2;
    return row_weights;
  }

  // Four dims of a finished row (or of its state, where states are asked for).
  __device__ void write_quad(const Work& work, int row, int quad, float4 value, float lse) const {
    const int32_t folded = work.row + row;
    const int32_t query = folded / group;
    const int32_t q_head = work.head * group + folded % group;
    const int64_t token = work.first_token + query;
    const int64_t at = token * p.out.stride_row + q_head * p.out.stride_head + quad * 4;
    if (p.unfinished) {
      *reinterpret_cast<float4*>(static_cast<float*>(p.out.data) + at) = value;
    } else {
      if constexpr (Variant::kHasSink) {
        const float sink = Variant::sink(hooks, work.request, work.first_position + query, q_head, work.head, query);
        const float highest = fmaxf(lse, sink);
        if (highest > ATTNLOOM_NEG_INF) {
          const float own = exp2f((lse - highest) * kLog2e);
          const float sum = own + exp2f((sink - highest) * kLog2e);
          scale_quad(value, own / sum);
          lse = highest + log2f(sum) * kLn2;
        }
      }
      uint2 bits;
      bits.x = Half<Scalar>::pack(value.x, value.y);
      bits.y = Half<Scalar>::pack(value.z, value.w);
      *reinterpret_cast<uint2*>(static_cast<Scalar*>(p.out.data) + at) = bits;
    }
    if (p.lse != nullptr && quad == 0) p.lse[token * plan.header().num_qo_heads + q_head] = lse;
  }

  __device__ void end_piece(int32_t worker, const Piece& piece, const Work& work, int stage) {
    share_state(stage);
    __syncthreads();
    const bool whole = piece.opens && piece.closes;
    const int32_t slot = partial_slot(worker, piece.opens);
    for (int index = threadIdx.x; index < work.rows * kRowQuads; index += kThreads) {
      const int row = index / kRowQuads;
      const int quad = index % kRowQuads;
      const RowWeights weights = weights_of(row);
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        add_quad(sum, weights.of_warp[w],
                 *reinterpret_cast<const float4*>(warp_out(stage, w) + swizzled(row, quad * 4)));
      }
      if (whole) {
        write_quad(work, row, quad, sum, weights.lse);
      } else {
        *reinterpret_cast<float4*>(partial_values(slot) + row * kDimV + quad * 4) = sum;
        if (quad == 0) partial_lses(slot)[row] = weights.lse;
      }
    }
    if (!whole) merge_if_last(worker, piece, work, stage);
    __syncthreads();  // the stage may be filled again
  }

  // The last worker to arrive merges the pieces, in the order of the workers.
  __device__ void merge_if_last(int32_t worker, const Piece& piece, const Work& work, int stage) {
    const int32_t stretch = worker / plan.header().lockstep;
    const int32_t opener = piece.opens ? stretch : plan.split_begin()[stretch];
    const int32_t count = plan.split_end()[opener] - opener + 1;
    __threadfence();
    __syncthreads();
    if (warp == 0) {
      int32_t pieces = 0;
      for (int32_t i = lane; i < count; i += 32) pieces += plan.has_work(opener + i);
      pieces = __reduce_add_sync(0xffffffff, pieces);
      if (lane == 0) {
        int32_t* arrivals = p.arrivals + plan.peer(worker, opener);
        const bool last = atomicAdd(arrivals, 1) + 1 == pieces;
        if (last) *arrivals = 0;  // ready for the next run
        *flag() = last;
      }
    }
    __syncthreads();
    if (!*flag()) return;
    __threadfence();
    merge_pieces(worker, opener, count, work, stage);
    __syncthreads();
  }

  static constexpr int kMergeRound = 64;  // pieces whose weights lie in shared memory at once
  static constexpr int kRowQuads = kDimV / 4;
  static constexpr int kPairs = (kRows * kRowQuads + kThreads - 1) / kThreads;  // (row, quad) pairs of a thread

  __device__ void merge_pieces(int32_t worker, int32_t opener, int32_t count, const Work& work, int stage) {
    float* weights = reinterpret_cast<float*>(shared + stage * kStageBytes);  // [kMergeRound][rows]
    float* factors = weights + kMergeRound * kRows;                           // [kRows]
    float* ends = factors + kRows;                                            // [kRows]: 1 / sum, then the LSE
    const int my_row = threadIdx.x / 8;                                       // eight threads keep the state of a row
    const int my_lane = threadIdx.x % 8;
    float highest = ATTNLOOM_NEG_INF;
    float sum = 0.0f;
    float4 merged[kPairs];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) merged[pair] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int32_t begin = 0; begin < count; begin += kMergeRound) {
      const int32_t pieces = min(kMergeRound, count - begin);
      for (int32_t index = threadIdx.x; index < pieces * work.rows; index += kThreads) {
        const int32_t other = opener + begin + index / work.rows;
        const float* lses = partial_lses(partial_slot(plan.peer(worker, other), other == opener));
        weights[index] = plan.has_work(other) ? __ldcg(lses + index % work.rows) : ATTNLOOM_NEG_INF;
      }
      __syncthreads();
      if (my_row < work.rows) {
        float next = highest;
        for (int i = my_lane; i < pieces; i += 8) next = fmaxf(next, weights[i * work.rows + my_row]);
        next = max_of_eight(next);
        const float shift = next > ATTNLOOM_NEG_INF ? next : 0.0f;
        const float factor = Variant::kSoftmax ? exp2f((highest - shift) * kLog2e) : 1.0f;
        float part = 0.0f;
        for (int i = my_lane; i < pieces; i += 8) {
          float& value = weights[i * work.rows + my_row];
          value = Variant::kSoftmax ? exp2f((value - shift) * kLog2e) : (value > ATTNLOOM_NEG_INF ? 1.0f : 0.0f);
          part += value;
        }
        sum = sum * factor + sum_of_eight(part);
        highest = next;
        if (my_lane == 0) factors[my_row] = factor;
      }
      __syncthreads();
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const int row = (threadIdx.x + pair * kThreads) / kRowQuads;
        const int quad = (threadIdx.x + pair * kThreads) % kRowQuads;
        if (row >= work.rows) continue;
        scale_quad(merged[pair], factors[row]);
#pragma unroll 8
        for (int i = 0; i < pieces; ++i) {
          const int32_t other = opener + begin + i;
          const float weight = weights[i * work.rows + row];
          const float4 value = __ldcg(reinterpret_cast<const float4*>(
              partial_values(partial_slot(plan.peer(worker, other), other == opener)) + row * kDimV + quad * 4));
          if (weight != 0.0f) add_quad(merged[pair], weight, value);  // an empty piece has left nothing
        }
      }
      __syncthreads();
    }
    if (my_row < work.rows && my_lane == 0) {
      ends[my_row] = Variant::kSoftmax ? (sum == 0.0f ? 0.0f : 1.0f / sum) : 1.0f;
      factors[my_row] = sum == 0.0f ? ATTNLOOM_NEG_INF : highest + log2f(sum) * kLn2;
    }
    __syncthreads();
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const int row = (threadIdx.x + pair * kThreads) / kRowQuads;
      const int quad = (threadIdx.x + pair * kThreads) % kRowQuads;
      if (row >= work.rows) continue;
      scale_quad(merged[pair], ends[row]);
      write_quad(work, row, quad, merged[pair], factors[row]);
    }
  }

  static __device__ float max_of_eight(float value) {
    const uint32_t lanes = 0xffu << (threadIdx.x % 32 / 8 * 8);
#pragma unroll
    for (int step = 1; step < 8; step *= 2) value = fmaxf(value, __shfl_xor_sync(lanes, value, step));
    return value;
  }
  static __device__ float sum_of_eight(float value) {
    const uint32_t lanes = 0xffu << (threadIdx.x % 32 / 8 * 8);
#pragma unroll
    for (int step = 1; step < 8; step *= 2) value += __shfl_xor_sync(lanes, value, step);
    return value;
  }

  __device__ void run(int32_t worker) {
    const int32_t stretch = worker / plan.header().lockstep;
    Coordinate at = plan.start(stretch);
    const Coordinate stop = plan.start(stretch + 1);
    if (!(at < stop)) return;
    begin_loading(at, stop);
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) load_next(stage);
    int consumed = kStages - 1;  // stage that was computed last: free until the next load
    while (at < stop) {
      const Piece piece = plan.piece_at(at, stop);
      Work work = work_of(piece);
      load_queries(work);
      reset();
      for (; work.tile < work.tile_end; ++work.tile) {
        wait_copies<kStages - 2>();
        __syncwarp();
        load_next(consumed);
        consumed = consumed + 1 == kStages ? 0 : consumed + 1;
        compute(work, consumed);
        __syncwarp();
      }
      end_piece(worker, piece, work, consumed);
      at = plan.after(piece);
    }
    wait_copies<0>();
  }
};

template <typename Scalar, int kDim, int kDimV, typename Variant, typename HookParams>
__global__ void __launch_bounds__(128, 2)
    decode_kernel(const __grid_constant__ AttentionParams params, const __grid_constant__ HookParams hooks) {
  extern __shared__ __align__(128) char shared[];
  Decode<Scalar, kDim, kDimV, Variant, HookParams> decode(params, hooks, shared);
  decode.run(blockIdx.x);
}

template <typename Scalar, int kDim, int kDimV, typename Variant, typename HookParams>
int32_t run_decode(const AttentionParams& params, int32_t num_workers, cudaStream_t stream) {
  using Kernel = Decode<Scalar, kDim, kDimV, Variant, HookParams>;
  const auto kernel = decode_kernel<Scalar, kDim, kDimV, Variant, HookParams>;
  static const cudaError_t ready =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::kSharedBytes);
  if (ready != cudaSuccess) return static_cast<int32_t>(ready);
  kernel<<<num_workers, Kernel::kThreads, Kernel::kSharedBytes, stream>>>(params, HookParams(params.hook_params));
  return static_cast<int32_t>(cudaGetLastError());
}

}  // namespace sm80
}  // namespace attnloom
