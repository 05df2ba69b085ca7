// One request as a kernel sees it: its row of the layout, with the true lengths and not the planned ones.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/params.h"

namespace attnloom {

struct Request {
  const LayoutTensors& layout;
  int32_t index;
  int32_t first_token;  // of its queries in q
  int32_t qo_len;
  int32_t kv_len;
  const int32_t* blocks;     // the entries of its row
  const int32_t* positions;  // likewise, or null
  int32_t end_position;      // one past the position of the last slot

  ATTNLOOM_HD Request(const LayoutTensors& layout, const int32_t* qo_indptr, int32_t request)
      : layout(layout),
        index(request),
        first_token(qo_indptr[request]),
        qo_len(qo_indptr[request + 1] - qo_indptr[request]),
        kv_len(layout.lengths[request]),
        blocks(layout.indices + layout.starts[request]),
        positions(layout.positions == nullptr ? nullptr : layout.positions + layout.starts[request]),
        end_position(kv_len > 0 ? position(kv_len - 1) + 1 : 0) {}

  ATTNLOOM_HD int32_t position(int32_t slot) const {
    if (positions == nullptr) return slot;
    const uint32_t block_size = static_cast<uint32_t>(layout.block_size);  // division by 64 bits is long on a GPU
    const int32_t block = static_cast<int32_t>(static_cast<uint32_t>(slot) / block_size);
    return positions[layout.entry_of(block)] + slot - block * static_cast<int32_t>(block_size);
  }

  // Causality aligns to the end: the last query is at the last position.
  ATTNLOOM_HD int32_t query_position(int32_t query) const { return end_position - qo_len + query; }
};

}  // namespace attnloom
