// One row of the seeded sampler.
//
// No include guard: compiled once for each instruction set, see cpu/for_each_target.h.

// Tokens that cannot win are dropped without a logarithm. Since E >= 1 - u, a token whose s is at
// least `best` has 1 - u <= p exp(-best). Both sides are computed in fp32, times 2^31, and the
// right one is enlarged by at least 0.7%, which covers all rounding. A dropped token is hence 0.006
// or more below `best`, further than the margins of both reach. About ln V tokens of a row remain.

// The left side, of which (2^32 - 1 - hash) / 2 is a lower bound. The sides are compared as the
// bits of floats: negative numbers and NaN on the right side, as unsigned numbers, are above all
// others and drop nothing.
MRL_FN uint32_t SampleGap(uint32_t hash) {
  const float gap = static_cast<float>(static_cast<int32_t>(~hash >> 1));
  uint32_t bits;
  std::memcpy(&bits, &gap, sizeof(bits));
  return bits;
}

struct ProbScore {
  typedef float Value;
  static constexpr double kLogError = kSampleLogError;  // the log is torch's, in fp32
  float scale = 0;
  MRL_FN void Raise(double best) { scale = static_cast<float>(std::exp(-best) * 0x1.03p31); }
  MRL_FN uint32_t Bound(float prob) const {
    const float bound = prob * scale;
    uint32_t bits;
    std::memcpy(&bits, &bound, sizeof(bits));
    return bits;
  }
  static MRL_FN double Log(float prob) {
    return static_cast<float>(std::log(static_cast<double>(prob)));
  }
};

// exp(x) is bounded from above by the float whose bits are linear in x: 2^k (1 + f) >= 2^(k + f).
template <class T>
struct LogProbScore {
  typedef T Value;
  static constexpr double kLogError = 0;
  T best = 0;
  MRL_FN void Raise(double to) { best = static_cast<T>(to); }
  MRL_FN uint32_t Bound(T logprob) const {
    constexpr float kBitsPerLog = 0x1.715476p23f, kOne = (127 + 31) * 0x1p23f, kSlack = 0x1.5p16f;
    float x = static_cast<float>(logprob - best);
    x = x < 1.0f ? x : 1.0f;      // 1 for NaN: it drops nothing
    x = x > -60.0f ? x : -60.0f;  // the bound is below 1 then, and every gap but 0 above it
    return static_cast<uint32_t>(static_cast<int32_t>(x * kBitsPerLog + (kOne + kSlack)));
  }
  static MRL_FN double Log(T logprob) { return logprob; }
};

MRL_FN uint32_t SampleHash(uint32_t state, uint32_t column) {
  uint32_t hash = MurmurBlock(state, column) ^ 16;
  hash = (hash ^ (hash >> 16)) * 0x85EBCA6B;
  hash = (hash ^ (hash >> 13)) * 0xC2B2AE35;
  return hash ^ (hash >> 16);
}

template <class Score>
struct SampleRow {
  Score score;
  int64_t best = -1;
  double best_s = -kSampleRange, best_margin = 0;
  double rival = -kSampleRange;  // the largest s that another token may have
  bool odd = false;              // the row has a NaN or an infinity

  // Takes the logarithms of a token if it may win.
  inline void Consider(int64_t column, typename Score::Value value, uint32_t hash) {
    if (SampleGap(hash) > score.Bound(value)) return;
    const double u = static_cast<double>(hash) / 4294967295.0;
    double log_u = std::log(u);
    if (log_u < -DBL_MAX) log_u = -DBL_MAX;
    if (log_u > -0x1p-32) log_u = -0x1p-32;
    const double gumbel = -std::log(-log_u), logprob = Score::Log(value), s = logprob + gumbel;
    if (s == -HUGE_VAL) return;
    if (!(s < HUGE_VAL)) {
      odd = true;
      return;
    }
    // The second term is for u, of which one unit in the last place changes log E by that / E.
    const double margin = kSampleLog64Error * (1 + std::abs(gumbel) + std::abs(logprob)) +
                          kSampleUnitError / -log_u + Score::kLogError * (1 + std::abs(logprob));
    if (s <= best_s) {
      rival = std::max(rival, s + margin);
      return;
    }
    if (best >= 0) rival = std::max(rival, best_s + best_margin);
    best = column;
    best_s = s;
    best_margin = margin;
    score.Raise(std::min(s, kSampleRange));
  }
};

// Returns the id of a row, or -1 to leave it open. Whole blocks are tested before any of their
// tokens is looked at.
template <class Score>
inline int64_t SampleOne(const typename Score::Value* values, int64_t num_columns, uint32_t state) {
  SampleRow<Score> row;
  row.score.Raise(-kSampleRange);
  uint32_t hashes[kSampleBlock];
  for (int64_t first = 0; first < num_columns; first += kSampleBlock) {
    const typename Score::Value* block = values + first;
    const int64_t size = std::min(kSampleBlock, num_columns - first);
    if (size == kSampleBlock) {
      const Score score = row.score;
      uint32_t any = 0;
      for (int i = 0; i < kSampleBlock; ++i) {
        hashes[i] = SampleHash(state, static_cast<uint32_t>(first) + i);
        any |= SampleGap(hashes[i]) <= score.Bound(block[i]);
      }
      if (!any) continue;
    } else {
      for (int i = 0; i < size; ++i)
        hashes[i] = SampleHash(state, static_cast<uint32_t>(first) + i);
    }
    for (int i = 0; i < size; ++i) row.Consider(first + i, block[i], hashes[i]);
  }
  const bool certain = row.best >= 0 && !row.odd && row.best_s < kSampleRange &&
                       row.best_s - row.best_margin > row.rival;
  return certain ? row.best : -1;
}

inline int64_t SampleRowOf(const SeededSampleInput& in, int64_t row) {
  const uint64_t seed = static_cast<uint64_t>(in.seeds[row]);
  uint32_t state = MurmurBlock(0, static_cast<uint32_t>(seed));
  state = MurmurBlock(state, static_cast<uint32_t>(seed >> 32));
  state = MurmurBlock(state, static_cast<uint32_t>(in.positions[row]));
  const int64_t columns = in.num_columns, start = row * columns;
  if (in.kind == SampleScores::kProbs) {
    return SampleOne<ProbScore>(static_cast<const float*>(in.scores) + start, columns, state);
  }
  if (in.kind == SampleScores::kLogProbs) {
    return SampleOne<LogProbScore<float>>(static_cast<const float*>(in.scores) + start, columns,
                                          state);
  }
  return SampleOne<LogProbScore<double>>(static_cast<const double*>(in.scores) + start, columns,
                                         state);
}
