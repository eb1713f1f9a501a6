// MRL_FN marks functions that the CPU kernels and the CUDA kernels share.
#pragma once

#ifdef __CUDACC__
#define MRL_FN __host__ __device__ __forceinline__
#else
#define MRL_FN inline __attribute__((always_inline))
#endif
