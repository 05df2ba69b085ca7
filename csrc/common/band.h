// The band of keys a query may see, and what it leaves of the KV of a query tile.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace attnloom {

// A query at position p sees the keys at positions [p - left, p + right]; -1 means unlimited.
// Causal is {-1, 0}; a causal window of w keys, the query's own included, is {w - 1, 0}.
struct Band {
  int32_t left;
  int32_t right;
};

struct Range {  // [begin, end), empty when end <= begin
  int32_t begin;
  int32_t end;
};

ATTNLOOM_HD int32_t clamp_to(int64_t value, int32_t low, int32_t high) {
  return static_cast<int32_t>(value < low ? low : (value > high ? high : value));
}

// Keys that the query at `position` may see among slots 0 .. kv_len - 1, slot j being at position j. In 32 bits, for a
// kernel asks it of every row: no sum is made that does not fit.
ATTNLOOM_HD Range visible_to(Band band, int32_t position, int32_t kv_len) {
  int32_t end = kv_len;
  const uint32_t after = static_cast<uint32_t>(kv_len) - 1u - static_cast<uint32_t>(position);  // keys, if any
  if (band.right >= 0 && position < kv_len && static_cast<uint32_t>(band.right) < after) {
    end = position + band.right + 1;
    end = end < 0 ? 0 : end;
  }
  int32_t begin = 0;
  if (band.left >= 0 && position > band.left) {
    begin = position - band.left;
    begin = begin < end ? begin : end;
  }
  return {begin, end};
}

// Union of what the queries at positions [first, last] may see: the band moves right with the position.
ATTNLOOM_HD Range visible_to_any(Band band, int32_t first, int32_t last, int32_t kv_len) {
  const int32_t end = visible_to(band, last, kv_len).end;
  const int32_t begin = visible_to(band, first, kv_len).begin;
  return {begin < end ? begin : end, end};
}

// What every query at positions [first, last] may see: no mask is needed inside.
ATTNLOOM_HD Range visible_to_all(Band band, int32_t first, int32_t last, int32_t kv_len) {
  return {visible_to(band, last, kv_len).begin, visible_to(band, first, kv_len).end};
}

// KV tiles that `range` touches. Tiles are aligned to slot 0, so that a key always meets the same
// neighbours whatever the query tile.
ATTNLOOM_HD Range kv_tiles_of(Range range, int32_t tile_kv) {
  if (range.end <= range.begin) return {0, 0};
  return {range.begin / tile_kv, (range.end + tile_kv - 1) / tile_kv};
}

}  // namespace attnloom
