// Small kernels, right and wrong, for test_emulator.py. They are CUDA: test_cuda_source.py compiles
// them with nvcc too.
#include <cstdio>
#include <string>

#include "cuda/launch.h"

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

struct Arguments {
  const float* input;
  float* output;
  int64_t size;
};

// output[0] = the sum of 256 inputs, by warps. Without the barrier, warp 0 may read too early.
template <bool kBarrier>
__global__ void BlockSum(Arguments a) {
  __shared__ float partials[kWarps];
  const int lane = threadIdx.x % 32;
  const float sum = mrl::WarpSum(a.input[threadIdx.x]);
  if (lane == 0) partials[threadIdx.x / 32] = sum;
  if (kBarrier) __syncthreads();
  if (threadIdx.x < 32) {
    const float total = mrl::WarpSum(lane < kWarps ? partials[lane] : 0.0f);
    if (lane == 0) a.output[0] = total;
  }
}

// output[i] = input[i] + input[255 - i], twice through one array. Without the second barrier, a
// fast thread overwrites what a slow one has still to read.
template <bool kBarrier>
__global__ void Mirror(Arguments a) {
  __shared__ float values[kThreads];
  float sum = 0;
  for (int pass = 0; pass < 2; ++pass) {
    values[threadIdx.x] = pass ? a.input[threadIdx.x] : a.input[threadIdx.x] * 100;
    __syncthreads();
    sum += values[kThreads - 1 - threadIdx.x];
    if (kBarrier) __syncthreads();
  }
  a.output[threadIdx.x] = sum;
}

// One row of `size` outputs for each shuffle.
__global__ void Shuffles(Arguments a) {
  const int lane = threadIdx.x;
  float* out = a.output + lane;
  out[0] = __shfl_xor_sync(mrl::kFullWarp, a.input[lane], 5);
  out[a.size] = __shfl_down_sync(mrl::kFullWarp, a.input[lane], 3);
  out[2 * a.size] = __shfl_up_sync(mrl::kFullWarp, a.input[lane], 3);
  out[3 * a.size] = __shfl_sync(mrl::kFullWarp, a.input[lane], lane * 7);
  out[4 * a.size] = static_cast<float>(
      __shfl_down_sync(mrl::kFullWarp, static_cast<double>(a.input[lane]), 1, 8));
  out[5 * a.size] = static_cast<float>(
      __shfl_up_sync(mrl::kFullWarp, static_cast<long long>(lane) << 40, 1) >> 40);
  out[6 * a.size] = static_cast<float>(__shfl_xor_sync(mrl::kFullWarp, lane == 4, 1));
  out[7 * a.size] = static_cast<float>(__ballot_sync(mrl::kFullWarp, lane % 32 == 4));
  out[8 * a.size] = static_cast<float>(__any_sync(mrl::kFullWarp, lane == 40));
  __syncwarp();
}

// The sum of all inputs by many blocks: the last one to take a ticket adds the partial sums, in the
// order of blocks. With kArrival they are added as the blocks come, which is not one order.
template <bool kArrival>
__global__ void Ticket(Arguments a, float* partials, unsigned* ticket) {
  __shared__ bool last;
  float sum = 0;
  for (int64_t i = blockIdx.x * 32 + threadIdx.x; i < a.size; i += gridDim.x * 32) {
    sum += a.input[i];
  }
  sum = mrl::WarpSum(sum);
  if (threadIdx.x == 0) {
    partials[blockIdx.x] = sum;
    __threadfence();
    last = atomicAdd(ticket, 1u) == gridDim.x - 1;
    if (kArrival) a.output[0] += sum;
  }
  __syncthreads();
  if (last && threadIdx.x == 0 && !kArrival) {
    float total = 0;
    for (unsigned i = 0; i < gridDim.x; ++i) total += partials[i];
    a.output[0] = total;
  }
}

// Legal: threads past the size leave before the barrier.
__global__ void LeaveEarly(Arguments a) {
  __shared__ float values[kThreads];
  if (threadIdx.x >= a.size) return;
  values[threadIdx.x] = a.input[threadIdx.x];
  __syncthreads();
  a.output[threadIdx.x] = values[a.size - 1 - threadIdx.x];
}

__global__ void DivergentBarrier(Arguments a) {
  if (threadIdx.x < 64) {
    __syncthreads();  // here
  } else {
    __syncthreads();  // there
  }
  a.output[threadIdx.x] = 1;
}

__global__ void ShuffleAfterExit(Arguments a) {
  if (threadIdx.x == 37) return;
  a.output[threadIdx.x] = mrl::WarpSum(a.input[threadIdx.x]);
}

