#include "norm_rope.h"

#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/target.h"

#define MRL_BODY "cpu/norm_rope_body.h"
#include "cpu/for_each_target.h"

namespace mrl {
namespace {

constexpr int64_t kWorthThreads = int64_t{1} << 18;  // elements from which threads pay off

}  // namespace

void RmsNormCpu(const RmsNormInput& in, int num_threads, void* out, void* sum) {
  const auto run = MRL_DISPATCH(RmsNormToken);
  const int64_t elements = in.num_tokens * in.num_heads * in.size;
  const int threads = elements >= kWorthThreads ? num_threads : 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> row(in.size + kLanes);
#pragma omp for schedule(static)
    for (int64_t token = 0; token < in.num_tokens; ++token) run(in, token, row.data(), out, sum);
  }
}

void RotateCpu(const RotateInput& in, int num_threads) {
  for (int64_t token = 0; token < in.num_tokens; ++token) {
    if (in.positions[token] >= 0 && in.positions[token] < in.num_positions) continue;
    throw std::invalid_argument("rotate: token " + std::to_string(token) + " has position " +
                                std::to_string(in.positions[token]) + ", expected 0 to " +
                                std::to_string(in.num_positions - 1));
  }
  const auto run = MRL_DISPATCH(RotateToken);
  const int64_t heads = in.query.num_heads + in.key.num_heads;
  const int threads = in.num_tokens * heads * in.size >= kWorthThreads ? num_threads : 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t token = 0; token < in.num_tokens; ++token) run(in, token);
}

}  // namespace mrl
