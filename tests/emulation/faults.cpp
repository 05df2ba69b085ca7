// Kernels with a fault each, for the emulation itself: it must say what is wrong.
#include <cuda_runtime.h>

#include "cuda/launch.h"
#include "sm80/ptx.h"

namespace {

using attnloom::sm80::shared_memory;

constexpr int kThreads = 128;
constexpr int kShared = 1024;

// By their places in test_faults.py.
enum Fault { kNone, kDeadlock, kElsewhere, kOutside, kUnaligned, kTooFar, kOverflow, kUnwaited, kUnsynchronised };

__global__ void faulty(int32_t fault, const char* from, int32_t* out) {
  using namespace attnloom::sm80;
  const uint32_t thread = threadIdx.x;
  int32_t* words = reinterpret_cast<int32_t*>(shared_memory);
  if (fault == kDeadlock && thread < 32) return;
  if (fault == kElsewhere && thread == 5) __ballot_sync(0xffffffff, true);
  __syncwarp();
  if (fault == kOverflow && thread == 0) shared_memory[kShared] = 0;
  copy_word(shared_address(words + thread) + (fault == kTooFar ? kShared : 0),
            from + thread * 4 + (fault == kOutside ? kThreads * 4 : 0) + (fault == kUnaligned ? 2 : 0));
  commit_copies();
  if (fault != kUnwaited) wait_copies<0>();
  if (fault != kUnsynchronised) __syncthreads();
  out[thread] = words[(thread + 37) % kThreads];
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void run_faulty(int32_t fault, const char* from, int32_t* out) {
  attnloom::launch(faulty, 1, kThreads, kShared, nullptr, fault, from, out);
}
