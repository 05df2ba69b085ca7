// What a launch asks of the runtime.

#include <cuda_runtime.h>

#include <cstdint>

#include "common/macros.h"
#include "cuda/prepare.h"

// A number that tells captures of a process apart, or 0 when the stream is not being captured; -1 on an error.
ATTNLOOM_EXPORT int64_t attnloom_capture(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  if (cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &id) != cudaSuccess) return -1;
  return status == cudaStreamCaptureStatusActive ? static_cast<int64_t>(id) + 1 : 0;
}

namespace {

// Allocating is forbidden to a thread while a stream is captured, unless it says that it knows.
struct RelaxedCapture {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode); }
};

}  // namespace

// Memory of the current device that belongs to no pool of torch's; null when there is none.
ATTNLOOM_EXPORT void* attnloom_allocate(int64_t bytes) {
  const RelaxedCapture relaxed;
  void* memory = nullptr;
  return cudaMalloc(&memory, bytes) == cudaSuccess ? memory : nullptr;
}

// Waits for the device.
ATTNLOOM_EXPORT int32_t attnloom_release(void* memory) {
  const RelaxedCapture relaxed;
  return static_cast<int32_t>(cudaFree(memory));
}

// Puts zeros there when the stream gets to it, in a capture at each replay; returns CUDA's error.
ATTNLOOM_EXPORT int32_t attnloom_zero(void* memory, int64_t bytes, void* stream) {
  return static_cast<int32_t>(cudaMemsetAsync(memory, 0, bytes, static_cast<cudaStream_t>(stream)));
}

// Brings this module's kernels onto the current device, so that a capture finds them there; returns CUDA's error.
ATTNLOOM_EXPORT int32_t attnloom_prepare() {
  if (const int32_t error = attnloom::prepare_planner()) return error;
  if (const int32_t error = attnloom::prepare_append()) return error;
  if (const int32_t error = attnloom::prepare_append_fp8()) return error;
  return attnloom::prepare_merge();
}
