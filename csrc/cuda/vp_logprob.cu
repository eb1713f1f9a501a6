// Forward: one warp per tile, without barriers or shared memory. Combine: one warp per row, one
// lane per tile. Backward: elementwise. The kernels are limited by bandwidth, so every logit is
// read once in each direction and costs one exp2. Whole blocks are loaded without branches between
// the loads; the rest of a tile or row, and unaligned rows, column by column.
#include <cmath>

#include "cuda/launch.h"
#include "cuda/logits.h"
#include "vp_logprob.h"

namespace mrl {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kUnroll = 4;  // vectors in flight per thread
constexpr float kLog2e = 1.44269504088896341f;

__device__ inline bool Counts(const uint8_t* mask, int64_t row) {
  return mask == nullptr || mask[row] != 0;
}

// The sums of e and of e (x - top), with e = exp(x - top).
struct TileSums {
  float top, total, weighted;
};

// The same sums relative to a larger `top`.
__device__ inline TileSums Rebase(const TileSums& sums, float top) {
  if (sums.top == -INFINITY) return {top, 0, 0};  // no column yet; 0 * inf would be NaN
  const float shift = sums.top - top, scale = ExpOf2(shift * kLog2e);
  return {top, sums.total * scale, (sums.weighted + sums.total * shift) * scale};
}

__device__ inline float LargerOrNanf(float a, float b) { return b > a || b != b ? b : a; }

template <LogitType kType>
__global__ void __launch_bounds__(kThreads) VpStatsKernel(VpStatsInput in, float* tiles) {
  const VpLogits& shape = in.shape;
  const int64_t num_tiles = shape.num_columns / in.tile;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t row = warp / num_tiles, tile = warp % num_tiles;
  if (row >= shape.num_rows) return;  // exits whole warps, here and below
  float* fields = tiles + (row * num_tiles + tile) * kTileFields;
  if (!Counts(shape.mask, row)) {
    if (threadIdx.x % 32 < kTileFields) fields[threadIdx.x % 32] = 0;
    return;
  }
  const auto* x =
      static_cast<const StoredLogit<kType>*>(in.logits) + row * shape.row_stride + tile * in.tile;
  const bool aligned = IsAligned(x), vectors = aligned && in.tile % kVector<kType> == 0;
  const int lane = threadIdx.x % 32;
  const float scale = shape.inv_temperature;

  // The lane of a column is (column / kVector) % 32, whatever the alignment.
  constexpr int kStride = 32 * kVector<kType>, kBlock = kUnroll * kStride;
  TileSums sums{-INFINITY, 0, 0};
  for (int64_t start = 0; start < in.tile; start += kBlock) {
    const int64_t column = start + lane * kVector<kType>;
    float values[kUnroll * kVector<kType>];
    if (aligned && start + kBlock <= in.tile) {
      ReadWhole<kType, kUnroll>(x + column, kStride, values);
    } else {
      ReadSome<kType, kUnroll>(x, column, kStride, in.tile, vectors, values);
    }
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kUnroll * kVector<kType>; ++i) largest = LargerOrNanf(largest, values[i]);
    // A positive scale and rounding both preserve the order of logits.
    const float top = LargerOrNanf(sums.top, largest * scale);
    if (top == -INFINITY) continue;
    if (top != sums.top) sums = Rebase(sums, top);
#pragma unroll
    for (int i = 0; i < kUnroll * kVector<kType>; ++i) {
      const float y = fmaf(values[i], scale, -top), e = ExpOf2(y * kLog2e);
      sums.total += e;
      sums.weighted += e == 0 ? 0 : e * y;
    }
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    const TileSums other{__shfl_xor_sync(kFullWarp, sums.top, offset),
                         __shfl_xor_sync(kFullWarp, sums.total, offset),
                         __shfl_xor_sync(kFullWarp, sums.weighted, offset)};
    const float top = LargerOrNanf(sums.top, other.top);
    if (top == -INFINITY) continue;  // the same in both lanes, so both skip
    const TileSums a = Rebase(sums, top), b = Rebase(other, top);
    sums = {top, a.total + b.total, a.weighted + b.weighted};
  }
  if (lane != 0) return;
  fields[0] = sums.top;
  fields[1] = sums.total;
  fields[2] = sums.weighted;
  const int64_t label = shape.labels[row] - shape.vocab_start - tile * in.tile;
  const bool here = label >= 0 && label < in.tile;
  fields[3] = here ? DeviceLogits<kType>::Read(x[label]) : 0;
}

__global__ void __launch_bounds__(kThreads)
    VpCombineKernel(VpCombineInput in, VpCombineOutput out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= in.num_rows) return;  // exits whole warps
  const int lane = threadIdx.x % 32;
  const int64_t num_tiles = in.num_ranks * in.tiles_per_rank;
  const int64_t label_tile = in.labels[row] / in.tile;
  if (!Counts(in.mask, row)) {
    if (lane == 0) out.logprobs[row] = out.lse[row] = out.entropy[row] = 0;
    return;
  }
  const auto fields = [&](int64_t k) {
    return in.tiles + ((k / in.tiles_per_rank * in.num_rows + row) * in.tiles_per_rank +
                       k % in.tiles_per_rank) *
                          kTileFields;
  };
  double top = -INFINITY;
  for (int64_t k = lane; k < num_tiles; k += 32) {
    if (fields(k)[0] > top) top = fields(k)[0];
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    const double other = __shfl_xor_sync(kFullWarp, top, offset);
    if (other > top) top = other;
  }
  double total = 0, weighted = 0;
  for (int64_t k = lane; k < num_tiles; k += 32) {
    const float* tile = fields(k);
    if (tile[1] == 0) continue;
    const double shift = tile[0] - top, scale = exp(shift);
    total += scale * tile[1];
    weighted += scale * (tile[2] + shift * tile[1]);
  }
  total = WarpSum(total);
  weighted = WarpSum(weighted);
  if (lane != 0) return;
  const bool known = in.labels[row] >= 0 && label_tile < num_tiles;
  const double label = known ? fields(label_tile)[3] : NAN, target = label * in.inv_temperature;
  const double log_total = log(total), entropy = log_total - weighted / total;
  const double logprob = (target - top) - log_total;
  out.lse[row] = static_cast<float>(top + log_total);
  // Only rounding can cross 0; NaN is kept.
  out.logprobs[row] = static_cast<float>(logprob > 0 ? 0 : logprob);
  out.entropy[row] = static_cast<float>(entropy < 0 ? 0 : entropy);
}

