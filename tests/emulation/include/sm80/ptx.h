// Stands in for csrc/sm80/ptx.h: its instructions as the PTX ISA describes them, for fibres. Fragments of ldmatrix and
// mma: "Warp-level matrix load instruction: ldmatrix" and "Matrix Fragments for mma.m16n8k16 with floating point type".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

namespace attnloom {
namespace sm80 {

extern char shared_memory[];

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - shared_memory);
}
inline char* in_shared(uint32_t address, uint32_t bytes, const char* instruction) {
  if (address % bytes != 0) emulation::fail("%s at %u: not a multiple of %u", instruction, address, bytes);
  if (address > emulation::shared_bytes() - bytes) {
    emulation::fail("%s at %u: outside of %u bytes of shared memory", instruction, address, emulation::shared_bytes());
  }
  return shared_memory + address;
}

// An asynchronous copy lands anywhere between its start and the wait for its group: here some at once, and the others,
// which read their source then, at the wait.
struct Copy {
  char* to;
  const char* from;  // null: zeros
  uint32_t bytes;

  void land() const {
    if (from == nullptr) {
      std::memset(to, 0, bytes);
    } else {
      std::memcpy(to, from, bytes);
    }
  }
};
struct Copies {
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};
inline Copies& copies_of_thread() {
  static std::unordered_map<uint32_t, Copies> copies;
  return copies[emulation::fibre()];
}
inline void start_copy(uint32_t to, const void* from, uint32_t bytes) {
  const Copy copy{in_shared(to, bytes, "cp.async"), static_cast<const char*>(from), bytes};
  if (from != nullptr) {
    if (reinterpret_cast<uintptr_t>(from) % bytes != 0) emulation::fail("cp.async from %p: not aligned", from);
    if (!emulation::readable(from, bytes)) emulation::fail("cp.async from %p: outside of the tensors", from);
  }
  if (emulation::random(4) == 0) {
    copy.land();
  } else {
    copies_of_thread().open.push_back(copy);
  }
}
inline void copy_async(uint32_t to, const void* from, bool valid) { start_copy(to, valid ? from : nullptr, 16); }
inline void copy_async(uint32_t to, const void* from) { start_copy(to, from, 16); }
constexpr uint32_t kNowhere = 0xffffffff;
inline void copy_async(uint32_t to, const char* base, uint32_t offset, uint32_t unit) {
  start_copy(to, offset == kNowhere ? nullptr : base + static_cast<uint64_t>(offset) * unit, 16);
}
inline void copy_word(uint32_t to, const void* from) { start_copy(to, from, 4); }
inline void commit_copies() {
  Copies& copies = copies_of_thread();
  copies.groups.push_back(std::move(copies.open));
  copies.open.clear();
}
template <int kPending>
void wait_copies() {
  Copies& copies = copies_of_thread();
  while (copies.groups.size() > kPending) {
    for (const Copy& copy : copies.groups.front()) copy.land();
    copies.groups.pop_front();
  }
}

inline int32_t arrive(int32_t* arrivals) { return atomicAdd(arrivals, 1); }

// Lane l holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of each matrix.
inline void load_matrices(uint32_t (&to)[4], uint32_t address) {
  const emulation::Given& rows = emulation::meet(0xffffffff, "ldmatrix", {address});
  const uint32_t lane = emulation::thread() % 32;
  for (uint32_t m = 0; m < 4; ++m) {
    std::memcpy(&to[m], in_shared(rows.of_lane[m * 8 + lane / 4][0], 16, "ldmatrix") + lane % 4 * 4, 4);
  }
}
// The same of the transposed matrices: rows 2 (l % 4) and 2 (l % 4) + 1, column l / 4.
inline void load_matrices_transposed(uint32_t (&to)[4], uint32_t address) {
  const emulation::Given& rows = emulation::meet(0xffffffff, "ldmatrix.trans", {address});
  const uint32_t lane = emulation::thread() % 32;
  for (uint32_t m = 0; m < 4; ++m) {
    uint16_t pair[2];
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t row = rows.of_lane[m * 8 + lane % 4 * 2 + i][0];
      std::memcpy(&pair[i], in_shared(row, 16, "ldmatrix.trans") + lane / 4 * 2, 2);
    }
    std::memcpy(&to[m], pair, 4);
  }
}

// Of a pair of elements in a register.
inline float2 as_floats(__nv_bfloat162, uint32_t bits) {
  return {__int_as_float(static_cast<int32_t>(bits << 16)), __int_as_float(static_cast<int32_t>(bits & 0xffff0000))};
}
inline float2 as_floats(__half2, uint32_t bits) {
  __half2 pair;
  std::memcpy(&pair, &bits, 4);
  return __half22float2(pair);
}

// c[16x8] += a[16x16] b[16x8]. With g = lane / 4 and t = lane % 4, register i of a holds columns 2t + 8 (i / 2) and one
// more of row g + 8 (i % 2); register i of b rows 2t + 8i and one more of column g; element i of c is column
// 2t + i % 2 of row g + 8 (i / 2). Products are exact and summed in double: tensor cores round at the end as well, only
// not always to nearest.
template <typename Pair>
void multiply(const char* instruction, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const emulation::Given& given = emulation::meet(0xffffffff, instruction, {a[0], a[1], a[2], a[3], b0, b1});
  const uint32_t lane = emulation::thread() % 32;
  double sum[4] = {c[0], c[1], c[2], c[3]};
  for (uint32_t half = 0; half < 2; ++half) {  // of the 16 that are summed over
    for (uint32_t t = 0; t < 4; ++t) {
      for (uint32_t column = 0; column < 2; ++column) {
        const float2 right = as_floats(Pair(), given.of_lane[(lane % 4 * 2 + column) * 4 + t][4 + half]);
        for (uint32_t row = 0; row < 2; ++row) {
          const float2 left = as_floats(Pair(), given.of_lane[lane / 4 * 4 + t][row + 2 * half]);
          sum[row * 2 + column] += static_cast<double>(left.x) * right.x + static_cast<double>(left.y) * right.y;
        }
      }
    }
  }
  for (int i = 0; i < 4; ++i) c[i] = static_cast<float>(sum[i]);
}
inline void multiply_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply<__nv_bfloat162>("mma of bf16", c, a, b0, b1);
}
inline void multiply_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply<__half2>("mma of f16", c, a, b0, b1);
}

inline int32_t anew(int64_t value) { return static_cast<int32_t>(value); }
template <typename T>
T* anew(T* pointer) {
  return pointer;
}
inline uint32_t thread_anew() { return emulation::thread(); }

inline int32_t load_shared(uint32_t address) {
  int32_t value;
  std::memcpy(&value, in_shared(address, 4, "ld.shared"), 4);
  return value;
}
inline const char* multiply_add(int32_t a, int32_t b, const void* base) {
  return static_cast<const char*>(base) + static_cast<int64_t>(a) * b;
}
inline const char* multiply_add(uint32_t a, uint32_t b, const void* base) {
  return static_cast<const char*>(base) + static_cast<uint64_t>(a) * b;
}
inline float fast_log2(float x) { return std::log2(x); }
inline float fast_exp2(float x) { return std::exp2(x); }

}  // namespace sm80
}  // namespace attnloom
