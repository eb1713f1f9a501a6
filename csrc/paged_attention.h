// Causal attention of new tokens over the keys and values of a paged cache, for a whole batch of
// requests at once. Decoding is the case of one new token per request.
//
// B requests, M new tokens (queries) of all of them, h heads, g groups of keys and values (a
// divisor of h), d and e head sizes of keys and values, S slots of the cache.
//
// The query at position p of its request attends to positions [max(0, p - window), p]. Its sums
// have one order: positions are cut into blocks of kAttentionBlock from position 0 on, and a block
// with fewer visible positions leaves the others out. So the bits of a query depend on its request
// and its position only: not on other requests, on the number of threads, on the slots that hold
// the keys, or on whether the query is computed alone or with others of its request.
#pragma once

#include <cstdint>

#include "elements.h"

namespace mrl {

constexpr int kAttentionBlock = 64;  // positions whose exponentials share a maximum

// Strides are in elements. A head's elements are contiguous.
struct PagedAttentionInput {
  FloatType type;               // of queries, keys, values and output
  const void* queries;          // [M, h, d], those of a request in the order of their positions
  const void* keys;             // [S, g, d]
  const void* values;           // [S, g, e]
  const int32_t* slots;         // [max_requests, max_positions], rows `slot_stride` apart
  const int64_t* requests;      // [B], rows of `slots`
  const int64_t* lengths;       // [B], positions of a request, the new ones included
  const int64_t* query_starts;  // [B + 1], null if every request has one query
  int64_t num_requests, num_queries;
  int64_t num_heads, num_groups, key_size, value_size;
  int64_t num_slots, max_requests, max_positions;
  int64_t query_stride, query_head_stride, key_stride, key_head_stride;
  int64_t value_stride, value_head_stride, slot_stride;
  int64_t window;  // earlier positions that a query sees, or -1 for all
  float scale;
};

// out: [M, h, e] contiguous = softmax(scale q k^T) v, with products and sums in fp32. Head sizes
// are multiples of 8. Throws std::invalid_argument for a request or slot out of range, for a
// request with fewer positions than queries, and for query_starts that are not those of M queries.
void PagedAttentionCpu(const PagedAttentionInput& in, int num_threads, void* out);

}  // namespace mrl
