#include "seeded_sample.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "cpu/target.h"
#include "portable.h"

namespace mrl {

constexpr int64_t kSampleBlock = 64;  // columns that are tested together
constexpr double kSampleRange = 60;   // a row with a best s beyond this is left open

// What torch's arithmetic may differ by from this file's, with room to spare.
constexpr double kSampleLogError = 2e-6;     // logs in fp32: 16 units in the last place
constexpr double kSampleLog64Error = 1e-12;  // logs and sums in fp64: 4,000 units
constexpr double kSampleUnitError = 4e-16;   // u: 3 units

MRL_FN uint32_t MurmurRotate(uint32_t x, int bits) { return (x << bits) | (x >> (32 - bits)); }

// One block of MurmurHash3 (x86, 32 bits).
MRL_FN uint32_t MurmurBlock(uint32_t state, uint32_t block) {
  block = MurmurRotate(block * 0xCC9E2D51, 15) * 0x1B873593;
  return MurmurRotate(state ^ block, 13) * 5 + 0xE6546B64;
}

}  // namespace mrl

#define MRL_BODY "cpu/seeded_sample_body.h"
#include "cpu/for_each_target.h"

namespace mrl {

void SeededSampleCpu(const SeededSampleInput& in, int num_threads, int64_t* ids) {
  const auto run = MRL_DISPATCH(SampleRowOf);
  const int64_t threads = std::clamp<int64_t>(num_threads, 1, std::max<int64_t>(in.num_rows, 1));
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t row = 0; row < in.num_rows; ++row) ids[row] = run(in, row);
}

}  // namespace mrl
