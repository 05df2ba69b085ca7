// The dialect of hooks: how declared parameters reach a hook's text.
//
// A parameter travels as 64-bit words: a float or int64 scalar is one word, a tensor its address, then one stride (in
// elements) per dimension, then one size per dimension.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/macros.h"
#include "common/math.h"

namespace attnloom {

ATTNLOOM_HD float float_param(const uint64_t* words) {
  const uint32_t bits = static_cast<uint32_t>(words[0]);
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
ATTNLOOM_HD int64_t int_param(const uint64_t* words) { return static_cast<int64_t>(words[0]); }

// `t[i]` for one dimension, `t(i, j, ...)` for any number; the index is trusted. `t.at(i, j, ...)` indexes as torch
// does: negative from the end; outside it reads NaN, 0 or false, as a kernel has no way to raise an error.
template <typename T, int kDims>
struct TensorParam {
  const T* data;
  int64_t strides[kDims];
  int32_t sizes[kDims];

  ATTNLOOM_HD explicit TensorParam(const uint64_t* words) : data(reinterpret_cast<const T*>(words[0])) {
    bool empty = false;
    for (int dim = 0; dim < kDims; ++dim) {
      strides[dim] = static_cast<int64_t>(words[1 + dim]);
      const uint64_t size = words[1 + kDims + dim];
      sizes[dim] = size < INT32_MAX ? static_cast<int32_t>(size) : INT32_MAX;
      empty |= size == 0;
    }
    // `at` reads, and drops, the one word that core/params.py gives for the address of an empty tensor.
    for (int dim = 0; empty && dim < kDims; ++dim) strides[dim] = 0;
  }
  ATTNLOOM_HD int32_t size(int dim) const { return sizes[dim]; }

  template <typename... Index>
  ATTNLOOM_HD T operator()(Index... index) const {
    static_assert(sizeof...(index) == kDims, "a tensor parameter takes one index per dimension");
    const int64_t each[] = {static_cast<int64_t>(index)...};
    int64_t offset = 0;
    for (int dim = 0; dim < kDims; ++dim) offset += each[dim] * strides[dim];
    return data[offset];
  }
  ATTNLOOM_HD T operator[](int64_t index) const {
    static_assert(kDims == 1, "t[i] is for one dimension; write t(i, j) for more");
    return data[index * strides[0]];
  }
  template <typename... Index>
  ATTNLOOM_HD T at(Index... index) const {
    static_assert(sizeof...(index) == kDims, "a tensor parameter takes one index per dimension");
    int32_t outside = 0;  // -1 if an index lies outside
    int dim = 0;
    int32_t offset = 0;  // core/params.py refuses tensors that span more: 32 bits are what a vector of addresses has
    ((offset += reachable(index, sizes[dim], &outside) * static_cast<int32_t>(strides[dim]), ++dim), ...);
    return kept(offset, outside);
  }

 private:
  // What follows is arithmetic on integers, without bools and choices: a compiler would move the load into a choice,
  // and vectorises neither that nor numbers made of bools.

  // The index if it lies inside, else 0.
  template <typename Index>
  ATTNLOOM_HD static int32_t reachable(Index index, int32_t size, int32_t* outside) {
    using Bits = std::make_unsigned_t<Index>;
    constexpr int kSign = 8 * sizeof(Index) - 1;
    const Index wrapped = index + (static_cast<Index>(size) & (index >> kSign));
    const Index beyond = static_cast<Index>(static_cast<Bits>(size) - 1 - static_cast<Bits>(wrapped));
    const Index out = (wrapped | beyond) >> kSign;
    *outside = *outside | static_cast<int32_t>(out);
    return static_cast<int32_t>(wrapped & ~out);
  }
  ATTNLOOM_HD T kept(int32_t offset, int32_t outside) const {
    if constexpr (std::is_same<T, float>::value) {
      return math::bits_to_float(math::float_to_bits(data[offset]) | (0x7fc00000 & outside));
    } else if constexpr (sizeof(T) == 1) {
      const uint32_t byte = byte_at(offset) & static_cast<uint32_t>(~outside);
      return std::is_same<T, bool>::value ? byte > 0 : static_cast<T>(byte);
    } else {
      return static_cast<T>(data[offset] & ~static_cast<T>(outside));
    }
  }
  // Out of the aligned word around it: a CPU gathers words and no bytes. The word lies on the same page.
  ATTNLOOM_HD uint32_t byte_at(int32_t offset) const {
#if defined(__CUDA_ARCH__)
    return reinterpret_cast<const uint8_t*>(data)[offset];
#else
    const uintptr_t address = reinterpret_cast<uintptr_t>(data);
    const uint32_t* words = reinterpret_cast<const uint32_t*>(address & ~uintptr_t(3));
    const int32_t byte = offset + static_cast<int32_t>(address & 3);
    return (words[byte >> 2] >> (8 * (byte & 3))) & 255;
#endif
  }
};

// An index of a row of `size` elements that may be read: negative ones count from the end, others stop at the ends.
ATTNLOOM_HD int inside(int32_t index, int size) {
  const int32_t wrapped = index + (size & (index >> 31));
  return math::max(0, math::min(wrapped, size - 1));
}

// A vector whose elements are computed when asked for: what the next of two composed vector hooks sees.
template <typename Element>
struct LazyVector {
  Element element;
  ATTNLOOM_HD float operator[](int dim) const { return element(dim); }
};
template <typename Element>
ATTNLOOM_HD LazyVector<Element> lazy_vector(Element element) {
  return {element};
}

// Bit `index` of a packed boolean tensor, least significant bit first.
ATTNLOOM_HD bool packed_bit(const TensorParam<uint8_t, 1>& bits, int64_t index) {
  return (bits[index >> 3] >> (index & 7)) & 1;
}

}  // namespace attnloom
