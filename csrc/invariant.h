// Ops whose result for one row does not depend on how many rows there are, where the row lies among
// them, or how many threads share them: what a trainer that sees whole sequences and an engine that
// sees one token of each need in order to agree bit for bit.
//
// Every row goes through the same code, and every sum over a row adds in an order of its own: 32
// lanes of cpu/simd.h, then their fold. A matrix product of a BLAS picks its kernel, and so its
// order, by the number of rows; a fused attention picks its blocks by the number of queries and
// keys.
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
  const int32_t* first_key;  // [num_queries]: the first key that a query sees
  const int32_t* key_count;  // [num_queries]: how many it sees from there on, at least 1
  int64_t num_queries;
  int64_t num_keys;
  int64_t num_heads;
  int64_t num_groups;  // a divisor of num_heads
  int64_t key_size;
  int64_t value_size;
  float scale;
};

// out: [num_queries, num_heads, value_size] = softmax(scale q k^T) v. Throws std::invalid_argument
// for a query that sees no key, or one that is not there.
void InvariantAttentionCpu(const AttentionInput& in, int num_threads, float* out);

// out: [count] = x / (1 + e^-x) of x [count].
void InvariantSiluCpu(const float* x, int64_t count, int num_threads, float* out);

}  // namespace mrl
