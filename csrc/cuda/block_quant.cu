// A CTA keeps a block of 128 x 128 weights in registers between its maximum and its rounding. Rows
// and groups take one warp each, which reads them twice. A maximum has the same bits in any order.
#include "block_quant.h"
#include "cuda/launch.h"

namespace mrl {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlockThreads = 512;  // of a block of 128 x 128
constexpr int kBlockWarps = kBlockThreads / 32;
constexpr int kWidth = static_cast<int>(kQuantBlock) / 32;                // columns of a lane
constexpr int kRowsOfWarp = static_cast<int>(kQuantBlock) / kBlockWarps;  // rows of a block
constexpr int kColumnsOfThread = 4;                                       // of a dequantised row

// A product that no addition is contracted with.
__device__ inline float Times(float a, float b) {
#ifdef MRL_CUDA_EMULATOR
  return a * b;
#else
  return __fmul_rn(a, b);
#endif
}

__device__ inline uint32_t BitsOf(float x) { return static_cast<uint32_t>(scalar::AsInts(x)); }
__device__ inline float FloatOf(uint32_t x) { return scalar::AsFloats(static_cast<int32_t>(x)); }

__device__ inline int32_t Larger(int32_t a, int32_t b) { return a > b ? a : b; }

__device__ inline int32_t MagnitudeBits(float x) { return scalar::AsInts(x) & 0x7fffffff; }

__device__ inline int32_t WarpMax(int32_t value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value = Larger(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}

// e4m3 has 3 bits of fraction and the exponent bias 7; below 2^-6 its numbers are multiples of
// 2^-9. The sum of a number below 2^-6 and 2^14 is rounded to such a multiple.
constexpr float kFp8Normal = 0x1p-6f, kFp8Aligner = 0x1p14f;
constexpr uint32_t kFp8Bias = (127 - 7) << 23;

__device__ inline uint32_t RoundedToFp8(uint32_t magnitude) {  // its low 20 bits are cut off
  return magnitude + 0x7ffff + ((magnitude >> 20) & 1);
}

// The e4m3fn bits of x for |x| < 464.
__device__ inline uint8_t Fp8Bits(float x) {
  const uint32_t bits = BitsOf(x), magnitude = bits & 0x7fffffff;
  const uint32_t normal = (RoundedToFp8(magnitude) - kFp8Bias) >> 20;
  const uint32_t subnormal = BitsOf(FloatOf(magnitude) + kFp8Aligner) - BitsOf(kFp8Aligner);
  const uint32_t rounded = FloatOf(magnitude) < kFp8Normal ? subnormal : normal;
  return static_cast<uint8_t>(rounded | ((bits >> 24) & 0x80));
}

// x rounded to e4m3, for |x| < 464 or NaN.
__device__ inline float RoundToFp8(float x) {
  const uint32_t bits = BitsOf(x), magnitude = bits & 0x7fffffff;
  const uint32_t normal = RoundedToFp8(magnitude) & ~0xfffffu;
  const uint32_t subnormal = BitsOf(FloatOf(magnitude) + kFp8Aligner - kFp8Aligner);
  const uint32_t rounded = FloatOf(magnitude) < kFp8Normal ? subnormal : normal;
  return x != x ? x : FloatOf(rounded | (bits & 0x80000000u));
}

__device__ inline float Fp8Value(uint8_t q) {
  const uint32_t magnitude = q & 0x7f;
  const uint32_t subnormal = BitsOf(FloatOf(BitsOf(kFp8Aligner) + magnitude) - kFp8Aligner);
  uint32_t value = magnitude < 8 ? subnormal : (magnitude << 20) + kFp8Bias;
  value = magnitude == 0x7f ? 0x7fc00000u : value;
  return FloatOf(value | (static_cast<uint32_t>(q & 0x80) << 24));
}

// x rounded to an integer, with ties away from zero, for |x| < 2^22 or NaN.
__device__ inline float RoundToInt8(float x) {
  const uint32_t bits = BitsOf(x);
  const float magnitude = FloatOf(bits & 0x7fffffff), aligner = 0x1p23f;
  const float even = magnitude + aligner - aligner;
  const float rounded = magnitude - even == 0.5f ? even + 1.0f : even;
  return FloatOf(BitsOf(rounded) | (bits & 0x80000000u));
}

__device__ inline uint8_t Int8Bits(float x) {  // x is not NaN
  return static_cast<uint8_t>(static_cast<int8_t>(RoundToInt8(x)));
}

// Four neighbouring elements, in one load or store if they are aligned.
template <class T>
struct alignas(kWidth * sizeof(T)) Four {
  T at[kWidth];
};

template <class Element, bool kAligned>
__global__ void __launch_bounds__(kBlockThreads)
    QuantizeFp8BlocksKernel(QuantInput in, bool powers_of_two, uint8_t* q, float* scales) {
  typedef typename Element::Stored Stored;
  __shared__ int32_t tops[kBlockWarps];
  const int64_t per_row = (in.num_columns + kQuantBlock - 1) / kQuantBlock;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t first_row = blockIdx.x / per_row * kQuantBlock + warp;
  const int64_t column = blockIdx.x % per_row * kQuantBlock + lane * kWidth;
  const Stored* x = static_cast<const Stored*>(in.x) + column;
  Four<Stored> held[kRowsOfWarp];
#pragma unroll
  for (int i = 0; i < kRowsOfWarp; ++i) {
    const int64_t row = first_row + i * kBlockWarps;
    held[i] = {};
    if constexpr (kAligned) {
      if (row < in.num_rows && column < in.num_columns) {
        held[i] = *reinterpret_cast<const Four<Stored>*>(x + row * in.num_columns);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (row < in.num_rows && column + k < in.num_columns) {
          held[i].at[k] = x[row * in.num_columns + k];
        }
      }
    }
  }
  int32_t top = 0;
#pragma unroll
  for (int i = 0; i < kRowsOfWarp; ++i) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      top = Larger(top, MagnitudeBits(Element::Read(held[i].at[k])));
    }
  }
  top = WarpMax(top);
  if (lane == 0) tops[warp] = top;
  __syncthreads();
  for (int i = 0; i < kBlockWarps; ++i) top = Larger(top, tops[i]);
  const QuantScale found = Fp8WeightScale(top, powers_of_two);
  if (threadIdx.x == 0) scales[blockIdx.x] = found.scale;
#pragma unroll
  for (int i = 0; i < kRowsOfWarp; ++i) {
    const int64_t row = first_row + i * kBlockWarps;
    Four<uint8_t> bytes;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      bytes.at[k] = Fp8Bits(Times(Element::Read(held[i].at[k]), found.factor));
    }
    uint8_t* const to = q + row * in.num_columns + column;
    if constexpr (kAligned) {
      if (row < in.num_rows && column < in.num_columns) {
        *reinterpret_cast<Four<uint8_t>*>(to) = bytes;
      }
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (row < in.num_rows && column + k < in.num_columns) to[k] = bytes.at[k];
      }
    }
  }
}

