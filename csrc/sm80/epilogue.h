// What happens once to a row, after its last merge: the sink, output_transform, and the write. Also the kernel that
// does only this, to states that were merged elsewhere.
#pragma once

#include <cstdint>

#include "common/params.h"
#include "common/request.h"
#include "sm80/element.h"
#include "sm80/ptx.h"
#include "sm80/softmax.h"

namespace attnloom {
namespace sm80 {

__device__ __forceinline__ void scale_quad(float4& quad, float factor) {
  quad.x *= factor;
  quad.y *= factor;
  quad.z *= factor;
  quad.w *= factor;
}
__device__ __forceinline__ void add_quad(float4& to, float weight, const float4& value) {
  to.x += weight * value.x;
  to.y += weight * value.y;
  to.z += weight * value.z;
  to.w += weight * value.w;
}

// Where dim `dim` of row `row` lies among 16 rows of float32 in shared memory: groups of 8 are permuted, so that eight
// rows meet different banks.
template <typename S>
__device__ __forceinline__ int output_at(int row, int dim) {
  return row * S::kPitchOut + (dim ^ ((row & 7) << 3));
}

// A row of the output, as hooks know it.
struct OutputRow {
  int32_t request;
  int32_t query;
  int32_t q_pos;
  int32_t q_head;
  int32_t kv_head;
  int64_t token;
};

template <typename S>
struct Epilogue {
  using Variant = typename S::Variant;
  using Scalar = typename S::Scalar;
  const typename S::HookParams& hooks;
  const OutputTensor& out;
  float* lse;  // or null
  int32_t num_qo_heads;

  // The factor that the sink leaves to a row; `lse` becomes that of the finished row.
  __device__ float sink(const OutputRow& row, float& row_lse) const {
    if constexpr (Variant::kHasSink) {
      const float sink = Variant::sink(hooks, row.request, row.q_pos, row.q_head, row.kv_head, row.query);
      const float highest = fmaxf(row_lse, sink);
      if (highest > ATTNLOOM_NEG_INF) {
        const float own = exp2f((row_lse - highest) * kLog2e);
        const float sum = own + exp2f((sink - highest) * kLog2e);
        row_lse = highest + log2f(sum) * kLn2;
        return own / sum;
      }
    }
    return 1.0f;
  }

  __device__ Scalar* address(const OutputRow& row) const {
    return static_cast<Scalar*>(out.data) + row.token * out.stride_row + row.q_head * out.stride_head;
  }
  __device__ void write_lse(const OutputRow& row, float row_lse) const {
    if (lse != nullptr) lse[row.token * num_qo_heads + row.q_head] = row_lse;
  }
  __device__ void write_quad(const OutputRow& row, int quad, float4 value) const {
    uint2 bits;
    bits.x = Half<Scalar>::pack(value.x, value.y);
    bits.y = Half<Scalar>::pack(value.z, value.w);
    *reinterpret_cast<uint2*>(address(row) + quad * 4) = bits;
  }
  // One dim of a row whose dims `values[dim]` gives.
  template <typename Vector>
  __device__ void write_transformed(const OutputRow& row, int dim, const Vector& values) const {
    if constexpr (Variant::kHasOutputTransform) {
      address(row)[dim] = static_cast<Scalar>(
          Variant::output_transform(hooks, values, dim, row.request, row.q_pos, row.q_head, row.kv_head, row.query));
    }
  }
};

// Rows [row, row + 16) of a query tile on their way out, four dims at a time. Where output_transform needs whole rows
// they wait in shared memory, at `waiting`: put every quad, synchronise, transform.
template <typename S>
struct OutputTile {
  const Cta<S>& cta;
  const Work<S>& work;
  int row;
  float* waiting;

  __device__ OutputRow row_of(int index) const {
    const Folded folded = work.folded(cta, row + index);
    return {work.request,
            folded.query,
            work.first_position + folded.query,
            work.head * cta.p.group + folded.head,
            work.head,
            static_cast<int64_t>(work.first_token) + folded.query};
  }
  __device__ Epilogue<S> epilogue() const {
    return {cta.hooks, cta.p.out, cta.p.lse, cta.plan().header().num_qo_heads};
  }

  __device__ void put(int index, int quad, float4 value, float lse) const {
    const OutputRow to = row_of(index);
    const Epilogue<S> end = epilogue();
    if (cta.p.unfinished) {
      float* state = static_cast<float*>(cta.p.out.data) + to.token * cta.p.out.stride_row +
                     to.q_head * cta.p.out.stride_head + quad * 4;
      *reinterpret_cast<float4*>(state) = value;
    } else {
      scale_quad(value, end.sink(to, lse));
      if constexpr (S::Variant::kHasOutputTransform) {
        *reinterpret_cast<float4*>(waiting + output_at<S>(index, quad * 4)) = value;
      } else {
        end.write_quad(to, quad, value);
      }
    }
    if (quad == 0) end.write_lse(to, lse);
  }

