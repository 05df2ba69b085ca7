// The dialect of hooks: how declared parameters reach a hook's text.
//
// A parameter travels as 64-bit words: a float or int64 scalar is one word, a tensor its address and then one
// stride (in elements) per dimension.
#pragma once

#include <cstdint>
#include <cstring>

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

// `t[i]` for one dimension, `t(i, j, ...)` for any number.
template <typename T, int kDims>
struct TensorParam {
  const T* data;
  int64_t strides[kDims];

  ATTNLOOM_HD explicit TensorParam(const uint64_t* words) : data(reinterpret_cast<const T*>(words[0])) {
    for (int dim = 0; dim < kDims; ++dim) strides[dim] = static_cast<int64_t>(words[1 + dim]);
  }
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
};

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
