// Common to all .cu files: the launch with its check, and warp reductions in a fixed order.
//
// MRL_CUDA_EMULATOR replaces the CUDA runtime by tests/kernels/emulator/, which runs the same
// source on a CPU, thread by thread. Kernels therefore use only: threadIdx.x, blockIdx.x,
// blockDim.x, gridDim.x, __shared__ arrays of constant size, __syncthreads, __shfl_*_sync with a
// full mask, __threadfence, atomicAdd on unsigned, and MRL_LAUNCH instead of <<<>>>.
#pragma once

#ifdef MRL_CUDA_EMULATOR
#include "cuda_emulator.h"

#define MRL_REQUIRE(condition, message)                     \
  do {                                                      \
    if (!(condition)) throw std::invalid_argument(message); \
  } while (0)
#else
#include <cuda_runtime.h>

#include <cassert>

// A device-side assertion. Like torch's own checks it prints the message and aborts the context.
#define MRL_REQUIRE(condition, message) assert((condition) && message)

#define MRL_LAUNCH(kernel, grid, block, stream, ...)                                           \
  do {                                                                                         \
    kernel<<<static_cast<unsigned>(grid), block, 0, reinterpret_cast<cudaStream_t>(stream)>>>( \
        __VA_ARGS__);                                                                          \
    mrl::CheckLaunch(#kernel);                                                                 \
  } while (0)
#endif

#include <cstdint>
#include <stdexcept>
#include <string>

namespace mrl {

constexpr unsigned kFullWarp = 0xffffffffu;

inline void CheckLaunch(const char* kernel) {
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(kernel) + ": " + cudaGetErrorString(status));
  }
}

// Number of blocks for `items`.
inline int64_t Blocks(int64_t items, int64_t per_block) {
  return (items + per_block - 1) / per_block;
}

// Butterfly sum over the 32 lanes; every lane gets the same bits.
template <class T>
__device__ inline T WarpSum(T value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

}  // namespace mrl
