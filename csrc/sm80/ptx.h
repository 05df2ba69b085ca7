// The instructions of Ampere that the family is made of (PTX ISA: cp.async, ldmatrix, mma), and nothing else:
// tests/emulation stands in for this header where there is no GPU.
#pragma once

#include <cstdint>

namespace attnloom {
namespace sm80 {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes to shared memory.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(valid ? 16 : 0));
}
__device__ __forceinline__ void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n" ::"r"(to), "l"(from));
}
// The same from `offset` units behind `base`; zeros where the offset is kNowhere, and nothing is read then.
constexpr uint32_t kNowhere = 0xffffffff;
__device__ __forceinline__ void copy_async(uint32_t to, const char* base, uint32_t offset, uint32_t unit) {
  asm volatile(
      "{\n"
      ".reg .pred nowhere;\n"
      ".reg .u64 from;\n"
      "setp.eq.u32 nowhere, %2, 0xffffffff;\n"
      "mad.wide.u32 from, %2, %3, %1;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [from], 16, nowhere;\n"
      "}\n" ::"r"(to),
      "l"(base), "r"(offset), "r"(unit));
}
// 4 bytes.
__device__ __forceinline__ void copy_word(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;\n" ::); }
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending));
}

// Adds 1 and returns what was there. What was written before is seen by who arrives later, from here to the end of the
// GPU.
__device__ __forceinline__ int32_t arrive(int32_t* arrivals) {
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
  return before;
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}

// c[16x8] += a[16x16] b[16x8], of bfloat16 and of halves.
__device__ __forceinline__ void multiply_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A value that the compiler takes for new: what is computed from it is not kept in registers over the main loop.
__device__ __forceinline__ int32_t anew(int64_t value) {
  int32_t low = static_cast<int32_t>(value);
  asm volatile("" : "+r"(low));
  return low;
}
template <typename T>
__device__ __forceinline__ T* anew(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}
__device__ __forceinline__ uint32_t thread_anew() { return anew(threadIdx.x); }

__device__ __forceinline__ int32_t load_shared(uint32_t address) {
  int32_t value;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}

// base + a * b, the product in 64 bits.
__device__ __forceinline__ const char* multiply_add(int32_t a, int32_t b, const void* base) {
  uint64_t sum;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(sum) : "r"(a), "r"(b), "l"(reinterpret_cast<uint64_t>(base)));
  return reinterpret_cast<const char*>(sum);
}

__device__ __forceinline__ const char* multiply_add(uint32_t a, uint32_t b, const void* base) {
  uint64_t sum;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(sum) : "r"(a), "r"(b), "l"(reinterpret_cast<uint64_t>(base)));
  return reinterpret_cast<const char*>(sum);
}

// The base-2 logarithm, to 2^-22.
__device__ __forceinline__ float fast_log2(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 2^x to two units in the last place; -inf gives 0.
__device__ __forceinline__ float fast_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace sm80
}  // namespace attnloom
