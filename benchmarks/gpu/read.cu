// Reads memory and does nothing else: what any kernel that has to read so many bytes is up against.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/macros.h"
#include "cuda/launch.h"

namespace {

constexpr int kThreads = 512;
constexpr int kAtOnce = 8;  // loads of 16 bytes of a thread
constexpr int kCtasPerSm = 2;

// Blocks of kThreads * kAtOnce loads, to the CTAs in turn, so that all read in one place at a time. A thread whose
// words add up to `kept` says so: reads that nobody uses would be left out.
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    read_kernel(const int4* data, int64_t count, int32_t kept, int32_t* sink) {
  int32_t sum = 0;
  constexpr int64_t kBlock = kThreads * kAtOnce;
  for (int64_t begin = blockIdx.x * kBlock; begin < count; begin += gridDim.x * kBlock) {
    int4 value[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t at = begin + i * kThreads + threadIdx.x;
      value[i] = at < count ? __ldg(data + at) : int4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sum += value[i].x + value[i].y + value[i].z + value[i].w;
  }
  if (sum == kept) *sink = sum;
}

}  // namespace

ATTNLOOM_EXPORT int32_t read_bytes(const void* data, int64_t bytes, int32_t kept, int32_t* sink, void* stream) {
  int device = 0;
  int processors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  attnloom::launch(read_kernel, processors * kCtasPerSm, kThreads, 0, stream, static_cast<const int4*>(data),
                   bytes / 16, kept, sink);
  return static_cast<int32_t>(cudaGetLastError());
}
