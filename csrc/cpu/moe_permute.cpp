#include "moe_permute.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "elements.h"

namespace mrl {
namespace {

constexpr int64_t kSumColumns = 256;  // columns whose sums are kept in registers or L1
constexpr int64_t kWorthThreads = int64_t{1} << 18;  // bytes from which threads pay off
constexpr int64_t kWorthSorting = 1 << 15;           // the same, in choices

}  // namespace
}  // namespace mrl

#define MRL_BODY "cpu/moe_permute_body.h"
#include "cpu/for_each_target.h"

namespace mrl {
namespace {

int Threads(int num_threads, int64_t work, int64_t worth) {
  return work >= worth ? std::max(1, num_threads) : 1;
}

int64_t BytesOf(RowType type) {
  return type == RowType::kFloat64 ? 8 : type == RowType::kFloat32 ? 4 : 2;
}

[[noreturn]] void RefuseToken(const MoeSortInput& in, int64_t token) {
  std::string given;
  for (int64_t k = 0; k < in.topk; ++k) {
    given += (k ? ", " : "") + std::to_string(in.ids[token * in.topk + k]);
  }
  throw std::invalid_argument("ids: got [" + given + "] of token " + std::to_string(token) +
                              ", expected different experts from 0 to " +
                              std::to_string(in.num_experts - 1) + ", or -1");
}

// Counts how often one chunk of tokens chooses each expert. Returns the first invalid token, or -1.
int64_t CountChunk(const MoeSortInput& in, int64_t chunk, std::vector<int32_t>& counts,
                   std::vector<int64_t>& last_token) {
  std::fill(counts.begin(), counts.end(), 0);
  const int64_t end = std::min(in.num_tokens, (chunk + 1) * kMoeChunk);
  for (int64_t token = chunk * kMoeChunk; token < end; ++token) {
    for (int64_t k = 0; k < in.topk; ++k) {
      const int64_t id = in.ids[token * in.topk + k];
      if (id == -1) continue;
      if (id < 0 || id >= in.num_experts || last_token[id] == token) return token;
      last_token[id] = token;
      ++counts[id];
    }
  }
  return -1;
}

void PlaceChunk(const MoeSortInput& in, int64_t chunk, std::vector<int32_t>& next,
                const MoeSortOutput& out) {
  const int64_t end = std::min(in.num_tokens, (chunk + 1) * kMoeChunk);
  for (int64_t token = chunk * kMoeChunk; token < end; ++token) {
    for (int64_t k = 0; k < in.topk; ++k) {
      const int64_t id = in.ids[token * in.topk + k];
      out.copies[token * in.topk + k] = -1;
      if (id == -1) continue;
      const int32_t copy = next[id]++;
      out.copies[token * in.topk + k] = copy;
      out.tokens[copy] = static_cast<int32_t>(token);
      out.cells[copy] = static_cast<int32_t>(token * in.num_experts + id);
    }
  }
}

// Turns counts into start positions: experts in order and, within each, chunks in order.
void ScanCounts(const MoeSortInput& in, int64_t num_chunks, const MoeSortOutput& out) {
  int64_t place = 0;
  for (int64_t expert = 0; expert < in.num_experts; ++expert) {
    const int64_t first = place;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      int32_t& count = in.scratch[expert * num_chunks + chunk];
      const int32_t here = count;
      count = static_cast<int32_t>(place);
      place += here;
    }
    out.counts[expert] = place - first;
  }
  if (place != in.num_copies) {
    throw std::invalid_argument("ids: got " + std::to_string(place) + " choices, expected " +
                                std::to_string(in.num_copies));
  }
}

}  // namespace

