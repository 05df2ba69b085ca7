// Stands in for CUDA's header: what csrc uses of the language and of its functions on a device (CUDA C++ Programming
// Guide), for fibres.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "fibres.h"

#define __host__
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct dim3 {
  uint32_t x, y, z;
  dim3(uint32_t x, uint32_t y = 1, uint32_t z = 1) : x(x), y(y), z(z) {}
};
#define threadIdx (emulation::Place{emulation::thread(), 0, 0})
#define blockIdx (emulation::block())
#define blockDim (emulation::Place{emulation::threads(), 1, 1})
#define gridDim (emulation::grid())

// Where threads meet.
inline void __syncwarp() { emulation::meet(0xffffffff, "__syncwarp"); }
inline void __syncthreads() { emulation::meet_all("__syncthreads"); }
inline int __syncthreads_or(bool given) { return emulation::meet_all("__syncthreads_or", given) > 0; }
inline int __syncthreads_and(bool given) {
  return emulation::meet_all("__syncthreads_and", given) == emulation::threads();
}

template <typename T>
T __shfl_sync(uint32_t lanes, T value, int from) {
  static_assert(sizeof(T) == 4);
  uint32_t word;
  std::memcpy(&word, &value, 4);
  const emulation::Given& given = emulation::meet(lanes, "__shfl_sync", {word});
  if ((lanes >> (from & 31) & 1) == 0) emulation::fail("__shfl_sync of lanes %08x from lane %d", lanes, from & 31);
  std::memcpy(&value, given.of_lane[from & 31], 4);
  return value;
}
template <typename T>
T __shfl_xor_sync(uint32_t lanes, T value, int by) {
  return __shfl_sync(lanes, value, (emulation::thread() % 32) ^ by);
}
template <typename T>
T __shfl_up_sync(uint32_t lanes, T value, uint32_t by) {
  static_assert(sizeof(T) == 8);
  uint32_t words[2];
  std::memcpy(words, &value, 8);
  const emulation::Given& given = emulation::meet(lanes, "__shfl_up_sync", {words[0], words[1]});
  const uint32_t lane = emulation::thread() % 32;
  if (lane < by) return value;
  if ((lanes >> (lane - by) & 1) == 0) emulation::fail("__shfl_up_sync of lanes %08x from lane %u", lanes, lane - by);
  std::memcpy(&value, given.of_lane[lane - by], 8);
  return value;
}
inline uint32_t __ballot_sync(uint32_t lanes, bool value) {
  const emulation::Given& given = emulation::meet(lanes, "__ballot_sync", {value});
  uint32_t all = 0;
  for (uint32_t lane = 0; lane < 32; ++lane) all |= (lanes >> lane & given.of_lane[lane][0] & 1) << lane;
  return all;
}
inline bool __any_sync(uint32_t lanes, bool value) { return __ballot_sync(lanes, value) != 0; }
inline bool __all_sync(uint32_t lanes, bool value) { return __ballot_sync(lanes, value) == lanes; }
inline int32_t __reduce_add_sync(uint32_t lanes, int32_t value) {
  const emulation::Given& given = emulation::meet(lanes, "__reduce_add_sync", {static_cast<uint32_t>(value)});
  uint32_t sum = 0;
  for (uint32_t lane = 0; lane < 32; ++lane) sum += lanes >> lane & 1 ? given.of_lane[lane][0] : 0;
  return static_cast<int32_t>(sum);
}

// Memory. Fibres run one at a time and see each other's writes at once: a missing fence shows nowhere.
inline void __threadfence() {}
inline int32_t atomicAdd(int32_t* to, int32_t value) {
  const int32_t before = *to;
  *to += value;
  emulation::pause();  // others see it before this thread goes on
  return before;
}
inline int32_t atomicMax(int32_t* to, int32_t value) {
  const int32_t before = *to;
  *to = before < value ? value : before;
  emulation::pause();
  return before;
}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
void __stcg(T* to, T value) {
  *to = value;
}

// Arithmetic.
inline int __popc(uint32_t value) { return __builtin_popcount(value); }
inline int __ffs(uint32_t value) { return __builtin_ffs(static_cast<int>(value)); }
inline float __int_as_float(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline int32_t __float_as_int(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
// Byte i of the result is that of the eight of b and a which digit i of `which` names (without its sign mode).
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t which) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(bytes >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
  }
  return result;
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

// The host's part.
using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0;
constexpr cudaError_t cudaErrorInvalidValue = 1;
constexpr int cudaFuncAttributeMaxDynamicSharedMemorySize = 0;
struct cudaFuncAttributes {};
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, int, int) {
  return cudaSuccess;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return cudaSuccess; }
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* ctas, Kernel*, int, int) {
  *ctas = 1;
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