  struct Waiting {
    const float* rows;
    int index;
    __device__ float operator[](int dim) const { return rows[output_at<S>(index, dim)]; }
  };

  // Whether rows go out as they are, so that they need not lie in shared memory before.
  __device__ bool direct() const { return !S::Variant::kHasOutputTransform && !cta.p.unfinished; }

  // The lane's row of half `half` of a warp's 16, times `factor`, straight from the registers. All lanes together.
  __device__ __forceinline__ void write(const Rows<S>& rows, int half, float factor, float lse) const {
    const uint32_t lane = cta.lane();
    const int index = half * 8 + lane / 4;
    const bool valid = row + index < work.rows;
    const OutputRow to = row_of(valid ? index : 0);
    const Epilogue<S> end = epilogue();
    factor *= end.sink(to, lse);
    const bool odd = lane % 2 != 0;
    constexpr int kQuads = S::kDimV / 16;
    uint2 bits[kQuads];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const float (&even)[4] = rows.out[2 * q];
      const float (&next)[4] = rows.out[2 * q + 1];
      const auto pack = [&](float a, float b) { return Half<typename S::Scalar>::pack(a * factor, b * factor); };
      if constexpr (sizeof(typename S::Value) == 2) {
        // A lane has two neighbouring dims of two groups of 8; neighbours exchange one for four of the same group.
        const uint32_t first = pack(even[half * 2], even[half * 2 + 1]);
        const uint32_t second = pack(next[half * 2], next[half * 2 + 1]);
        const uint32_t other = __shfl_xor_sync(0xffffffff, odd ? first : second, 1);
        bits[q] = odd ? make_uint2(other, second) : make_uint2(first, other);
      } else {  // neighbouring fragments hold even and odd dims (products.h)
        bits[q] = make_uint2(pack(even[half * 2], next[half * 2]), pack(even[half * 2 + 1], next[half * 2 + 1]));
      }
    }
    if (!valid) return;
    // One address for all: the distances are constants.
    const int dim = sizeof(typename S::Value) == 2 ? (odd ? 8 : 0) + lane % 4 / 2 * 4 : lane % 4 * 4;
    char* const from = anew(reinterpret_cast<char*>(end.address(to) + dim));
#pragma unroll
    for (int q = 0; q < kQuads; ++q) *reinterpret_cast<uint2*>(from + q * 32) = bits[q];
    if (lane % 4 == 0) end.write_lse(to, lse);
  }

  // Thread `thread` of `threads` that share the work.
  __device__ void transform(int count, int thread, int threads) const {
    if constexpr (S::Variant::kHasOutputTransform) {
      if (cta.p.unfinished) return;
      for (int i = thread; i < count * S::kDimV; i += threads) {
        const int index = i / S::kDimV;
        epilogue().write_transformed(row_of(index), i % S::kDimV, Waiting{waiting, index});
      }
    }
  }
};

// A CTA finishes the rows of a query token, a warp for each head.
template <typename S>
__global__ void finish_kernel(const __grid_constant__ FinishParams p,
                              const __grid_constant__ typename S::HookParams hooks) {
  struct Scaled {
    const float* row;
    float factor;
    __device__ float operator[](int dim) const { return row[dim] * factor; }
  };
  const PlanView<const int32_t> plan{p.plan};
  const PlanHeader& header = plan.header();
  const int32_t token = blockIdx.x;
  if (token >= plan.qo_indptr()[header.num_requests]) return;
  int32_t low = 0;  // the request with qo_indptr[low] <= token < qo_indptr[low + 1]
  int32_t high = header.num_requests;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (plan.qo_indptr()[middle] <= token ? low : high) = middle;
  }
  const Request request(p.layout, plan.qo_indptr().data(), low);
  const int32_t query = token - request.first_token;
  const Epilogue<S> end{hooks, p.out, p.lse, header.num_qo_heads};
  for (int32_t q_head = threadIdx.x / 32; q_head < header.num_qo_heads; q_head += S::kWarps) {
    const OutputRow row{
        low, query, request.query_position(query), q_head, q_head / (header.num_qo_heads / header.num_kv_heads), token};
    const int64_t index = static_cast<int64_t>(token) * header.num_qo_heads + q_head;
    float lse = p.state_lse == nullptr ? 0.0f : p.state_lse[index];
    const Scaled values{p.state_out + index * S::kDimV, end.sink(row, lse)};
    for (int dim = threadIdx.x % 32; dim < S::kDimV; dim += 32) {
      if constexpr (S::Variant::kHasOutputTransform) {
        end.write_transformed(row, dim, values);
      } else {
        end.address(row)[dim] = static_cast<typename S::Scalar>(values[dim]);
      }
    }
    if (threadIdx.x % 32 == 0) end.write_lse(row, lse);
  }
}

}  // namespace sm80
}  // namespace attnloom
