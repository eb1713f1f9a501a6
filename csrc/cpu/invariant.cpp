#include "invariant.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#define MRL_BODY "cpu/invariant_body.h"
#include "cpu/for_each_target.h"

namespace mrl {
namespace {

constexpr int64_t kWorthThreads = 1 << 18;  // multiplications from which threads pay off

}  // namespace

void InvariantLinearCpu(const LinearInput& in, int num_threads, float* out) {
  const auto run = MRL_DISPATCH(LinearRows);
  const bool shared = in.num_rows * in.num_inputs * in.num_outputs >= kWorthThreads;
  const int64_t parts = shared ? std::min<int64_t>(num_threads, in.num_rows) : 1;
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
  for (int64_t part = 0; part < parts; ++part) {
    run(in, in.num_rows * part / parts, in.num_rows * (part + 1) / parts, out);
  }
}

void InvariantAttentionCpu(const AttentionInput& in, int num_threads, float* out) {
  const auto run = MRL_DISPATCH(AttendHead);
  int64_t longest = 0, products = 0;
  for (int64_t i = 0; i < in.num_queries; ++i) {
    const int64_t first = in.first_key[i], count = in.key_count[i];
    if (first < 0 || count < 1 || first + count > in.num_keys) {
      throw std::invalid_argument("attention: query " + std::to_string(i) + " sees " +
                                  std::to_string(count) + " keys from " + std::to_string(first) +
                                  " on, expected at least 1 of " + std::to_string(in.num_keys));
    }
    longest = std::max(longest, count);
    products += count * in.num_heads * in.key_size;
  }
  const int threads = products >= kWorthThreads ? num_threads : 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> scores((longest + kLanes - 1) / kLanes * kLanes);
#pragma omp for schedule(dynamic, 16)
    for (int64_t query = 0; query < in.num_queries; ++query) {
      for (int64_t head = 0; head < in.num_heads; ++head) run(in, query, head, scores.data(), out);
    }
  }
}

void InvariantSiluCpu(const float* x, int64_t count, int num_threads, float* out) {
  const auto run = MRL_DISPATCH(SiluRun);
  const int64_t parts = count >= kWorthThreads ? num_threads : 1;
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = count * part / parts;
    run(x + first, count * (part + 1) / parts - first, out + first);
  }
}

}  // namespace mrl
