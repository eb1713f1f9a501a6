// Copies of tokens sorted by expert, and their sums back in the tokens' places.
//
// n tokens, E experts, K places for a token's choices (a choice of -1 is none), m copies (choices
// that are none left out), H columns. Copies lie by expert, then by token. The copies of a token
// are added up in the order of its choices, in fp32 (fp64 for fp64 rows), and rounded once. No sum
// has more than one order, so the bits depend on nothing but the input: not on threads, blocks or
// the number of tokens.
#pragma once

#include <cstdint>

namespace mrl {

enum class RowType : int { kFloat32, kBfloat16, kFloat16, kFloat64 };  // as mrl/kernels/moe_permute

constexpr int64_t kMoeChunk = 64;  // tokens that are counted together

struct MoeIdsInput {
  const uint8_t* chosen;  // [n, E], not 0 where the token goes to the expert
  int64_t num_tokens, num_experts, width;
};

// ids i32[n, width]: each token's experts by number, then -1. Throws std::invalid_argument (on the
// device: traps) where a token has more than `width`.
void MoeIdsCpu(const MoeIdsInput& in, int num_threads, int32_t* ids);
void MoeIdsCuda(const MoeIdsInput& in, uintptr_t stream, int32_t* ids);

struct MoeSortInput {
  const int32_t* ids;  // [n, K], -1 or an expert; no expert twice in a row
  int64_t num_tokens, topk, num_experts, num_copies;
  int32_t* scratch;  // [E, ceil(n / kMoeChunk)]
};

struct MoeSortOutput {
  int32_t* tokens;  // [m], the token of each copy
  int32_t* cells;   // [m], the place of each copy's (token, expert) in a table [n, E]
  int32_t* copies;  // [n, K], the copies of each token; -1 where it has none
  int64_t* counts;  // [E], the copies of each expert
};

// A stable counting sort. Throws std::invalid_argument (on the device: traps) for an id out of
// range, an expert that a token names twice, and where there are not `num_copies` copies.
void MoeSortCpu(const MoeSortInput& in, int num_threads, const MoeSortOutput& out);
void MoeSortCuda(const MoeSortInput& in, uintptr_t stream, const MoeSortOutput& out);

struct MoePermuteInput {
  const void* rows;      // [n, H]
  const int32_t* index;  // [m], the row that each copy repeats
  int64_t num_copies;
  int64_t row_bytes;     // of H columns
  const void* table;     // null, or values of `entry_bytes` (2, 4 or 8) each
  const int32_t* cells;  // [m], the table's entry of each copy
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
  const void* gates;     // null, or [m] by which rows are multiplied: fp32, fp64 for fp64 rows
  const void* entries;   // null, or [m] of `entry_bytes` (2, 4 or 8) each, for the table
  const int32_t* cells;  // [m]
  int64_t num_experts;   // of the table
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
