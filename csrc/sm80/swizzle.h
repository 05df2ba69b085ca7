// Where rows of keys, values, queries and outputs lie in shared memory.
#pragma once

#include <cstdint>

namespace attnloom {
namespace sm80 {

// Rows in shared memory are whole groups of 8 chunks of 16 bytes; chunk c of row r lies at place c ^ (r % 8) of its
// group, so that ldmatrix finds eight rows in different banks.
__device__ __forceinline__ uint32_t chunk_address(uint32_t rows, uint32_t row, uint32_t pitch, uint32_t chunk) {
  return rows + row * pitch + ((chunk ^ (row & 7)) * 16);
}
// From the address of chunk 0 or 1, that of the chunk `pair` pairs on: one instruction, and no register kept.
__device__ __forceinline__ uint32_t chunk_of_pair(uint32_t first, int pair) {
  return (first ^ (pair % 4 * 32)) + pair / 4 * 128;
}

}  // namespace sm80
}  // namespace attnloom
