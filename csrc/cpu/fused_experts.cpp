#include "fused_experts.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "cpu/target.h"

namespace mrl {
namespace {

constexpr int64_t kTokensTogether = 32;  // of one expert, which share the loads of its weights
constexpr int64_t kWorthThreads = int64_t{1} << 18;  // multiplications from which threads pay off

// Neighbours in the list of pairs that have the same expert.
struct ExpertTileRange {
  int64_t expert, first, count;
};

// The memory of one thread. Rows that are read in whole vectors have room for one more.
struct ExpertScratch {
  explicit ExpertScratch(const FusedExpertsInput& in)
      : product_stride(2 * in.expert_size + kLanes),
        activated_stride(in.expert_size + kLanes),
        inputs(kTokensTogether * in.hidden_size),
        products(kTokensTogether * product_stride),
        activated(kTokensTogether * activated_stride),
        pairs(2 * (in.expert_size + kLanes)),
        widened(in.type == FloatType::kFloat32 ? 0
                                               : kEight * std::max(in.hidden_size, in.expert_size)),
        rows(kTokensTogether) {}

  int64_t product_stride, activated_stride;
  std::vector<float> inputs;     // [tokens, H]
  std::vector<float> products;   // [tokens, 2 I]
  std::vector<float> activated;  // [tokens, I]
  std::vector<float> pairs;      // [2, I], gate and up of one token, not interleaved
  std::vector<float> widened;    // eight rows of a half-precision weight
  std::vector<float*> rows;      // where the results of a projection go
};

// Returns the numbers token * k + place, sorted by expert, without those that have none; `starts`
// [E + 1] becomes where each expert begins. Throws std::invalid_argument for an id out of range.
std::vector<int64_t> SortByExpert(const FusedExpertsInput& in, std::vector<int64_t>* starts) {
  const int64_t num_pairs = in.num_tokens * in.top_k;
  starts->assign(in.num_experts + 1, 0);
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const int64_t id = in.ids[pair];
    if (id < -1 || id >= in.num_experts) {
      throw std::invalid_argument("fused_experts: token " + std::to_string(pair / in.top_k) +
                                  " has expert " + std::to_string(id) + ", expected -1 to " +
                                  std::to_string(in.num_experts - 1));
    }
    if (id >= 0) ++(*starts)[id + 1];
  }
  for (int64_t expert = 0; expert < in.num_experts; ++expert) {
    (*starts)[expert + 1] += (*starts)[expert];
  }
  std::vector<int64_t> sorted(starts->back()), next(*starts);
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    if (in.ids[pair] >= 0) sorted[next[in.ids[pair]]++] = pair;
  }
  return sorted;
}

}  // namespace
}  // namespace mrl

#define MRL_BODY "cpu/fused_experts_body.h"
#include "cpu/for_each_target.h"

namespace mrl {

void FusedExpertsCpu(const FusedExpertsInput& in, int num_threads, void* out) {
  const auto run = MRL_DISPATCH(ExpertTile);
  const auto sum = MRL_DISPATCH(SumToken);
  std::vector<int64_t> starts;
  const std::vector<int64_t> sorted = SortByExpert(in, &starts);
  std::vector<ExpertTileRange> tiles;
  for (int64_t expert = 0; expert < in.num_experts; ++expert) {
    for (int64_t first = starts[expert]; first < starts[expert + 1]; first += kTokensTogether) {
      const int64_t count = std::min(kTokensTogether, starts[expert + 1] - first);
      tiles.push_back({expert, first, count});
    }
  }
  std::vector<float> outputs(in.num_tokens * in.top_k * in.hidden_size);
  const int64_t num_tiles = static_cast<int64_t>(tiles.size());
  const int64_t products = starts.back() * in.hidden_size * in.expert_size * 3;
  const int threads = products >= kWorthThreads ? num_threads : 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    ExpertScratch scratch(in);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < num_tiles; ++i) {
      const ExpertTileRange& tile = tiles[i];
      run(in, tile.expert, sorted.data() + tile.first, tile.count, &scratch, outputs.data());
    }
#pragma omp for schedule(static)
    for (int64_t token = 0; token < in.num_tokens; ++token) {
      sum(in, token, outputs.data(), out);
    }
  }
}

}  // namespace mrl
