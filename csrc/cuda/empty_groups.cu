#include <algorithm>

#include "cuda/launch.h"
#include "empty_groups.h"

namespace mrl {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 64;  // per group: about half of an H100's multiprocessors

// Blocks of a group with rows return immediately.
template <class Word>
__global__ void __launch_bounds__(kThreads)
    ZeroEmptyGroupsKernel(Word* values, const int32_t* ends, int64_t num_words,
                          int64_t num_blocks) {
  const int64_t group = blockIdx.x / num_blocks;
  const int32_t start = group == 0 ? 0 : ends[group - 1];
  if (ends[group] != start) return;
  Word* const out = values + group * num_words;
  const int64_t first = (blockIdx.x % num_blocks) * kThreads + threadIdx.x;
  for (int64_t i = first; i < num_words; i += num_blocks * kThreads) out[i] = Word{};
}

template <class Word>
void Zero(const EmptyGroupsInput& in, uintptr_t stream) {
  const int64_t num_words = in.group_bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t num_blocks = std::min(kMaxBlocks, (num_words + kThreads - 1) / kThreads);
  MRL_LAUNCH(ZeroEmptyGroupsKernel<Word>, in.num_groups * num_blocks, kThreads, stream,
             static_cast<Word*>(in.values), in.ends, num_words, num_blocks);
}

}  // namespace

void ZeroEmptyGroupsCuda(const EmptyGroupsInput& in, uintptr_t stream) {
  if (in.num_groups == 0 || in.group_bytes == 0) return;
  const uintptr_t bits = reinterpret_cast<uintptr_t>(in.values) | in.group_bytes;
  if (bits % sizeof(uint4) == 0) return Zero<uint4>(in, stream);
  Zero<uint8_t>(in, stream);
}

}  // namespace mrl