template <LogitType kType>
__global__ void __launch_bounds__(kThreads)
    VpBackwardKernel(VpBackwardInput in, void* grad, int64_t grad_stride, int64_t parts) {
  typedef StoredLogit<kType> Element;
  const VpLogits& shape = in.shape;
  const int64_t row = blockIdx.x / parts, part = blockIdx.x % parts;
  const Element* x = static_cast<const Element*>(in.logits) + row * shape.row_stride;
  Element* out = static_cast<Element*>(grad) + row * grad_stride;
  const float g = in.grad_logprobs[row];
  const float g_entropy = in.grad_entropy == nullptr ? 0.0f : in.grad_entropy[row];
  const bool counts = Counts(shape.mask, row) && (g != 0 || g_entropy != 0);
  const bool aligned = IsAligned(x) && IsAligned(out);
  const bool vectors = aligned && shape.num_columns % kVector<kType> == 0;
  const float scale = shape.inv_temperature;
  const float lse = counts ? in.lse[row] : 0, entropy = counts ? in.entropy[row] : 0;
  const float offset = -scale * (g + g_entropy * entropy), slope = -scale * g_entropy;
  const int64_t label = shape.labels[row] - shape.vocab_start;

  constexpr int kStride = kThreads * kVector<kType>, kBlock = kUnroll * kStride;
  const int64_t start = part * kBlock, first = start + threadIdx.x * kVector<kType>;
  const bool whole = aligned && start + kBlock <= shape.num_columns;
  float values[kUnroll * kVector<kType>] = {};
  if (counts) {
    if (whole) {
      ReadWhole<kType, kUnroll>(x + first, kStride, values);
    } else {
      ReadSome<kType, kUnroll>(x, first, kStride, shape.num_columns, vectors, values);
    }
#pragma unroll
    for (int i = 0; i < kUnroll * kVector<kType>; ++i) {
      const int64_t column = first + i / kVector<kType> * kStride + i % kVector<kType>;
      const float y = values[i] * scale - lse, p = ExpOf2(y * kLog2e);
      const float rest = p == 0 ? 0 : p * (slope * y + offset);
      values[i] = column == label ? rest + g * scale : rest;
    }
  }
  if (whole) {
    WriteWhole<kType, kUnroll>(out + first, kStride, values);
  } else {
    WriteSome<kType, kUnroll>(out, first, kStride, shape.num_columns, vectors, values);
  }
}

template <LogitType kType>
void LaunchStats(const VpStatsInput& in, float* tiles, uintptr_t stream) {
  const int64_t warps = in.shape.num_rows * (in.shape.num_columns / in.tile);
  MRL_LAUNCH(VpStatsKernel<kType>, Blocks(warps, kWarps), kThreads, stream, in, tiles);
}

template <LogitType kType>
void LaunchBackward(const VpBackwardInput& in, void* grad, int64_t grad_stride, uintptr_t stream) {
  const int64_t parts = Blocks(in.shape.num_columns, kThreads * kUnroll * kVector<kType>);
  MRL_LAUNCH(VpBackwardKernel<kType>, in.shape.num_rows * parts, kThreads, stream, in, grad,
             grad_stride, parts);
}

}  // namespace

void VpLogprobStatsCuda(const VpStatsInput& in, float* tiles, uintptr_t stream) {
  if (in.shape.num_rows == 0) return;
  if (in.shape.type == LogitType::kFloat32) {
    LaunchStats<LogitType::kFloat32>(in, tiles, stream);
  } else if (in.shape.type == LogitType::kBfloat16) {
    LaunchStats<LogitType::kBfloat16>(in, tiles, stream);
  } else {
    LaunchStats<LogitType::kFloat16>(in, tiles, stream);
  }
}

void VpLogprobCombineCuda(const VpCombineInput& in, const VpCombineOutput& out, uintptr_t stream) {
  if (in.num_rows == 0) return;
  MRL_LAUNCH(VpCombineKernel, Blocks(in.num_rows, kWarps), kThreads, stream, in, out);
}

void VpLogprobBackwardCuda(const VpBackwardInput& in, void* grad, int64_t grad_stride,
                           uintptr_t stream) {
  if (in.shape.num_rows == 0) return;
  if (in.shape.type == LogitType::kFloat32) {
    LaunchBackward<LogitType::kFloat32>(in, grad, grad_stride, stream);
  } else if (in.shape.type == LogitType::kBfloat16) {
    LaunchBackward<LogitType::kBfloat16>(in, grad, grad_stride, stream);
  } else {
    LaunchBackward<LogitType::kFloat16>(in, grad, grad_stride, stream);
  }
}

}  // namespace mrl
