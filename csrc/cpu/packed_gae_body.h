// Packed GAE of several sequences together, each from its end, in blocks: compute the maps of all
// tokens, then a serial scan, then the outputs.
//
// No include guard: compiled once for each instruction set, see cpu/for_each_target.h.

// The maps are at the end of the block, after identity maps that pad shorter sequences.
MRL_FN void MakeGaeMaps(const GaeStrand& strand, double gamma, GaeBlock* block) {
  const int skip = kGaeBlock - strand.size;
  for (int i = 0; i < skip; ++i) {
    block->add[i] = 0;
    block->scale[i] = 1;
  }
  const double lam = strand.lam, lam_gamma = strand.lam * gamma;
  const int64_t first = strand.end - strand.size;
  const float* __restrict reward = strand.rewards + first;
  const float* __restrict value = strand.values + first;
  const uint8_t* __restrict mask = strand.loss_mask + first;
  double* __restrict add = block->add + skip;
  double* __restrict scale = block->scale + skip;
  for (int i = 0; i < strand.size; ++i) {
    const GaeMap map = GaeToken(mask[i] != 0, reward[i], value[i], lam, lam_gamma);
    add[i] = map.add;
    scale[i] = map.scale;
  }
}

// Replaces each map's `add` by the X of the token after it. Several sequences are interleaved,
// because one alone would wait for the latency of each multiply-add.
MRL_FN void ScanGaeBlocks(int size, GaeStrand* strands, GaeBlock* blocks) {
  double next[kGaeStrands];
  for (int s = 0; s < kGaeStrands; ++s) next[s] = strands[s].next;
  for (int i = kGaeBlock - 1; i >= kGaeBlock - size; --i) {
    for (int s = 0; s < kGaeStrands; ++s) {
      const GaeMap map{blocks[s].add[i], blocks[s].scale[i]};
      blocks[s].add[i] = next[s];
      next[s] = GaeApply(map, next[s]);
    }
  }
  for (int s = 0; s < kGaeStrands; ++s) strands[s].next = next[s];
}

MRL_FN void StoreGaeBlock(const GaeStrand& strand, double gamma, const GaeBlock& block) {
  const int64_t first = strand.end - strand.size;
  const float* __restrict reward = strand.rewards + first;
  const float* __restrict value = strand.values + first;
  const uint8_t* __restrict mask = strand.loss_mask + first;
  const double* __restrict next = block.add + kGaeBlock - strand.size;
  float* __restrict advantages = strand.advantages + first;
  float* __restrict returns = strand.returns + first;
  for (int i = 0; i < strand.size; ++i) {
    const double v = value[i];
    const double advantage = GaeAdvantage(reward[i], v, gamma, next[i]);
    const float a = static_cast<float>(advantage), r = static_cast<float>(advantage + v);
    advantages[i] = mask[i] ? a : 0.0f;
    returns[i] = mask[i] ? r : 0.0f;
  }
}

inline void PackedGaeStrands(double gamma, GaeStrand* strands) {
  alignas(64) GaeBlock blocks[kGaeStrands] = {};
  while (true) {
    int size = 0;
    for (int s = 0; s < kGaeStrands; ++s) {
      GaeStrand& strand = strands[s];
      strand.size = static_cast<int>(strand.end < kGaeBlock ? strand.end : kGaeBlock);
      size = strand.size > size ? strand.size : size;
      MakeGaeMaps(strand, gamma, &blocks[s]);
    }
    if (size == 0) return;
    ScanGaeBlocks(size, strands, blocks);
    for (int s = 0; s < kGaeStrands; ++s) {
      StoreGaeBlock(strands[s], gamma, blocks[s]);
      strands[s].end -= strands[s].size;
    }
  }
}
