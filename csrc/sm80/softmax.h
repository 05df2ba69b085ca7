// Scores to weights, in registers: scale, hooks, masks and the online softmax of 16 rows over part of a KV tile.
#pragma once

#include <cstdint>

#include "common/band.h"
#include "common/visible.h"
#include "sm80/ptx.h"
#include "sm80/work.h"

namespace attnloom {
namespace sm80 {

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;
#define ATTNLOOM_NEG_INF (__int_as_float(0xff800000))

// The state of 16 rows as the tensor cores lay it out: a lane has rows lane / 4 and lane / 4 + 8.
template <typename S>
struct Rows {
  float out[S::kDimV / 8][4];
  float peak[2];   // reference of the two rows, in units of log2
  float total[2];  // this lane's part of the sum

  __device__ void reset() {
#pragma unroll
    for (int i = 0; i < S::kDimV / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[i][j] = 0.0f;
    }
    peak[0] = peak[1] = ATTNLOOM_NEG_INF;
    total[0] = total[1] = 0.0f;
  }

  // Makes the state one that a fold takes: whole sums in every lane; and -0 becomes 0, since weights of 0 times values,
  // which only other rows see, may have either sign.
  __device__ void settle() {
    total[0] = sum(0);
    total[1] = sum(1);
#pragma unroll
    for (int i = 0; i < S::kDimV / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[i][j] = __fadd_rn(out[i][j], 0.0f);
    }
  }

  // The sum of row `half`, whole in every lane.
  __device__ float sum(int half) const {
    float value = total[half];
    value += __shfl_xor_sync(0xffffffff, value, 1);
    return value + __shfl_xor_sync(0xffffffff, value, 2);
  }
};

// Columns of a fragment of scores: kCount groups of 8 slots from `first`.
template <int kCount>
struct Columns {
  int32_t first;
  uint32_t positions;  // where those of the slots from `first` on lie in shared memory, if the layout has positions

  __device__ bool inside(Range slots) const { return first >= slots.begin && first + 8 * kCount <= slots.end; }
  template <typename S>
  __device__ __forceinline__ int32_t position(const Cta<S>& cta, int offset, int32_t slot) const {
    return cta.p.layout.positions != nullptr ? load_shared(positions + offset * 4) : slot;
  }
};

template <typename S, int kFragments, int kCount>
struct Softmax {
  using Variant = typename S::Variant;
  using Scores = float[kFragments][kCount][4];
  using Fragments = Rows<S>[kFragments];
  static constexpr bool kPlain = !Variant::kHasLogitsTransform && Variant::kSoftmax;

  // In place. `row` is the first row of the fragments in the query tile; `free`: all columns are inside the band of
  // every row; `full`: logits_mask need not be asked.
  static __device__ __forceinline__ void weigh(const Cta<S>& cta, const Work<S>& work, int row, Columns<kCount> columns,
                                               bool free, bool full, Scores& scores, Fragments& rows) {
    float scale = cta.p.sm_scale * (Variant::kHasKeyTransform ? 1.0f : cta.p.k_scale);
    if constexpr (kPlain) {
      // The exponential's multiplication scales. It takes the largest score for the reference, so the factor is made
      // positive; under a factor of 0 all scores are equal.
      if (scale < 0.0f) multiply(scores, -1.0f);
      scale = fmaxf(fabsf(scale) * kLog2e, 1e-37f);
    } else {
      multiply(scores, scale);
      scale = Variant::kSoftmax ? 1.0f : scale;
    }
    if constexpr (!kPlain || Variant::kHasLogitsMask) {
      call_hooks(cta, work, row, columns, full || columns.inside(work.mask_free), scores);
    }
    if (!free) mask(cta, work, row, columns, scores);
    if constexpr (Variant::kSoftmax) normalise(scale, scores, rows);
  }

