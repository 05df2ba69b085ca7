// Qualifiers that let one source compile for the host and for a device.
#pragma once

#if defined(__CUDACC__)
#define ATTNLOOM_HD __host__ __device__ __forceinline__
#else
#define ATTNLOOM_HD inline __attribute__((always_inline))
#endif

// The functions a module shows to its loader; everything else is hidden.
#define ATTNLOOM_EXPORT extern "C" __attribute__((visibility("default")))
