// Stands in for csrc/cuda/launch.h: the launch runs, and has ended when it returns.
#pragma once

#include <cuda_runtime.h>

namespace attnloom {

template <typename Kernel, typename... Params>
void launch(Kernel* kernel, dim3 grid, int threads, int shared, void*, const Params&... params) {
  emulation::run_grid({grid.x, grid.y, grid.z}, threads, shared, [&] { kernel(params...); });
}

}  // namespace attnloom