// The bits of the largest |x| of `count` elements; every lane of the warp gets them.
template <class Element>
__device__ inline int32_t AmaxBits(const typename Element::Stored* x, int64_t count) {
  int32_t top = 0;
  for (int64_t i = threadIdx.x % 32; i < count; i += 32) {
    top = Larger(top, MagnitudeBits(Element::Read(x[i])));
  }
  return WarpMax(top);
}

// One warp per row.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    QuantizeInt8RowsKernel(QuantInput in, uint8_t* q, float* scales) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= in.num_rows) return;
  const int lane = threadIdx.x % 32;
  const auto* x = static_cast<const typename Element::Stored*>(in.x) + row * in.num_columns;
  const QuantScale found = Int8WeightScale(AmaxBits<Element>(x, in.num_columns));
  if (lane == 0) scales[row] = found.scale;
  if (found.scale != found.scale) return;  // the row is refused
  for (int64_t i = lane; i < in.num_columns; i += 32) {
    q[row * in.num_columns + i] = Int8Bits(Times(Element::Read(x[i]), found.factor));
  }
}

// One warp per group.
template <class Element, bool kFp8>
__global__ void __launch_bounds__(kThreads)
    FakeQuantizeKernel(QuantInput in, int64_t group, void* out) {
  typedef typename Element::Stored Stored;
  const int64_t per_row = (in.num_columns + group - 1) / group;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (number >= in.num_rows * per_row) return;
  const int64_t column = number % per_row * group;
  const int64_t start = number / per_row * in.num_columns + column;
  const int64_t rest = in.num_columns - column, count = rest < group ? rest : group;
  const Stored* x = static_cast<const Stored*>(in.x) + start;
  Stored* const to = static_cast<Stored*>(out) + start;
  const float amax = QuantAmax(AmaxBits<Element>(x, count));
  const QuantScale found = kFp8 ? Fp8Scale(amax) : Int8Scale(amax);
  for (int64_t i = threadIdx.x % 32; i < count; i += 32) {
    const float scaled = Times(Element::Read(x[i]), found.factor);
    const float rounded = kFp8 ? RoundToFp8(scaled) : RoundToInt8(scaled);
    to[i] = Element::Write(Times(rounded, found.scale));
  }
}

template <class Element, bool kFp8>
__global__ void __launch_bounds__(kThreads)
    DequantizeKernel(DequantInput in, int64_t parts_of_row, void* out) {
  const int64_t row = blockIdx.x / parts_of_row;
  const int64_t first = blockIdx.x % parts_of_row * (kThreads * kColumnsOfThread) + threadIdx.x;
  const int64_t blocks_of_row = (in.num_columns + kQuantBlock - 1) / kQuantBlock;
  const float* scales = in.scales + (kFp8 ? row / kQuantBlock * blocks_of_row : row);
#pragma unroll
  for (int k = 0; k < kColumnsOfThread; ++k) {
    const int64_t column = first + k * kThreads;
    if (column >= in.num_columns) break;
    const uint8_t q = in.q[row * in.num_columns + column];
    const float value = kFp8 ? Fp8Value(q) : static_cast<float>(static_cast<int8_t>(q));
    const float product = Times(value, scales[kFp8 ? column / kQuantBlock : 0]);
    static_cast<typename Element::Stored*>(out)[row * in.num_columns + column] =
        Element::Write(product);
  }
}

