// Copies token rows to their experts, sorted by expert, and sums them back per token.
//
// n tokens, E experts, K slots for a token's choices (-1 for an empty slot), m copies (empty slots
// left out), H columns. Copies are sorted by expert, then by token. The copies of a token are
// summed in the order of its choices, in fp32 (fp64 for fp64 rows), and rounded once. Every sum has
// a fixed order, so the bits depend only on the input, not on threads, blocks or the number of
// tokens.
#pragma once

#include <cstdint>

namespace mrl {

enum class RowType : int { kFloat32, kBfloat16, kFloat16, kFloat64 };  // see moe_permute.py

constexpr int64_t kMoeChunk = 64;  // tokens per chunk of the counting sort

struct MoeIdsInput {
  const uint8_t* chosen;  // [n, E], not 0 if the token goes to the expert
  int64_t num_tokens, num_experts, width;
};

// ids i32[n, width]: each token's experts in ascending order, padded with -1. Throws
// std::invalid_argument (on the device: traps) if a token has more than `width`.
void MoeIdsCpu(const MoeIdsInput& in, int num_threads, int32_t* ids);
void MoeIdsCuda(const MoeIdsInput& in, uintptr_t stream, int32_t* ids);

struct MoeSortInput {
  const int32_t* ids;  // [n, K], -1 or an expert; no expert twice in a row
  int64_t num_tokens, topk, num_experts, num_copies;
  int32_t* scratch;  // [E, ceil(n / kMoeChunk)]
};

struct MoeSortOutput {
  int32_t* tokens;  // [m], the token of each copy
  int32_t* cells;   // [m], the flat index of each copy's (token, expert) in a table [n, E]
  int32_t* copies;  // [n, K], the copies of each token; -1 for an empty slot
  int64_t* counts;  // [E], the number of copies for each expert
};

// A stable counting sort. Throws std::invalid_argument (on the device: traps) for an id out of
// range, for an expert that a token has twice, and if the number of copies is not `num_copies`.
void MoeSortCpu(const MoeSortInput& in, int num_threads, const MoeSortOutput& out);
void MoeSortCuda(const MoeSortInput& in, uintptr_t stream, const MoeSortOutput& out);

struct MoePermuteInput {
  const void* rows;      // [n, H]
  const int32_t* index;  // [m], the row of each copy
  int64_t num_copies;
  int64_t row_bytes;     // bytes of H columns
  const void* table;     // null, or values of `entry_bytes` (2, 4 or 8) each
  const int32_t* cells;  // [m], the table entry of each copy
  int64_t entry_bytes;
};

// out [m, H]: row index[i] of `rows`; entries [m]: cells[i] of the table. Copies bytes.
void MoePermuteCpu(const MoePermuteInput& in, int num_threads, void* out, void* entries);
void MoePermuteCuda(const MoePermuteInput& in, uintptr_t stream, void* out, void* entries);

struct MoeUnpermuteInput {
  RowType type;
  const void* rows;       // [m, H]
  const int32_t* copies;  // [n, K]
  int64_t num_tokens, topk, num_columns;
  const void* gates;     // null, or [m] factors of the rows: fp32, or fp64 for fp64 rows
  const void* entries;   // null, or [m] of `entry_bytes` (2, 4 or 8) each, for the table
  const int32_t* cells;  // [m]
  int64_t num_experts;   // columns of the table
  int64_t entry_bytes;
};

// out [n, H]: the sum of each token's rows, 0 for a token without copies. table [n, E]: entries at
// their cells, and 0 elsewhere.
void MoeUnpermuteCpu(const MoeUnpermuteInput& in, int num_threads, void* out, void* table);
void MoeUnpermuteCuda(const MoeUnpermuteInput& in, uintptr_t stream, void* out, void* table);

struct MoeUnpermuteGradInput {
  RowType type;
  const void* grad;       // [n, H]
  const void* rows;       // [m, H]
  const void* gates;      // [m], as above
  const int32_t* tokens;  // [m]
  int64_t num_copies, num_columns;
};

// The gradients of a sum with gates: grad_rows [m, H] = gate * grad, grad_gates [m] = grad . row.
void MoeUnpermuteGradCpu(const MoeUnpermuteGradInput& in, int num_threads, void* grad_rows,
                         void* grad_gates);
void MoeUnpermuteGradCuda(const MoeUnpermuteGradInput& in, uintptr_t stream, void* grad_rows,
                          void* grad_gates);

}  // namespace mrl
