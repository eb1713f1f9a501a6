#include "block_quant.h"

#include <algorithm>
#include <type_traits>

#define MRL_BODY "cpu/block_quant_body.h"
#include "cpu/for_each_target.h"

namespace mrl {
namespace {

constexpr int64_t kWorthThreads = int64_t{1} << 16;  // elements from which threads pay off

// Calls run(first, last) for parts of `count` items that have `num_elements` in total.
template <class Run>
void InParts(int64_t count, int64_t num_elements, int num_threads, Run&& run) {
  const int64_t threads = num_elements < kWorthThreads ? 1 : num_threads;
  const int64_t parts = std::clamp<int64_t>(threads, 1, std::max<int64_t>(count, 1));
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
  for (int64_t part = 0; part < parts; ++part) {
    run(count * part / parts, count * (part + 1) / parts);
  }
}

int64_t CeilDiv(int64_t size, int64_t by) { return (size + by - 1) / by; }

}  // namespace

void QuantizeFp8BlocksCpu(const QuantInput& in, bool powers_of_two, int num_threads, uint8_t* q,
                          float* scales) {
  const auto run = MRL_DISPATCH(Fp8Blocks);
  const int64_t blocks = CeilDiv(in.num_rows, kQuantBlock) * CeilDiv(in.num_columns, kQuantBlock);
  InParts(blocks, in.num_rows * in.num_columns, num_threads,
          [&](int64_t first, int64_t last) { run(in, powers_of_two, first, last, q, scales); });
}

void QuantizeInt8RowsCpu(const QuantInput& in, int num_threads, uint8_t* q, float* scales) {
  const auto run = MRL_DISPATCH(Int8Rows);
  InParts(in.num_rows, in.num_rows * in.num_columns, num_threads,
          [&](int64_t first, int64_t last) { run(in, first, last, q, scales); });
}

void DequantizeFp8BlocksCpu(const DequantInput& in, int num_threads, void* out) {
  const auto run = MRL_DISPATCH(DequantizeFp8Rows);
  InParts(in.num_rows, in.num_rows * in.num_columns, num_threads,
          [&](int64_t first, int64_t last) { run(in, first, last, out); });
}

void DequantizeInt8RowsCpu(const DequantInput& in, int num_threads, void* out) {
  const auto run = MRL_DISPATCH(DequantizeInt8Rows);
  InParts(in.num_rows, in.num_rows * in.num_columns, num_threads,
          [&](int64_t first, int64_t last) { run(in, first, last, out); });
}

void FakeQuantizeFp8GroupsCpu(const QuantInput& in, int64_t group, int num_threads, void* out) {
  const auto run = MRL_DISPATCH(FakeFp8Rows);
  InParts(in.num_rows, in.num_rows * in.num_columns, num_threads,
          [&](int64_t first, int64_t last) { run(in, group, first, last, out); });
}

void FakeQuantizeInt8RowsCpu(const QuantInput& in, int num_threads, void* out) {
  const auto run = MRL_DISPATCH(FakeInt8Rows);
  InParts(in.num_rows, in.num_rows * in.num_columns, num_threads,
          [&](int64_t first, int64_t last) { run(in, first, last, out); });
}

}  // namespace mrl