 private:
  static __device__ __forceinline__ void multiply(Scores& scores, float factor) {
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][n][i] *= factor;
      }
    }
  }

  static __device__ __forceinline__ void call_hooks(const Cta<S>& cta, const Work<S>& work, int row,
                                                    Columns<kCount> columns, bool full, Scores& scores) {
#pragma unroll
    for (int m = 0; m < 2 * kFragments; ++m) {
      const uint32_t lane = cta.lane();
      const int index = row + lane / 4 + m * 8;
      const Folded folded = work.folded(cta, index);
      const int32_t q_pos = work.first_position + folded.query;
      const int32_t q_head = work.head * cta.p.group + folded.head;
      if (index >= work.rows) continue;
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& value = scores[m / 2][n][m % 2 * 2 + i];
          // A column outside the request repeats one inside: hooks meet no index of another request.
          const int offset = n * 8 + lane % 4 * 2 + i;
          const int32_t kv = max(min(columns.first + offset, work.any.end - 1), work.any.begin);
          const int32_t kv_pos = columns.position(cta, offset, kv);
          if constexpr (Variant::kHasLogitsTransform) {
            value = Variant::logits_transform(cta.hooks, value, work.request, q_pos, kv_pos, q_head, work.head,
                                              folded.query, kv) *
                    (Variant::kSoftmax ? kLog2e : 1.0f);
          }
          if constexpr (Variant::kHasLogitsMask) {
            const bool keep = full || Variant::logits_mask(cta.hooks, work.request, q_pos, kv_pos, q_head, work.head,
                                                           folded.query, kv);
            value = keep ? value : kDropped;
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void mask(const Cta<S>& cta, const Work<S>& work, int row, Columns<kCount> columns,
                                              Scores& scores) {
    const PlanHeader& header = cta.plan().header();
    const Band band = header.band;
    const uint32_t lane = cta.lane();
    if (header.trimmed) {  // slots are at their own positions
#pragma unroll
      for (int m = 0; m < 2 * kFragments; ++m) {
        const int32_t q_pos = work.first_position + work.folded(cta, row + lane / 4 + m * 8).query;
        Range seen = intersect(visible_to(band, q_pos, work.kv_len), work.any);
        seen.begin -= columns.first + lane % 4 * 2;
        seen.end -= columns.first + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kCount; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& value = scores[m / 2][n][m % 2 * 2 + i];
            value = n * 8 + i >= seen.begin && n * 8 + i < seen.end ? value : kDropped;
          }
        }
      }
      return;
    }
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int offset = n * 8 + lane % 4 * 2 + i;
        const int32_t slot = columns.first + offset;
        const int32_t kv_pos = columns.position(cta, offset, slot);
#pragma unroll
        for (int m = 0; m < 2 * kFragments; ++m) {
          const int32_t q_pos = work.first_position + work.folded(cta, row + lane / 4 + m * 8).query;
          const bool keep = slot < work.kv_len && (band.right < 0 || kv_pos - q_pos <= band.right) &&
                            (band.left < 0 || q_pos - kv_pos <= band.left);
          float& value = scores[m / 2][n][m % 2 * 2 + i];
          value = keep ? value : kDropped;
        }
      }
    }
  }

  // Scores times `scale` (positive) are in units of log2.
  static __device__ __forceinline__ void normalise(float scale, Scores& scores, Fragments& rows) {
    // The reference follows the largest score only when a score passes it by 2^8: the weights stay far from overflow, a
    // rescaling of the output becomes rare (as FlashAttention-4 does), and no lane need ask the others of its row.
    float peak[kFragments][2];
    bool passed = false;
    // kAlike: whether a score of the row itself passes its reference, for what other rows do must not reach it.
    [[maybe_unused]] bool row_passed[2 * kFragments];
#pragma unroll
    for (int m = 0; m < 2 * kFragments; ++m) {
      float& highest = peak[m / 2][m % 2];
      const float (&score)[kCount][4] = scores[m / 2];
      highest = fmaxf(score[0][m % 2 * 2], score[0][m % 2 * 2 + 1]);
#pragma unroll
      for (int n = 1; n < kCount; ++n) highest = fmaxf(highest, fmaxf(score[n][m % 2 * 2], score[n][m % 2 * 2 + 1]));
      highest *= scale;
      const bool passes = highest > rows[m / 2].peak[m % 2] + 8.0f;
      passed |= passes;
      if constexpr (S::kAlike) {
        row_passed[m] = (__ballot_sync(0xffffffff, passes) >> (thread_anew() % 32 & ~3u) & 15u) != 0;
      }
    }
    if (__any_sync(0xffffffff, passed)) {
#pragma unroll
      for (int m = 0; m < 2 * kFragments; ++m) {
        Rows<S>& of = rows[m / 2];
        float next = peak[m / 2][m % 2];
        next = fmaxf(next, __shfl_xor_sync(0xffffffff, next, 1));
        next = fmaxf(next, __shfl_xor_sync(0xffffffff, next, 2));
        next = fmaxf(next, of.peak[m % 2]);
        if constexpr (S::kAlike) next = row_passed[m] ? next : of.peak[m % 2];  // a factor of 1, or of 0 for zeros
        const float factor = fast_exp2(of.peak[m % 2] - (next > ATTNLOOM_NEG_INF ? next : 0.0f));
        of.total[m % 2] *= factor;
#pragma unroll
        for (int i = 0; i < S::kDimV / 8; ++i) {
          of.out[i][m % 2 * 2] *= factor;
          of.out[i][m % 2 * 2 + 1] *= factor;
        }
        of.peak[m % 2] = next;
      }
    }
#pragma unroll
    for (int m = 0; m < 2 * kFragments; ++m) {
      Rows<S>& of = rows[m / 2];
      const float shift = of.peak[m % 2] > ATTNLOOM_NEG_INF ? of.peak[m % 2] : 0.0f;
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& value = scores[m / 2][n][m % 2 * 2 + i];
          value = fast_exp2(fmaf(value, scale, -shift));
          of.total[m % 2] += value;
        }
      }
    }
  }

  static constexpr float kDropped = Variant::kSoftmax ? -__builtin_huge_valf() : 0.0f;
};

}  // namespace sm80
}  // namespace attnloom