__global__ void ShuffleInBranch(Arguments a) {
  if (threadIdx.x % 2) {
    a.output[0] = __shfl_sync(mrl::kFullWarp, a.input[0], 0);
  }
  __syncthreads();
}

__global__ void PartialWarp(Arguments a) { a.output[0] = mrl::WarpSum(a.input[0]); }

__global__ void Trap(Arguments a) {
  if (a.size <= 3 || threadIdx.x != 3) return;
  printf("size: got %lld, expected at most 3", static_cast<long long>(a.size));
  __trap();
}

// Under nvcc, MRL_REQUIRE is an assertion.
__global__ void Require(Arguments a) {
  MRL_REQUIRE(a.size <= 3 || threadIdx.x != 3, "size: expected at most 3");
}

__global__ void Uninitialized(Arguments a) {
  __shared__ float values[kThreads];
  if (a.size < 0) values[threadIdx.x] = 0;
  a.output[threadIdx.x] = values[threadIdx.x];
  values[threadIdx.x] = 1;  // the next block must not see it
}

// Reads input[size - 1]; vectors of 4 from input + 1.
__global__ void ReadLast(Arguments a) { a.output[0] = a.input[a.size - 1]; }

__global__ void Misaligned(Arguments a) {
  a.output[0] = reinterpret_cast<const float4*>(a.input + 1)->x;
}

__global__ void IndexTooLarge(Arguments a) {
  __shared__ float values[kThreads];
  values[threadIdx.x + a.size] = 1;
  a.output[0] = values[0];
}

__global__ void Nothing(Arguments) {}

void RunNamed(const std::string& name, const Arguments& a, void* scratch) {
  float* partials = static_cast<float*>(scratch);
  unsigned* ticket = static_cast<unsigned*>(scratch) + 64;
  const uintptr_t stream = 0;
  const auto blocks = (a.size + 31) / 32;
  if (name == "block_sum") MRL_LAUNCH(BlockSum<true>, 1, kThreads, stream, a);
  if (name == "block_sum_racy") MRL_LAUNCH(BlockSum<false>, 1, kThreads, stream, a);
  if (name == "mirror") MRL_LAUNCH(Mirror<true>, 1, kThreads, stream, a);
  if (name == "mirror_racy") MRL_LAUNCH(Mirror<false>, 1, kThreads, stream, a);
  if (name == "shuffles") MRL_LAUNCH(Shuffles, 1, a.size, stream, a);
  if (name == "ticket") MRL_LAUNCH(Ticket<false>, 20, 32, stream, a, partials, ticket);
  if (name == "ticket_arrival") MRL_LAUNCH(Ticket<true>, 20, 32, stream, a, partials, ticket);
  if (name == "leave_early") MRL_LAUNCH(LeaveEarly, 1, kThreads, stream, a);
  if (name == "divergent_barrier") MRL_LAUNCH(DivergentBarrier, 2, kThreads, stream, a);
  if (name == "shuffle_after_exit") MRL_LAUNCH(ShuffleAfterExit, 2, kThreads, stream, a);
  if (name == "shuffle_in_branch") MRL_LAUNCH(ShuffleInBranch, 1, 64, stream, a);
  if (name == "partial_warp") MRL_LAUNCH(PartialWarp, 1, 40, stream, a);
  if (name == "trap") MRL_LAUNCH(Trap, 3, kThreads, stream, a);
  if (name == "require") MRL_LAUNCH(Require, 3, kThreads, stream, a);
  if (name == "uninitialized") MRL_LAUNCH(Uninitialized, 2, kThreads, stream, a);
  if (name == "read_last") MRL_LAUNCH(ReadLast, 1, 1, stream, a);
  if (name == "misaligned") MRL_LAUNCH(Misaligned, 1, 1, stream, a);
  if (name == "index_too_large") MRL_LAUNCH(IndexTooLarge, 1, kThreads, stream, a);
  if (name == "no_blocks") MRL_LAUNCH(Nothing, 0, kThreads, stream, a);
  if (name == "too_many_threads") MRL_LAUNCH(Nothing, blocks, 1025, stream, a);
}

}  // namespace

// Null, or the error of the launch. `scratch`: 65 zeroed words.
extern "C" __attribute__((visibility("default"))) const char* RunSample(const char* name,
                                                                        const float* input,
                                                                        float* output, int64_t size,
                                                                        void* scratch) {
  static std::string error;
  try {
    RunNamed(name, {input, output, size}, scratch);
    return nullptr;
  } catch (const std::exception& caught) {
    error = caught.what();
    return error.c_str();
  }
}
