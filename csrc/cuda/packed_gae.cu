#include "cuda/launch.h"
#include "cuda/packed.h"
#include "packed_gae.h"

namespace mrl {
namespace {

// A thread block processes a sequence in chunks from the end. Thread t has kItems neighbouring
// tokens; "first" below means nearest to the end of the sequence.
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kItems = 4;
constexpr int kChunk = kThreads * kItems;

struct Items {
  float reward[kItems];
  float value[kItems];
  bool inside[kItems];
  bool keep[kItems];
};

// Loads tokens last, last - 1, ...; those before `start` are not read and count as masked.
__device__ inline Items LoadItems(const PackedGaeInput& in, int64_t start, int64_t last) {
  Items items;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int64_t token = last - k;
    items.inside[k] = token >= start;
    items.reward[k] = items.inside[k] ? in.rewards[token] : 0.0f;
    items.value[k] = items.inside[k] ? in.values[token] : 0.0f;
    items.keep[k] = items.inside[k] && in.loss_mask[token] != 0;
  }
  return items;
}

__global__ void __launch_bounds__(kThreads)
    PackedGaeKernel(PackedGaeInput in, float* advantages, float* returns) {
  // Double buffers: the next chunk may write while slow warps still read this one.
  __shared__ double warp_add[2][kWarps];
  __shared__ double warp_scale[2][kWarps];
  const int64_t sequence = blockIdx.x;
  const int64_t start = in.cu_seqlens[sequence], end = in.cu_seqlens[sequence + 1];
  const double lam = in.seq_lam ? static_cast<double>(in.seq_lam[sequence]) : in.lam;
  RequireSequence(in.cu_seqlens, sequence, in.num_sequences, in.num_tokens);
  MRL_REQUIRE(lam >= 0 && lam <= 1, "lam must be between 0 and 1 for every sequence");
  const double lam_gamma = lam * in.gamma;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  double carry = 0;  // X of the token after the chunk
  int turn = 0;
  int64_t last = end - 1 - static_cast<int64_t>(threadIdx.x) * kItems;  // this thread's first token
  Items coming = LoadItems(in, start, last);
  for (int64_t chunk_end = end; chunk_end > start; chunk_end -= kChunk, last -= kChunk, turn ^= 1) {
    const Items items = coming;
    coming = LoadItems(in, start, last - kChunk);  // in flight while this chunk is scanned

    GaeMap maps[kItems];
    GaeMap total{0.0, 1.0};
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      maps[k] = GaeToken(items.keep[k], items.reward[k], items.value[k], lam, lam_gamma);
      total = GaeCompose(total, maps[k]);
    }
    for (int offset = 1; offset < 32; offset *= 2) {
      const GaeMap before{__shfl_up_sync(kFullWarp, total.add, offset),
                          __shfl_up_sync(kFullWarp, total.scale, offset)};
      if (lane >= offset) total = GaeCompose(before, total);
    }
    if (lane == 31) {
      warp_add[turn][warp] = total.add;
      warp_scale[turn][warp] = total.scale;
    }
    GaeMap before{__shfl_up_sync(kFullWarp, total.add, 1),
                  __shfl_up_sync(kFullWarp, total.scale, 1)};
    if (lane == 0) before = {0.0, 1.0};
    __syncthreads();

    double next = carry;
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) next = carry;
      carry = GaeApply({warp_add[turn][w], warp_scale[turn][w]}, carry);
    }
    next = GaeApply(before, next);
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const double value = items.value[k];
      const double advantage = GaeAdvantage(items.reward[k], value, in.gamma, next);
      if (items.inside[k]) {
        advantages[last - k] = items.keep[k] ? static_cast<float>(advantage) : 0.0f;
        returns[last - k] = items.keep[k] ? static_cast<float>(advantage + value) : 0.0f;
      }
      next = GaeApply(maps[k], next);
    }
  }
}

}  // namespace

void PackedGaeCuda(const PackedGaeInput& in, uintptr_t stream, float* advantages, float* returns) {
  if (in.num_sequences == 0) return;
  MRL_LAUNCH(PackedGaeKernel, in.num_sequences, kThreads, stream, in, advantages, returns);
}

}  // namespace mrl
