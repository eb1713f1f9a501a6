// 8-bit quantisation of weights and activations: e4m3 in blocks of 128 x 128 (weights) and groups
// of a row (activations), and int8 in rows.
//
// In every block, group or row, amax is the largest |x|, at least kSmallestAmax, and
//     e4m3:  s = amax / 448, or a power of two    q = e4m3(x (1 / s))
//     int8:  s = amax / 127                       q = round(x (127 / amax)), ties away from zero
// Each operation rounds to fp32, so the results are defined to the bit: nothing may be contracted
// to a fused multiply-add. mrl/kernels/block_quant.py names the sources of the formulas.
#pragma once

#include <cstdint>

#include "elements.h"
#include "portable.h"
#include "scalar.h"

namespace mrl {

constexpr int64_t kQuantBlock = 128;
constexpr float kSmallestAmax = 1e-10f;

struct QuantInput {
  const void* x;  // [num_rows, num_columns], of `type`
  FloatType type;
  int64_t num_rows;
  int64_t num_columns;
};

struct DequantInput {
  const uint8_t* q;     // [num_rows, num_columns]: bits of e4m3fn or int8
  const float* scales;  // one for each 128 x 128 block, or one for each row
  int64_t num_rows;
  int64_t num_columns;
  FloatType type;  // of the result
};

struct QuantScale {
  float scale;   // s
  float factor;  // what x is multiplied by
};

// The largest |x| from its bits; NaN has the largest bits of all and stays NaN.
MRL_FN float QuantAmax(int32_t bits) {
  const float amax = scalar::AsFloats(bits);
  return amax < kSmallestAmax ? kSmallestAmax : amax;
}

MRL_FN QuantScale Fp8Scale(float amax) {
  const float scale = amax / 448.0f;
  return {scale, 1.0f / scale};
}

// The smallest power of two s with amax <= 464 s, which e4m3 rounds to 448 s. Published code has
// 448 in place of 464, and there a block whose amax rounds down to 224 s gets s / 2 the second
// time. Adding 0x17ffff to the bits carries into the exponent above 464 = 1.8125 * 2^8.
MRL_FN QuantScale Fp8PowerOfTwo(float amax) {
  const uint32_t bits = static_cast<uint32_t>(scalar::AsInts(amax));
  const int32_t exponent = static_cast<int32_t>((bits + 0x17ffff) >> 23) - 8;
  return {scalar::AsFloats(exponent << 23), scalar::AsFloats((254 - exponent) << 23)};
}

MRL_FN QuantScale Int8Scale(float amax) { return {amax / 127.0f, 127.0f / amax}; }

// The scale of a block of weights. It is 1 where all of the block becomes 0, and NaN, for which the
// caller looks, where a weight is not finite or where s q may be infinite.
MRL_FN QuantScale Fp8WeightScale(int32_t amax_bits, bool powers_of_two) {
  // 248 * 2^120 would become 256 * 2^120, which is infinite.
  const int32_t limit = powers_of_two ? 0x7f780000 : 0x7f800000;
  const float amax = QuantAmax(amax_bits);
  QuantScale result = powers_of_two ? Fp8PowerOfTwo(amax) : Fp8Scale(amax);
  if (scalar::AsFloats(amax_bits) * result.factor <= 0x1p-10f) result.scale = 1.0f;
  if (amax_bits >= limit) result.scale = scalar::AsFloats(0x7fc00000);
  return result;
}

MRL_FN QuantScale Int8WeightScale(int32_t amax_bits) {
  QuantScale result = Int8Scale(QuantAmax(amax_bits));
  if (scalar::AsFloats(amax_bits) * result.factor < 0.5f) result.scale = 1.0f;
  if (amax_bits >= 0x7f800000) result.scale = scalar::AsFloats(0x7fc00000);
  return result;
}

// q: [num_rows, num_columns], e4m3fn. scales: [ceil(num_rows / 128), ceil(num_columns / 128)], NaN
// for a block that must be refused.
void QuantizeFp8BlocksCpu(const QuantInput& in, bool powers_of_two, int num_threads, uint8_t* q,
                          float* scales);
void QuantizeFp8BlocksCuda(const QuantInput& in, bool powers_of_two, uintptr_t stream, uint8_t* q,
                           float* scales);

// q: [num_rows, num_columns], int8. scales: [num_rows], NaN for a row that must be refused.
void QuantizeInt8RowsCpu(const QuantInput& in, int num_threads, uint8_t* q, float* scales);
void QuantizeInt8RowsCuda(const QuantInput& in, uintptr_t stream, uint8_t* q, float* scales);

// out: [num_rows, num_columns], of in.type.
void DequantizeFp8BlocksCpu(const DequantInput& in, int num_threads, void* out);
void DequantizeFp8BlocksCuda(const DequantInput& in, uintptr_t stream, void* out);
void DequantizeInt8RowsCpu(const DequantInput& in, int num_threads, void* out);
void DequantizeInt8RowsCuda(const DequantInput& in, uintptr_t stream, void* out);

// Quantised and dequantised, in the type of x: groups of `group` columns of a row as e4m3, of which
// the last may be shorter, and whole rows as int8. A NaN or an infinity makes all of its group NaN.
void FakeQuantizeFp8GroupsCpu(const QuantInput& in, int64_t group, int num_threads, void* out);
void FakeQuantizeFp8GroupsCuda(const QuantInput& in, int64_t group, uintptr_t stream, void* out);
void FakeQuantizeInt8RowsCpu(const QuantInput& in, int num_threads, void* out);
void FakeQuantizeInt8RowsCuda(const QuantInput& in, uintptr_t stream, void* out);

}  // namespace mrl
