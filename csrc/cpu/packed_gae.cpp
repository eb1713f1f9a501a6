#include "packed_gae.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu/packed.h"

namespace mrl {

constexpr int kGaeStrands = 4;  // sequences processed together
constexpr int kGaeBlock = 128;  // tokens of each per step; the buffers stay in L1

struct GaeStrand {
  const float* rewards;
  const float* values;
  const uint8_t* loss_mask;
  float* advantages;
  float* returns;
  double lam;
  int64_t end;      // tokens still to do; blocks are taken from the end
  double next = 0;  // X of the token after the block
  int size = 0;     // tokens of the block
};

struct GaeBlock {
  double add[kGaeBlock];
  double scale[kGaeBlock];
};

}  // namespace mrl

#define MRL_BODY "cpu/packed_gae_body.h"
#include "cpu/for_each_target.h"

namespace mrl {

void PackedGaeCpu(const PackedGaeInput& in, int num_threads, float* advantages, float* returns) {
  CheckSequences(in.cu_seqlens, in.num_sequences, in.num_tokens);
  for (int64_t i = 0; in.seq_lam && i < in.num_sequences; ++i) {
    if (in.seq_lam[i] >= 0 && in.seq_lam[i] <= 1) continue;
    throw std::invalid_argument("lam: got " + std::to_string(in.seq_lam[i]) + " for sequence " +
                                std::to_string(i) + ", expected between 0 and 1");
  }
  const auto run = MRL_DISPATCH(PackedGaeStrands);
  const int threads = UseThreads(num_threads, in.num_tokens) ? num_threads : 1;
  // Process fewer together if threads would be idle otherwise; the bits do not depend on it.
  const int64_t together = std::clamp<int64_t>(in.num_sequences / threads, 1, kGaeStrands);
  const int64_t num_groups = (in.num_sequences + together - 1) / together;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t group = 0; group < num_groups; ++group) {
    GaeStrand strands[kGaeStrands] = {};
    const int64_t first = group * together;
    for (int64_t i = first; i < std::min(first + together, in.num_sequences); ++i) {
      const int64_t start = in.cu_seqlens[i];
      strands[i - first] = {
          in.rewards + start,          in.values + start, in.loss_mask + start,
          advantages + start,          returns + start,   in.seq_lam ? in.seq_lam[i] : in.lam,
          in.cu_seqlens[i + 1] - start};
    }
    run(in.gamma, strands);
  }
}

}  // namespace mrl
