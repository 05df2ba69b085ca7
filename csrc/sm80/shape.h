// What is fixed when a kernel of the family is compiled: types, head sizes, tiles, and where things lie in shared
// memory.
//
// A CTA of four warps is a worker. KV comes in tiles of 64 or 128 tokens, a slice for each warp to load. Query tiles
// are short (at most 16 folded rows: each warp computes its own slice for all rows) or tall (each warp computes all
// slices for its own rows).
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/params.h"
#include "sm80/element.h"

namespace attnloom {
namespace sm80 {

constexpr int kWorkBytes = 136;    // of a Work (work.h): 34 words, so that lanes that write one each meet other banks
constexpr int kLoaderBytes = 64;   // of a Loader::State (loader.h)
constexpr int kStretchBytes = 32;  // of a Stretch (cta.h)
constexpr int kSplitBytes = 12;    // of a Split (cta.h)

constexpr int round_up(int value, int to) { return (value + to - 1) / to * to; }
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int smaller(int a, int b) { return a < b ? a : b; }

// kTall: whether the kernel has tall query tiles besides short ones. Without, registers and shared memory leave room
// for more CTAs, and decode is as fast as loads are in flight.
//
// kAlike: the engine's batch_invariant mode. A row has the same bits beside any other rows, on any number of workers,
// and whether its request's queries come at once or one by one: every query tile is a tall one of 64 rows at most, so
// that a row takes one path through the arithmetic, and items are folds of chunks (chunks.h).
template <typename Scalar_, typename Kv_, int kDim_, int kDimV_, int kTileKv_, typename Variant_, typename HookParams_,
          bool kTall_, bool kLittleShared, bool kAlike_>
struct Shape {
  using Scalar = Scalar_;  // of q and the output, and of what the tensor cores multiply
  using Kv = Kv_;          // of the caches
  using Variant = Variant_;
  using HookParams = HookParams_;
  // A hook's results replace the rows it was given, as Scalar.
  using Key = std::conditional_t<Variant::kHasKeyTransform, Scalar, Kv>;
  using Value = std::conditional_t<Variant::kHasValueTransform, Scalar, Kv>;

  static constexpr int kDim = kDim_;
  static constexpr int kDimV = kDimV_;
  static_assert(kDim % 16 == 0 && kDimV % 16 == 0, "a step of the tensor cores takes 16 dims");

  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kTileKv = kTileKv_;
  static constexpr int kSlice = kTileKv / kWarps;
  static constexpr int kGroups = kSlice / 16;  // of 16 tokens, a step of the tensor cores
  static_assert(kSlice == 16 || kSlice == 32, "a lane for each token of a slice");
  // One CTA to a multiprocessor, and tall tiles of 64 rows.
  static constexpr bool kWide = kDim > 128 || kDimV > 128 || kLittleShared;
  static constexpr bool kTall = kTall_;
  static constexpr bool kAlike = kAlike_;

  // Rows of the query tiles. Two fragments of 16 rows a warp use what is read of a KV tile twice; wide heads leave
  // registers for one.
  static constexpr int kShortRows = 16;
  static constexpr int kFragments = kWide || kAlike ? 1 : 2;
  static constexpr int kTallRows = kWarps * 16 * kFragments;
  static constexpr bool kQueriesInRegisters = !kWide;  // of the short tile

  // Rows in shared memory are whole groups of 8 chunks of 16 bytes, over which the swizzle permutes.
  static constexpr int kPitchQ = round_up(kDim * 2, 128);
  static constexpr int kPitchK = round_up(kDim * static_cast<int>(sizeof(Key)), 128);
  static constexpr int kPitchV = round_up(kDimV * static_cast<int>(sizeof(Value)), 128);
  static constexpr int kPitchOut = round_up(kDimV, 64);             // floats
  static constexpr int kSliceBytes = kSlice * (kPitchK + kPitchV);  // keys, then values
  static constexpr int kStageBytes = kWarps * kSliceBytes;
  // Small stages leave room for so many CTAs that two stages of each are enough on their way.
  static constexpr int kShortStages = kLittleShared || kAlike || kStageBytes <= (16 << 10) ? 2 : 3;
  static constexpr int kTallStages = 2;
  // At the end of a piece each warp has its slice of a stage for rows of the output, as float32: as many as fit.
  static constexpr int kOutputRows = 16 * kPitchOut * 4 <= kSliceBytes ? 16 : 8;
  static_assert(kOutputRows * kPitchOut * 4 <= kSliceBytes, "8-bit slices hold 8 rows");

  // The table of pieces: of two batches, one is computed and the other is made.
  static constexpr int kBatch = 16;
  static constexpr int kTable = 2 * kBatch;

  // Shared memory: the stages, with the tall tile's queries behind its own; then small things.
  static constexpr int kTallQueriesAt = kTallStages * kStageBytes;
  static constexpr int kShortQueriesAt = kShortStages * kStageBytes;
  static constexpr int kPositionsAt = larger(kShortQueriesAt + (kQueriesInRegisters ? 0 : kShortRows * kPitchQ),
                                             kTall ? kTallQueriesAt + kTallRows * kPitchQ : 0);
  static constexpr int kStatesAt = kPositionsAt + kShortStages * kTileKv * 4;
  static constexpr int kPagesAt = kStatesAt + kWarps * 16 * 2 * 4;
  static constexpr int kTotalsAt = kPagesAt + 2 * (kShortStages - 1) * kTileKv * 4;
  static constexpr int kFlagAt = kTotalsAt + (kTall ? kThreads * kFragments * 8 : 0);
  static constexpr int kStretchAt = kFlagAt + 16;
  static constexpr int kParamsAt = kStretchAt + kStretchBytes;
  static constexpr int kHooksAt = kParamsAt + round_up(sizeof(AttentionParams), 8);
  static constexpr int kSplitsAt = round_up(kHooksAt + 8, 16);
  static constexpr int kWorksAt = kSplitsAt + round_up(2 * kSplitBytes, 16);
  static constexpr int kSeenAt = kWorksAt + kTable * kWorkBytes;
  static constexpr int kLoadersAt = kSeenAt + (kTall ? kWarps * 16 : 0);
  static constexpr int kSharedBytes = kLoadersAt + kWarps * kLoaderBytes;

  // CTAs that share a multiprocessor of Hopper, as shared memory (227 KB and 1 KB of each CTA's) and registers allow.
  static constexpr int kMostCtas = (kTall && !kAlike) || kDim > 128 ? 2 : (kDim > 64 || kAlike ? 3 : 4);
  static constexpr int kCtasPerSm = smaller(kMostCtas, (228 << 10) / (kSharedBytes + (1 << 10)));
  static_assert(kCtasPerSm > 0, "a CTA fits");
};

}  // namespace sm80
}  // namespace attnloom
