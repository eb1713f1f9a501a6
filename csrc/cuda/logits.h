// Reads and writes logits 16 bytes at a time, as fp32: 8 columns in half precision, 4 in fp32. The
// columns of a thread do not depend on the alignment, so neither do the sums.
#pragma once

#include <cstdint>

#include "cuda/launch.h"
#include "elements.h"
#include "vp_logprob.h"

namespace mrl {

template <LogitType kType>
struct DeviceLogits;

template <>
struct DeviceLogits<LogitType::kFloat32> : Float32Element {};
template <>
struct DeviceLogits<LogitType::kBfloat16> : Bfloat16Element {};
template <>
struct DeviceLogits<LogitType::kFloat16> : Float16Element {};

template <LogitType kType>
using StoredLogit = typename DeviceLogits<kType>::Stored;

constexpr int kVectorBytes = 16;

template <LogitType kType>
constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(StoredLogit<kType>));

inline __device__ bool IsAligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kVectorBytes == 0;
}

template <LogitType kType>
struct LogitVector {
  alignas(kVectorBytes) StoredLogit<kType> at[kVector<kType>];
};

// Reads kCount vectors from aligned addresses, `stride` columns apart. No branch separates the
// loads, so all of them are in flight before the first is used.
template <LogitType kType, int kCount>
__device__ inline void ReadWhole(const StoredLogit<kType>* from, int64_t stride, float* x) {
  LogitVector<kType> raw[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    *reinterpret_cast<uint4*>(raw[k].at) = *reinterpret_cast<const uint4*>(from + k * stride);
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
#pragma unroll
    for (int i = 0; i < kVector<kType>; ++i) {
      x[k * kVector<kType> + i] = DeviceLogits<kType>::Read(raw[k].at[i]);
    }
  }
}

// Reads the same columns, with -inf for those beyond `size`: as vectors if addresses are aligned
// and `size` is a multiple of a vector, else column by column.
template <LogitType kType, int kCount>
__device__ inline void ReadSome(const StoredLogit<kType>* row, int64_t column, int64_t stride,
                                int64_t size, bool vectors, float* x) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const int64_t start = column + k * stride;
    if (vectors) {
      LogitVector<kType> raw;
      if (start < size) {
        *reinterpret_cast<uint4*>(raw.at) = *reinterpret_cast<const uint4*>(row + start);
      }
#pragma unroll
      for (int i = 0; i < kVector<kType>; ++i) {
        x[k * kVector<kType> + i] = start < size ? DeviceLogits<kType>::Read(raw.at[i]) : -INFINITY;
      }
      continue;
    }
#pragma unroll
    for (int i = 0; i < kVector<kType>; ++i) {
      const int64_t at = start + i;
      x[k * kVector<kType> + i] = at < size ? DeviceLogits<kType>::Read(row[at]) : -INFINITY;
    }
  }
}

template <LogitType kType, int kCount>
__device__ inline void WriteWhole(StoredLogit<kType>* to, int64_t stride, const float* x) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    LogitVector<kType> raw;
#pragma unroll
    for (int i = 0; i < kVector<kType>; ++i) {
      raw.at[i] = DeviceLogits<kType>::Write(x[k * kVector<kType> + i]);
    }
    *reinterpret_cast<uint4*>(to + k * stride) = *reinterpret_cast<uint4*>(raw.at);
  }
}

template <LogitType kType, int kCount>
__device__ inline void WriteSome(StoredLogit<kType>* row, int64_t column, int64_t stride,
                                 int64_t size, bool vectors, const float* x) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    if (vectors) {
      if (column + k * stride < size) {
        WriteWhole<kType, 1>(row + column + k * stride, 0, x + k * kVector<kType>);
      }
      continue;
    }
#pragma unroll
    for (int i = 0; i < kVector<kType>; ++i) {
      const int64_t at = column + k * stride + i;
      if (at < size) row[at] = DeviceLogits<kType>::Write(x[k * kVector<kType> + i]);
    }
  }
}

// 2^x in one instruction of the special function unit, accurate to 2 ulp like exp2f. Results below
// 2^-126 are 0, where exp2f needs three more instructions for a denormal; they do not affect sums.
__device__ inline float ExpOf2(float x) {
#ifdef MRL_CUDA_EMULATOR
  return x < -126.0f ? 0.0f : exp2f(x);
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}

}  // namespace mrl
