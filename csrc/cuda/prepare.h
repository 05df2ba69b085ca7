// Kernels are brought onto the device when they are first asked about; inside a graph's capture that is too late.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>

namespace attnloom {

// Loads kernels onto the current device; returns CUDA's first error.
template <typename... Kernels>
int32_t prepare(Kernels*... kernels) {
  cudaFuncAttributes attributes;
  int32_t error = 0;
  for (const void* kernel : {reinterpret_cast<const void*>(kernels)...}) {
    if (error == 0) error = static_cast<int32_t>(cudaFuncGetAttributes(&attributes, kernel));
  }
  return error;
}

// Of the device module's files.
int32_t prepare_append();
int32_t prepare_append_fp8();
int32_t prepare_merge();
int32_t prepare_planner();

}  // namespace attnloom
