// Four logits at a time, as fp32: vector loads where the address allows them. Which four never
// depends on the alignment, so neither do the sums.
#pragma once

#include <cstdint>

#include "cuda/launch.h"
#include "scalar.h"
#include "vp_logprob.h"

namespace mrl {

constexpr int kVector = 4;

template <LogitType kType>
struct DeviceLogits;

template <>
struct DeviceLogits<LogitType::kFloat32> {
  typedef float Element;
  typedef float4 Vector;
  static __device__ float Read(float x) { return x; }
  static __device__ float Write(float x) { return x; }
};

template <>
struct DeviceLogits<LogitType::kBfloat16> {
  typedef uint16_t Element;
  typedef uint2 Vector;
  static __device__ float Read(uint16_t bits) {
    return scalar::AsFloats(static_cast<int32_t>(bits) << 16);
  }
  static __device__ uint16_t Write(float x) {  // to nearest, ties to even
    const uint32_t bits = static_cast<uint32_t>(scalar::AsInts(x));
    if (x != x) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

template <>
struct DeviceLogits<LogitType::kFloat16> {
  typedef uint16_t Element;
  typedef uint2 Vector;
  static __device__ float Read(uint16_t half) {  // see cpu/vp_logprob_body.h
    const int32_t magnitude = half & 0x7fff, sign = (half & 0x8000) << 16;
    const float finite = scalar::AsFloats(magnitude << 13) * 5.192296858534828e33f;  // 2^112
    const int32_t bits =
        magnitude > 0x7bff ? (magnitude << 13) | 0x7f800000 : scalar::AsInts(finite);
    return scalar::AsFloats(bits | sign);
  }
  static __device__ uint16_t Write(float x) {
    const int32_t bits = scalar::AsInts(x), magnitude = bits & 0x7fffffff;
    const int32_t sign = (bits >> 16) & 0x8000;
    int32_t result = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112 << 23)) >> 13;
    if (magnitude < 0x38800000) {
      result = scalar::AsInts(scalar::AsFloats(magnitude) + 0.5f) - scalar::AsInts(0.5f);
    }
    if (magnitude > 0x477fefff) result = 0x7c00;
    if (magnitude > 0x7f800000) result = 0x7e00;
    return static_cast<uint16_t>(result | sign);
  }
};

template <LogitType kType>
__device__ inline bool IsAligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % sizeof(typename DeviceLogits<kType>::Vector) == 0;
}

// Columns [column, column + 4) of a row of `size`; -inf beyond its end.
template <LogitType kType>
__device__ inline void ReadVector(const typename DeviceLogits<kType>::Element* row, int64_t column,
                                  int64_t size, bool aligned, float* x) {
  alignas(sizeof(typename DeviceLogits<kType>::Vector))
      typename DeviceLogits<kType>::Element raw[kVector];
  if (aligned && column + kVector <= size) {
    *reinterpret_cast<typename DeviceLogits<kType>::Vector*>(raw) =
        *reinterpret_cast<const typename DeviceLogits<kType>::Vector*>(row + column);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = DeviceLogits<kType>::Read(raw[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    x[i] = column + i < size ? DeviceLogits<kType>::Read(row[column + i]) : -INFINITY;
  }
}

template <LogitType kType>
__device__ inline void WriteVector(typename DeviceLogits<kType>::Element* row, int64_t column,
                                   int64_t size, bool aligned, const float* x) {
  if (aligned && column + kVector <= size) {
    alignas(sizeof(typename DeviceLogits<kType>::Vector))
        typename DeviceLogits<kType>::Element raw[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) raw[i] = DeviceLogits<kType>::Write(x[i]);
    *reinterpret_cast<typename DeviceLogits<kType>::Vector*>(row + column) =
        *reinterpret_cast<typename DeviceLogits<kType>::Vector*>(raw);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (column + i < size) row[column + i] = DeviceLogits<kType>::Write(x[i]);
  }
}

}  // namespace mrl
