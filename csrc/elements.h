// Storage and summation types of a row's elements, shared by the CPU and CUDA kernels. Reading is
// exact, and writing rounds to nearest with ties to even, like torch.
#pragma once

#include <cmath>
#include <cstdint>

#include "portable.h"
#include "scalar.h"

namespace mrl {

// Of the tensors of an inference op; FLOAT_TYPES in mrl/kernels/backend.py has the same order.
enum class FloatType : int { kFloat32, kBfloat16, kFloat16 };

struct Float32Element {
  typedef float Stored;
  typedef float Sum;
  static MRL_FN float Read(float x) { return x; }
  static MRL_FN float Write(float x) { return x; }
};

struct Float64Element {
  typedef double Stored;
  typedef double Sum;
  static MRL_FN double Read(double x) { return x; }
  static MRL_FN double Write(double x) { return x; }
};

struct Bfloat16Element {
  typedef uint16_t Stored;
  typedef float Sum;
  static MRL_FN float Read(uint16_t bits) {
    return scalar::AsFloats(static_cast<int32_t>(static_cast<uint32_t>(bits) << 16));
  }
  static MRL_FN uint16_t Write(float x) {
    const uint32_t bits = static_cast<uint32_t>(scalar::AsInts(x));
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
  }
};

struct Float16Element {
  typedef uint16_t Stored;
  typedef float Sum;
  static MRL_FN float Read(uint16_t half) {
    const int32_t magnitude = half & 0x7fff, sign = static_cast<int32_t>((half & 0x8000u) << 16);
    // Rebiasing the exponent by a multiplication also turns subnormal halves into normal floats.
    const float finite = scalar::AsFloats(magnitude << 13) * 5.192296858534828e33f;  // 2^112
    const int32_t bits =
        magnitude > 0x7bff ? (magnitude << 13) | 0x7f800000 : scalar::AsInts(finite);
    return scalar::AsFloats(bits | sign);
  }
  static MRL_FN uint16_t Write(float x) {
    const int32_t bits = scalar::AsInts(x), magnitude = bits & 0x7fffffff;
    const int32_t sign = (bits >> 16) & 0x8000;
    const int32_t normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112 << 23)) >> 13;
    // Below 2^-14, adding 0.5 aligns the half's last bit with the float's last bit.
    const int32_t subnormal =
        scalar::AsInts(scalar::AsFloats(magnitude) + 0.5f) - scalar::AsInts(0.5f);
    int32_t result = magnitude < 0x38800000 ? subnormal : normal;
    result = magnitude > 0x477fefff ? 0x7c00 : result;  // rounds to inf
    result = magnitude > 0x7f800000 ? 0x7e00 : result;  // NaN
    return static_cast<uint16_t>(result | sign);
  }
};

}  // namespace mrl
