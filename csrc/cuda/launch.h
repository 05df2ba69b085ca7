// The launch of a kernel: the one place in headers with CUDA's syntax for it.
#pragma once

#include <cuda_runtime.h>

namespace attnloom {

// `shared`: bytes of dynamic shared memory. Returns nothing: cudaGetLastError() tells.
template <typename Kernel, typename... Params>
void launch(Kernel* kernel, dim3 grid, int threads, int shared, void* stream, const Params&... params) {
  kernel<<<grid, threads, shared, static_cast<cudaStream_t>(stream)>>>(params...);
}

}  // namespace attnloom