bool IsAligned(const void* address, size_t num_bytes) {
  return reinterpret_cast<uintptr_t>(address) % num_bytes == 0;
}

template <class Element>
void LaunchFp8Blocks(const QuantInput& in, bool powers_of_two, uintptr_t stream, uint8_t* q,
                     float* scales) {
  const int64_t blocks = Blocks(in.num_rows, kQuantBlock) * Blocks(in.num_columns, kQuantBlock);
  if (in.num_columns % kWidth == 0 && IsAligned(q, kWidth) &&
      IsAligned(in.x, kWidth * sizeof(typename Element::Stored))) {
    MRL_LAUNCH((QuantizeFp8BlocksKernel<Element, true>), blocks, kBlockThreads, stream, in,
               powers_of_two, q, scales);
  } else {
    MRL_LAUNCH((QuantizeFp8BlocksKernel<Element, false>), blocks, kBlockThreads, stream, in,
               powers_of_two, q, scales);
  }
}

template <bool kFp8>
void LaunchFake(const QuantInput& in, int64_t group, uintptr_t stream, void* out) {
  const int64_t blocks = Blocks(in.num_rows * Blocks(in.num_columns, group), kWarps);
  switch (in.type) {
    case FloatType::kFloat32:
      MRL_LAUNCH((FakeQuantizeKernel<Float32Element, kFp8>), blocks, kThreads, stream, in, group,
                 out);
      return;
    case FloatType::kBfloat16:
      MRL_LAUNCH((FakeQuantizeKernel<Bfloat16Element, kFp8>), blocks, kThreads, stream, in, group,
                 out);
      return;
    case FloatType::kFloat16:
      MRL_LAUNCH((FakeQuantizeKernel<Float16Element, kFp8>), blocks, kThreads, stream, in, group,
                 out);
      return;
  }
}

template <bool kFp8>
void LaunchDequantize(const DequantInput& in, uintptr_t stream, void* out) {
  const int64_t parts = Blocks(in.num_columns, kThreads * kColumnsOfThread);
  const int64_t blocks = in.num_rows * parts;
  switch (in.type) {
    case FloatType::kFloat32:
      MRL_LAUNCH((DequantizeKernel<Float32Element, kFp8>), blocks, kThreads, stream, in, parts,
                 out);
      return;
    case FloatType::kBfloat16:
      MRL_LAUNCH((DequantizeKernel<Bfloat16Element, kFp8>), blocks, kThreads, stream, in, parts,
                 out);
      return;
    case FloatType::kFloat16:
      MRL_LAUNCH((DequantizeKernel<Float16Element, kFp8>), blocks, kThreads, stream, in, parts,
                 out);
      return;
  }
}

}  // namespace

void QuantizeFp8BlocksCuda(const QuantInput& in, bool powers_of_two, uintptr_t stream, uint8_t* q,
                           float* scales) {
  switch (in.type) {
    case FloatType::kFloat32:
      return LaunchFp8Blocks<Float32Element>(in, powers_of_two, stream, q, scales);
    case FloatType::kBfloat16:
      return LaunchFp8Blocks<Bfloat16Element>(in, powers_of_two, stream, q, scales);
    case FloatType::kFloat16:
      return LaunchFp8Blocks<Float16Element>(in, powers_of_two, stream, q, scales);
  }
}

void QuantizeInt8RowsCuda(const QuantInput& in, uintptr_t stream, uint8_t* q, float* scales) {
  const int64_t blocks = Blocks(in.num_rows, kWarps);
  switch (in.type) {
    case FloatType::kFloat32:
      MRL_LAUNCH(QuantizeInt8RowsKernel<Float32Element>, blocks, kThreads, stream, in, q, scales);
      return;
    case FloatType::kBfloat16:
      MRL_LAUNCH(QuantizeInt8RowsKernel<Bfloat16Element>, blocks, kThreads, stream, in, q, scales);
      return;
    case FloatType::kFloat16:
      MRL_LAUNCH(QuantizeInt8RowsKernel<Float16Element>, blocks, kThreads, stream, in, q, scales);
      return;
  }
}

void DequantizeFp8BlocksCuda(const DequantInput& in, uintptr_t stream, void* out) {
  LaunchDequantize<true>(in, stream, out);
}

void DequantizeInt8RowsCuda(const DequantInput& in, uintptr_t stream, void* out) {
  LaunchDequantize<false>(in, stream, out);
}

void FakeQuantizeFp8GroupsCuda(const QuantInput& in, int64_t group, uintptr_t stream, void* out) {
  LaunchFake<true>(in, group, stream, out);
}

void FakeQuantizeInt8RowsCuda(const QuantInput& in, uintptr_t stream, void* out) {
  LaunchFake<false>(in, in.num_columns, stream, out);
}

}  // namespace mrl
