// One thread per expert goes through a chunk of tokens in order, so positions need no atomics.
#include "cuda/launch.h"
#include "moe_permute.h"

namespace mrl {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// One warp per token.
__global__ void __launch_bounds__(kThreads) MoeIdsKernel(MoeIdsInput in, int32_t* ids) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (token >= in.num_tokens) return;  // exits whole warps, here and below
  const int lane = threadIdx.x % 32;
  int32_t* row = ids + token * in.width;
  int64_t count = 0;
  for (int64_t first = 0; first < in.num_experts; first += 32) {
    const int64_t expert = first + lane;
    const bool here = expert < in.num_experts && in.chosen[token * in.num_experts + expert] != 0;
    const unsigned all = __ballot_sync(kFullWarp, here);
    const int64_t place = count + __popc(all & ((1u << lane) - 1));
    MRL_REQUIRE(!here || place < in.width, "chosen: a token has more experts than `width`");
    if (here) row[place] = static_cast<int32_t>(expert);
    count += __popc(all);
  }
  for (int64_t k = count + lane; k < in.width; k += 32) row[k] = -1;
}

// Sets scratch[expert, chunk] to how often the chunk chooses the expert.
__global__ void __launch_bounds__(kThreads) MoeCountKernel(MoeSortInput in, int64_t num_chunks) {
  const int64_t chunk = blockIdx.x;
  const int64_t last = (chunk + 1) * kMoeChunk;
  const int64_t begin = chunk * kMoeChunk * in.topk;
  const int64_t end = (last < in.num_tokens ? last : in.num_tokens) * in.topk;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    MRL_REQUIRE(in.ids[i] >= -1 && in.ids[i] < in.num_experts,
                "ids must be from 0 to num_experts - 1, or -1");
  }
  for (int64_t expert = threadIdx.x; expert < in.num_experts; expert += kThreads) {
    int32_t count = 0;
    for (int64_t i = begin; i < end; ++i) count += in.ids[i] == expert;
    in.scratch[expert * num_chunks + chunk] = count;
  }
}

// Returns the sum over the preceding threads; `total` is that over all. Every thread must call it.
__device__ inline int32_t BlockPrefix(int32_t value, int32_t* total) {
  __shared__ int32_t sums[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t sum = value;
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t other = __shfl_up_sync(kFullWarp, sum, offset);
    if (lane >= offset) sum += other;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  int32_t before = 0, all = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) before += sums[i];
    all += sums[i];
  }
  __syncthreads();  // the next call writes `sums`
  *total = all;
  return before + sum - value;
}

// One block per expert: replaces the counts of its chunks by their exclusive prefix sums.
__global__ void __launch_bounds__(kThreads)
    MoeScanKernel(MoeSortInput in, int64_t num_chunks, int64_t* counts) {
  int32_t* chunks = in.scratch + blockIdx.x * num_chunks;
  int32_t before = 0;
  for (int64_t first = 0; first < num_chunks; first += kThreads) {
    const int64_t chunk = first + threadIdx.x;
    int32_t total;
    const int32_t sum = BlockPrefix(chunk < num_chunks ? chunks[chunk] : 0, &total);
    if (chunk < num_chunks) chunks[chunk] = before + sum;
    before += total;
  }
  if (threadIdx.x == 0) counts[blockIdx.x] = before;
}

__global__ void __launch_bounds__(kThreads)
    MoePlaceKernel(MoeSortInput in, int64_t num_chunks, MoeSortOutput out) {
  const int64_t chunk = blockIdx.x;
  const int64_t last = (chunk + 1) * kMoeChunk;
  const int64_t begin = chunk * kMoeChunk * in.topk;
  const int64_t end = (last < in.num_tokens ? last : in.num_tokens) * in.topk;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    if (in.ids[i] < 0) out.copies[i] = -1;
  }
  int32_t before = 0;  // copies of the experts of earlier rounds
  for (int64_t first = 0; first < in.num_experts; first += kThreads) {
    const int64_t expert = first + threadIdx.x;
    const bool exists = expert < in.num_experts;
    int32_t total;
    int32_t copy =
        before + BlockPrefix(exists ? static_cast<int32_t>(out.counts[expert]) : 0, &total);
    before += total;
    if (!exists) continue;
    copy += in.scratch[expert * num_chunks + chunk];
    int64_t last_token = -1;
    for (int64_t i = begin; i < end; ++i) {
      if (in.ids[i] != expert) continue;
      const int64_t token = i / in.topk;
      MRL_REQUIRE(token != last_token, "ids: a token must not have an expert twice");
      MRL_REQUIRE(copy < in.num_copies, "ids: there are more choices than num_copies");
      last_token = token;
      out.tokens[copy] = static_cast<int32_t>(token);
      out.cells[copy] = static_cast<int32_t>(token * in.num_experts + expert);
      out.copies[i] = copy++;
    }
  }
  MRL_REQUIRE(before == in.num_copies, "ids: the number of choices must be num_copies");
}

}  // namespace

void MoeIdsCuda(const MoeIdsInput& in, uintptr_t stream, int32_t* ids) {
  if (in.num_tokens == 0) return;
  MRL_LAUNCH(MoeIdsKernel, Blocks(in.num_tokens, kWarps), kThreads, stream, in, ids);
}

void MoeSortCuda(const MoeSortInput& in, uintptr_t stream, const MoeSortOutput& out) {
  const int64_t num_chunks = Blocks(in.num_tokens, kMoeChunk);
  if (num_chunks > 0) MRL_LAUNCH(MoeCountKernel, num_chunks, kThreads, stream, in, num_chunks);
  MRL_LAUNCH(MoeScanKernel, in.num_experts, kThreads, stream, in, num_chunks, out.counts);
  if (num_chunks > 0) MRL_LAUNCH(MoePlaceKernel, num_chunks, kThreads, stream, in, num_chunks, out);
}

}  // namespace mrl
