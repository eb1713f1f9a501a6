#include "paged_attention.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace mrl {
namespace {

constexpr int64_t kQueriesTogether = 8;  // queries of a request that share a block while in L1
constexpr int64_t kWorthThreads = int64_t{1} << 18;  // multiplications from which threads pay off

// Neighbouring queries of one request.
struct QueryTile {
  int64_t request;         // index in the batch
  int64_t first_query;     // among all queries
  int64_t first_position;  // of the first query
  int64_t num_queries;
};

// The memory of one thread. A row is one head of one query.
struct AttentionScratch {
  AttentionScratch(const PagedAttentionInput& in, int64_t num_rows)
      : queries(num_rows * in.key_size),
        sums(num_rows * in.value_size),
        largest(num_rows),
        weight(num_rows),
        keys(in.type == FloatType::kFloat32 ? 0 : kAttentionBlock * in.key_size),
        values(in.type == FloatType::kFloat32 ? 0 : kAttentionBlock * in.value_size) {}

  std::vector<float> queries;              // [rows, d]
  std::vector<float> sums;                 // [rows, e], of values times their exponentials
  std::vector<float> largest;              // [rows], the largest score so far
  std::vector<float> weight;               // [rows], the sum of exponentials
  std::vector<float> keys, values;         // a block's rows, widened, of a half-precision cache
  const float* key_rows[kAttentionBlock];  // of the positions of a block that any query sees
  const float* value_rows[kAttentionBlock];
};

}  // namespace
}  // namespace mrl

#define MRL_BODY "cpu/paged_attention_body.h"
#include "cpu/for_each_target.h"

namespace mrl {
namespace {

int64_t QueryStart(const PagedAttentionInput& in, int64_t request) {
  return in.query_starts ? in.query_starts[request] : request;
}

// Throws std::invalid_argument.
void CheckRequest(const PagedAttentionInput& in, int64_t i) {
  const int64_t row = in.requests[i], length = in.lengths[i];
  const int64_t count = QueryStart(in, i + 1) - QueryStart(in, i);
  if (count < 0 || length < count || length > in.max_positions) {
    throw std::invalid_argument("paged_attention: request " + std::to_string(i) + " has " +
                                std::to_string(length) + " positions and " + std::to_string(count) +
                                " queries, expected at most " + std::to_string(in.max_positions) +
                                " positions and no more queries than positions");
  }
  if (row < 0 || row >= in.max_requests) {
    throw std::invalid_argument("paged_attention: request " + std::to_string(i) + " has row " +
                                std::to_string(row) + " of the slots, expected 0 to " +
                                std::to_string(in.max_requests - 1));
  }
}

}  // namespace

void PagedAttentionCpu(const PagedAttentionInput& in, int num_threads, void* out) {
  const auto run = MRL_DISPATCH(AttendTile);
  const int64_t first = QueryStart(in, 0), last = QueryStart(in, in.num_requests);
  if (first != 0 || last != in.num_queries) {
    throw std::invalid_argument("query_starts: got " + std::to_string(first) + " to " +
                                std::to_string(last) + ", expected 0 to " +
                                std::to_string(in.num_queries));
  }
  std::vector<QueryTile> tiles;
  int64_t most_queries = 1, products = 0;
  for (int64_t i = 0; i < in.num_requests; ++i) {
    CheckRequest(in, i);
    const int64_t start = QueryStart(in, i), end = QueryStart(in, i + 1);
    for (int64_t query = start; query < end; query += kQueriesTogether) {
      const int64_t position = in.lengths[i] - (end - query);
      const int64_t count = std::min(kQueriesTogether, end - query);
      tiles.push_back({i, query, position, count});
      most_queries = std::max(most_queries, count);
      products += position * count * in.num_heads * (in.key_size + in.value_size);
    }
  }
  const int64_t num_tiles = static_cast<int64_t>(tiles.size());
  const int threads = products >= kWorthThreads ? num_threads : 1;
  int64_t faulty = in.num_requests;
#pragma omp parallel num_threads(threads) reduction(min : faulty) if (threads > 1)
  {
    AttentionScratch scratch(in, most_queries * (in.num_heads / in.num_groups));
#pragma omp for schedule(dynamic)
    for (int64_t part = 0; part < num_tiles * in.num_groups; ++part) {
      const QueryTile& tile = tiles[part / in.num_groups];
      const bool valid = run(in, tile, part % in.num_groups, &scratch, out);
      if (!valid) faulty = std::min(faulty, tile.request);
    }
  }
  if (faulty < in.num_requests) {
    throw std::invalid_argument("paged_attention: request " + std::to_string(faulty) +
                                " has a slot out of range, expected 0 to " +
                                std::to_string(in.num_slots - 1));
  }
}

}  // namespace mrl
