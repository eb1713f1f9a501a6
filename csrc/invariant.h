// Batch-invariant ops: the result for a row does not depend on the number of rows, its position
// among them, or the number of threads. A trainer that processes whole sequences and an engine that
// processes one token of each need this in order to agree bit for bit.
//
// Every row uses the same code, and every sum over a row has a fixed order: the 32 lanes of
// cpu/simd.h, then their fold. A BLAS chooses its kernel, and thus its order, by the number of
// rows, and a fused attention chooses its blocks by the number of queries and keys.
//
// All tensors are contiguous fp32.
#pragma once

#include <cstdint>

namespace mrl {

struct LinearInput {
  const float* rows;     // [num_rows, num_inputs]
  const float* weights;  // [num_outputs, num_inputs]
  int64_t num_rows;
  int64_t num_inputs;
  int64_t num_outputs;
};

// out: [num_rows, num_outputs] = rows weights^T.
void InvariantLinearCpu(const LinearInput& in, int num_threads, float* out);

struct AttentionInput {
  const float* queries;      // [num_queries, num_heads, key_size]
  const float* keys;         // [num_keys, num_groups, key_size]
  const float* values;       // [num_keys, num_groups, value_size]
  const int32_t* first_key;  // [num_queries]: the first key that a query attends to
  const int32_t* key_count;  // [num_queries]: how many keys from there on, at least 1
  int64_t num_queries;
  int64_t num_keys;
  int64_t num_heads;
  int64_t num_groups;  // a divisor of num_heads
  int64_t key_size;
  int64_t value_size;
  float scale;
};

// out: [num_queries, num_heads, value_size] = softmax(scale q k^T) v. Throws std::invalid_argument
// for a query without keys, and for keys out of range.
void InvariantAttentionCpu(const AttentionInput& in, int num_threads, float* out);

// out: [count] = x / (1 + e^-x) for x [count].
void InvariantSiluCpu(const float* x, int64_t count, int num_threads, float* out);

}  // namespace mrl
