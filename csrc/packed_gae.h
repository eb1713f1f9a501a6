// Generalised advantage estimation over packed sequences (arXiv 1506.02438 eq. 16).
//
// N packed tokens, B sequences; sequence i is tokens [cu_seqlens[i], cu_seqlens[i + 1]). The steps
// are the loss tokens. A masked token is skipped: its inputs, even NaN, have no effect, and its
// outputs are 0.
#pragma once

#include <cstdint>

#include "portable.h"

namespace mrl {

struct PackedGaeInput {
  const float* rewards;       // [N]
  const float* values;        // [N]
  const uint8_t* loss_mask;   // [N], non-zero for loss tokens
  const int32_t* cu_seqlens;  // [B + 1]
  const float* seq_lam;       // [B], or null if `lam` holds for every sequence
  int64_t num_tokens;         // N
  int64_t num_sequences;      // B
  double gamma;
  double lam;
};

// Equation 16 with reward r, value v and the next loss token's V' and A' is
//     A = r - v + gamma (V' + lam A').
// So a single number is propagated backwards, X = V + lam A, and each loss token is an affine map
// of the X of the next one:
//     A = r - v + gamma X',    X = v + lam (r - v) + lam gamma X',    X = 0 after the last token.
// A masked token is the identity map. Composition of maps is associative, so this is a scan.
//
// Each line below has a single product that can be fused into an fma, so the compiler's choice does
// not change bits.
struct GaeMap {
  double add;
  double scale;
};

MRL_FN GaeMap GaeToken(bool keep, double reward, double value, double lam, double lam_gamma) {
  const double add = value + lam * (reward - value);
  return {keep ? add : 0.0, keep ? lam_gamma : 1.0};
}

MRL_FN double GaeApply(GaeMap map, double next) { return map.add + map.scale * next; }

// `first` comes after `second` in the sequence, so it is applied first.
MRL_FN GaeMap GaeCompose(GaeMap first, GaeMap second) {
  return {GaeApply(second, first.add), second.scale * first.scale};
}

MRL_FN double GaeAdvantage(double reward, double value, double gamma, double next) {
  return (reward - value) + gamma * next;
}

// Both write advantages f32[N] and returns f32[N] (advantage + value, 0 if masked), computed in
// fp64. The order of operations depends only on the length of the sequence, so the bits do not
// depend on threads, packing or the split into micro-batches.

// Throws std::invalid_argument if cu_seqlens does not partition [0, N) or a seq_lam is not in [0,
// 1].
void PackedGaeCpu(const PackedGaeInput& in, int num_threads, float* advantages, float* returns);

// The same conditions are printed and trap on the device.
void PackedGaeCuda(const PackedGaeInput& in, uintptr_t stream, float* advantages, float* returns);

}  // namespace mrl