void MoeIdsCpu(const MoeIdsInput& in, int num_threads, int32_t* ids) {
  const int threads = Threads(num_threads, in.num_tokens * in.num_experts, kWorthSorting);
  int64_t faulty = in.num_tokens;
#pragma omp parallel for num_threads(threads) reduction(min : faulty) if (threads > 1)
  for (int64_t token = 0; token < in.num_tokens; ++token) {
    const uint8_t* chosen = in.chosen + token * in.num_experts;
    int32_t* row = ids + token * in.width;
    int64_t count = 0;
    for (int64_t expert = 0; expert < in.num_experts; ++expert) {
      if (!chosen[expert]) continue;
      if (count < in.width) row[count] = static_cast<int32_t>(expert);
      ++count;
    }
    std::fill(row + std::min(count, in.width), row + in.width, -1);
    if (count > in.width) faulty = std::min(faulty, token);
  }
  if (faulty < in.num_tokens) {
    throw std::invalid_argument("chosen: got more than " + std::to_string(in.width) +
                                " experts of token " + std::to_string(faulty) + ", expected " +
                                std::to_string(in.width) + " at most");
  }
}

void MoeSortCpu(const MoeSortInput& in, int num_threads, const MoeSortOutput& out) {
  const int64_t num_chunks = (in.num_tokens + kMoeChunk - 1) / kMoeChunk;
  const int threads = Threads(num_threads, in.num_tokens * in.topk, kWorthSorting);
  int64_t faulty = in.num_tokens;
#pragma omp parallel num_threads(threads) reduction(min : faulty) if (threads > 1)
  {
    std::vector<int32_t> counts(in.num_experts);
    std::vector<int64_t> last_token(in.num_experts, -1);
#pragma omp for schedule(static)
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      const int64_t token = CountChunk(in, chunk, counts, last_token);
      if (token >= 0) faulty = std::min(faulty, token);
      for (int64_t expert = 0; expert < in.num_experts; ++expert) {
        in.scratch[expert * num_chunks + chunk] = counts[expert];
      }
    }
  }
  if (faulty < in.num_tokens) RefuseToken(in, faulty);
  ScanCounts(in, num_chunks, out);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<int32_t> next(in.num_experts);
#pragma omp for schedule(static)
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      for (int64_t expert = 0; expert < in.num_experts; ++expert) {
        next[expert] = in.scratch[expert * num_chunks + chunk];
      }
      PlaceChunk(in, chunk, next, out);
    }
  }
}

void MoePermuteCpu(const MoePermuteInput& in, int num_threads, void* out, void* entries) {
  const char* rows = static_cast<const char*>(in.rows);
  const char* table = static_cast<const char*>(in.table);
  const int threads = Threads(num_threads, in.num_copies * in.row_bytes, kWorthThreads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t copy = 0; copy < in.num_copies; ++copy) {
    std::memcpy(static_cast<char*>(out) + copy * in.row_bytes, rows + in.index[copy] * in.row_bytes,
                in.row_bytes);
    if (table == nullptr) continue;
    std::memcpy(static_cast<char*>(entries) + copy * in.entry_bytes,
                table + in.cells[copy] * in.entry_bytes, in.entry_bytes);
  }
}

void MoeUnpermuteCpu(const MoeUnpermuteInput& in, int num_threads, void* out, void* table) {
  const auto sum = MRL_DISPATCH(SumCopies);
  const int64_t num_bytes = in.num_tokens * in.topk * in.num_columns * BytesOf(in.type);
  const int threads = Threads(num_threads, num_bytes, kWorthThreads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t token = 0; token < in.num_tokens; ++token) {
    sum(in, token, out);
    if (in.entries == nullptr) continue;
    const int64_t line = in.num_experts * in.entry_bytes;
    std::memset(static_cast<char*>(table) + token * line, 0, line);
    for (int64_t k = 0; k < in.topk; ++k) {
      const int64_t copy = in.copies[token * in.topk + k];
      if (copy < 0) continue;
      std::memcpy(static_cast<char*>(table) + in.cells[copy] * in.entry_bytes,
                  static_cast<const char*>(in.entries) + copy * in.entry_bytes, in.entry_bytes);
    }
  }
}

void MoeUnpermuteGradCpu(const MoeUnpermuteGradInput& in, int num_threads, void* grad_rows,
                         void* grad_gates) {
  const auto run = MRL_DISPATCH(Gradients);
  const int64_t num_bytes = in.num_copies * in.num_columns * BytesOf(in.type);
  const int threads = Threads(num_threads, num_bytes, kWorthThreads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t copy = 0; copy < in.num_copies; ++copy) run(in, copy, grad_rows, grad_gates);
}

}  // namespace mrl
