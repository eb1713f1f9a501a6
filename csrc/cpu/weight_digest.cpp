#include "weight_digest.h"

#include <algorithm>

#include "cpu/packed.h"

#define MRL_BODY "cpu/weight_digest_body.h"
#include "cpu/for_each_target.h"

namespace mrl {

constexpr int64_t kDigestChunk = 1 << 16;  // elements per task

void WeightDigestCpu(const WeightDigestInput& in, int num_threads, uint64_t* sums) {
  const auto run = MRL_DISPATCH(SumWeights);
  const int64_t num_chunks = (in.group_size + kDigestChunk - 1) / kDigestChunk;
  const int threads = UseThreads(num_threads, in.num_groups * in.group_size) ? num_threads : 1;
  for (int64_t group = 0; group < in.num_groups; ++group) {
    uint64_t sum = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : sum) if (threads > 1)
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      const int64_t start = chunk * kDigestChunk;
      const int64_t count = std::min(kDigestChunk, in.group_size - start);
      sum += run(in.weights, in.type, group * in.group_size + start, count);
    }
    sums[group] = sum;
  }
}

}  // namespace mrl
