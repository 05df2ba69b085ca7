// Memory that a thread keeps between calls: mapping it anew for each layer costs more than a small decode.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace attnloom {
namespace cpu {

class Scratch {
 public:
  ~Scratch() { std::free(memory_); }

  // At least `floats` floats, aligned to 64 bytes; what the last call left is lost.
  float* take(size_t floats) {
    if (floats > size_) {
      std::free(memory_);
      memory_ = static_cast<float*>(std::aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64));
      if (memory_ == nullptr) throw std::bad_alloc();
      size_ = floats;
    }
    return memory_;
  }

 private:
  float* memory_ = nullptr;
  size_t size_ = 0;
};

inline Scratch& thread_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

}  // namespace cpu
}  // namespace attnloom
