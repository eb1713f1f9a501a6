// Log-probs and entropies of labels under vocab-parallel logits, and the gradient of the logits.
//
// T rows; V_loc columns of this rank, which start at column vocab_start of the whole vocabulary.
// The vocabulary is divided into tiles at global columns that are multiples of `tile`, and tiles
// are combined in their global order. As long as ranks have whole tiles, the bits do not depend on
// the number of ranks. Rows are independent of each other. Masked rows are not read.
//
// Numerics: x = logit / temperature; fp32 exponentials e = exp(x - shift), where each tile has its
// own shift near its largest x. x - shift is rounded once, and is fp64 for the label, so the
// log-probs of large logits are as accurate as those of small ones. Sums are fp32 within a tile on
// a GPU, or over at most 1,024 columns on a CPU, and fp64 beyond.
#pragma once

#include <cstdint>

namespace mrl {

enum class LogitType : int { kFloat32, kBfloat16, kFloat16 };

constexpr int kTileFields =
    4;  // shift; sum e; sum e (x - shift); the label's logit if it is in the tile

struct VpLogits {
  LogitType type;
  int64_t num_rows, num_columns;  // T, V_loc
  int64_t row_stride;             // in elements
  const int64_t* labels;          // [T], columns of the whole vocabulary
  const uint8_t* mask;            // [T] or null; 0: the row is masked
  int64_t vocab_start, vocab_size;
  float inv_temperature;
};

struct VpStatsInput {
  VpLogits shape;
  const void* logits;  // [T, V_loc]
  int64_t tile;        // divides V_loc and vocab_start
};

// Writes tiles f32[T, V_loc / tile, 4]; 0 in masked rows. The CPU version throws
// std::invalid_argument for a label outside of the vocabulary.
void VpLogprobStatsCpu(const VpStatsInput& in, float* tiles, int num_threads);
void VpLogprobStatsCuda(const VpStatsInput& in, float* tiles, uintptr_t stream);

struct VpCombineInput {
  const float* tiles;     // [R, T, tiles_per_rank, 4], ranks in vocabulary order
  const int64_t* labels;  // [T]
  const uint8_t* mask;    // [T] or null
  int64_t num_ranks, num_rows, tiles_per_rank, tile;
  float inv_temperature;
};

struct VpCombineOutput {
  float *logprobs, *lse, *entropy;  // [T] each; 0 if masked
};

void VpLogprobCombineCpu(const VpCombineInput& in, const VpCombineOutput& out, int num_threads);
void VpLogprobCombineCuda(const VpCombineInput& in, const VpCombineOutput& out, uintptr_t stream);

struct VpBackwardInput {
  VpLogits shape;
  const void* logits;          // [T, V_loc]
  const float* lse;            // [T]
  const float* entropy;        // [T]
  const float* grad_logprobs;  // [T]
  const float* grad_entropy;   // [T] or null
};

// Writes d logits [T, V_loc] in the logits' type at row stride `grad_stride`; `grad` may be the
// logits. Rows that are masked, or whose gradients are both 0, are set to 0 without being read.
void VpLogprobBackwardCpu(const VpBackwardInput& in, void* grad, int64_t grad_stride,
                          int num_threads);
void VpLogprobBackwardCuda(const VpBackwardInput& in, void* grad, int64_t grad_stride,
                           uintptr_t stream);

}  // namespace mrl
