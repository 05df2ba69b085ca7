// The structs that cross from Python into a module. core/abi.py mirrors them field by field; a module tells its
// sizes when it is loaded, so that a mismatch is an error and not a wrong read.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/visible.h"

namespace attnloom {

// Every struct of a launch ends with the CUDA stream that it is put on; null where the module runs on a CPU.

// Strides are in elements.
struct QueryTensor {  // [rows, num_qo_heads, head_dim]
  const void* data;
  int64_t stride_row;
  int64_t stride_head;
};

struct CacheTensor {  // [num_blocks, block_size, num_kv_heads, head_dim]
  const void* data;
  int64_t stride_block;
  int64_t stride_slot;
  int64_t stride_head;
  // Where a token lies, without 64 bits: (block * units_block + slot in it * units_slot) * unit bytes, for a GPU.
  uint32_t unit;
  uint32_t units_block;
  uint32_t units_slot;
  uint32_t slot_bytes;  // from a slot to the next, if blocks are whole slices of 16 slots; else 0
};

struct OutputTensor {  // [rows, num_qo_heads, head_dim_v]
  void* data;
  int64_t stride_row;
  int64_t stride_head;
};

// core/layout.py: BlockSparseLayout
struct LayoutTensors {
  const int64_t* starts;     // [num_rows]
  const int32_t* lengths;    // [num_rows]
  const int32_t* indices;    // flat
  const int32_t* positions;  // flat, indexed like `indices`; null: block i of a row is at i * block_size
  int64_t block_size;
  int64_t index_stride;  // entries from one block of a row to the next; fits into 32 bits

  // Which entry behind a row's first is that of its block `block`.
  ATTNLOOM_HD int64_t entry_of(int32_t block) const {
    return static_cast<int64_t>(block) * static_cast<int32_t>(index_stride);
  }
};

// Division by a number known at run time: n / d = n * inverse >> shift for 0 <= n < 2^31 (Granlund and Montgomery, PLDI
// 1994), two instructions instead of twenty.
struct Divisor {
  uint32_t inverse;
  uint32_t shift;

  ATTNLOOM_HD int32_t divide(int32_t n) const {
    return static_cast<int32_t>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * inverse >> shift);
  }
};

struct AttentionParams {
  QueryTensor q;
  CacheTensor k;
  CacheTensor v;
  OutputTensor out;  // float32 where `unfinished`, else the engine's dtype
  float* lse;        // [rows, num_qo_heads], or null
  LayoutTensors layout;
  BlockMask block_mask;
  const int32_t* plan;          // planner/plan.h
  float* arena;                 // partial states (core/arena.py says how many floats)
  int32_t* arrivals;            // [workers], zero before and after
  const uint64_t* hook_params;  // the variant's declared parameters (common/hooks.h)
  float sm_scale;
  float k_scale;
  float v_scale;
  int32_t unfinished;  // write the state (O, LSE) instead of the finished row
  int32_t num_threads;
  int32_t num_workers;  // of the plan
  int32_t tile_q;       // of the plan
  // For a GPU, where every thread would compute them.
  Divisor by_block_size;  // of the layout
  Divisor by_group;
  Divisor by_line_heads;
  int32_t group;       // query heads of a kv head
  int32_t line_heads;  // heads of the plan's line: kv heads / lockstep
  int32_t lockstep;    // of the plan
  // For the launch itself: whether a token lies alike in both caches, `values_behind_keys` bytes apart, and slots have
  // no positions of their own.
  int64_t values_behind_keys;
  int32_t caches_alike;
  void* stream;
};

// Finishes rows whose states were merged elsewhere: the sink and output_transform.
struct FinishParams {
  const float* state_out;  // [rows, num_qo_heads, head_dim_v], contiguous
  const float* state_lse;  // [rows, num_qo_heads], contiguous; may be null without softmax
  OutputTensor out;
  float* lse;  // [rows, num_qo_heads], or null
  LayoutTensors layout;
  const int32_t* plan;
  const uint64_t* hook_params;
  int32_t num_threads;
  int32_t total_q;  // rows of the states: what a GPU needs for its grid
  void* stream;
};

struct MergeParams {  // contiguous; out may not alias the states
  const float* outs;  // [num_states, rows, head_dim_v]
  const float* lses;  // [num_states, rows], or null: states without softmax add
  float* out;         // [rows, head_dim_v]
  float* lse;         // [rows], or null with lses
  int64_t num_states;
  int64_t rows;
  int64_t head_dim_v;
  int32_t num_threads;
  void* stream;
};

// What keys and values are converted from and to on their way into a cache.
enum ElementType : int32_t { kSameElement = 0, kBf16Element = 1, kFp16Element = 2, kE4m3Element = 3, kE5m2Element = 4 };

struct AppendParams {  // strides in bytes; caches as CacheTensor
  const char* k;
  const char* v;
  char* k_cache;
  char* v_cache;
  const int64_t* slots;  // [num_tokens], -1 skips
  int64_t num_tokens;
  int64_t num_kv_heads;
  int64_t block_size;
  int64_t k_row_bytes;
  int64_t v_row_bytes;
  int64_t k_stride_token, k_stride_head;
  int64_t v_stride_token, v_stride_head;
  int64_t k_cache_stride_block, k_cache_stride_slot, k_cache_stride_head;
  int64_t v_cache_stride_block, v_cache_stride_slot, v_cache_stride_head;
  int32_t from;  // ElementType; kSameElement: bytes are copied
  int32_t to;
  float k_scale;  // a converted element is divided by it
  float v_scale;
  int32_t num_threads;
  void* stream;
};

struct PlanParams {
  const int32_t* qo_indptr;  // [num_requests + 1]
  const int32_t* kv_lens;    // [num_requests]
  int32_t* plan;             // plan_words(...) words
  int32_t cost_item;         // planner/scan.h: CostModel
  int32_t cost_item_row;
  int32_t cost_kv_tile;
  int32_t cost_row;
  void* visible;                // planner/scan.h: VisibleHook, or null
  const uint64_t* hook_params;  // of the variant, where it declares a visible range
  BlockMask block_mask;
  int64_t* prefix;  // on a GPU: tile_capacity + 1 words of scratch
  void* stream;
};

// Fills a part of a block mask from a variant's logits_mask, evaluated at every position: query blocks
// [q_begin, q_end), key blocks [0, kv_end).
struct BlockMaskParams {
  const uint64_t* hook_params;
  uint8_t* kinds;  // [num_requests, q_blocks, kv_blocks]
  int64_t num_requests;
  int32_t q_blocks;
  int32_t kv_blocks;
  int32_t q_begin;
  int32_t q_end;
  int32_t kv_end;
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t length;  // positions from here on are not evaluated
  int32_t num_threads;
  void* stream;
};

}  // namespace attnloom
