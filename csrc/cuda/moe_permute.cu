// One warp per row, with 16-byte vectors if sizes and addresses allow. A token's sum has the order
// of its choices, and no thread adds to what another has written.
#include <algorithm>

#include "cuda/launch.h"
#include "elements.h"
#include "moe_permute.h"

namespace mrl {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kUnroll = 4;  // vectors in flight per thread
constexpr int kVectorBytes = 16;

// Copies `count` units with one warp.
template <class Unit>
__device__ inline void CopyRow(const Unit* from, Unit* to, int64_t count) {
  constexpr int kStride = 32;
  int64_t i = threadIdx.x % 32;
#pragma unroll 1
  for (; i + (kUnroll - 1) * kStride < count; i += kUnroll * kStride) {
    Unit units[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) units[k] = from[i + k * kStride];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) to[i + k * kStride] = units[k];
  }
#pragma unroll 1
  for (; i < count; i += kStride) to[i] = from[i];
}

// Copies one entry of 2, 4 or 8 bytes; writes 0 if `from` is null.
__device__ inline void CopyEntry(const void* from, int64_t source, void* to, int64_t target,
                                 int64_t num_bytes) {
  if (num_bytes == 2) {
    static_cast<uint16_t*>(to)[target] =
        from == nullptr ? uint16_t{0} : static_cast<const uint16_t*>(from)[source];
  } else if (num_bytes == 4) {
    static_cast<uint32_t*>(to)[target] =
        from == nullptr ? 0u : static_cast<const uint32_t*>(from)[source];
  } else {
    static_cast<uint64_t*>(to)[target] =
        from == nullptr ? uint64_t{0} : static_cast<const uint64_t*>(from)[source];
  }
}

template <class Unit>
__global__ void __launch_bounds__(kThreads)
    MoePermuteKernel(MoePermuteInput in, void* out, void* entries) {
  const int64_t copy = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (copy >= in.num_copies) return;
  const int64_t count = in.row_bytes / static_cast<int64_t>(sizeof(Unit));
  CopyRow(static_cast<const Unit*>(in.rows) + in.index[copy] * count,
          static_cast<Unit*>(out) + copy * count, count);
  if (in.table != nullptr && threadIdx.x % 32 == 0) {
    CopyEntry(in.table, in.cells[copy], entries, copy, in.entry_bytes);
  }
}

// kWidth elements of a row, in one load or store if they have 16 bytes.
template <class Element, int kWidth>
struct Columns {
  typedef typename Element::Stored Stored;
  alignas(kWidth == 1 ? sizeof(Stored) : kVectorBytes) Stored at[kWidth];

  __device__ void Load(const Stored* from) {
    if constexpr (kWidth == 1) {
      at[0] = *from;
    } else {
      *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(from);
    }
  }
  __device__ void StoreTo(Stored* to) const {
    if constexpr (kWidth == 1) {
      *to = at[0];
    } else {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(at);
    }
  }
};

// One warp per token. The rows of kUnroll copies are loaded, then added in the order of the copies.
template <class Element, int kWidth>
__global__ void __launch_bounds__(kThreads)
    MoeUnpermuteKernel(MoeUnpermuteInput in, void* out, void* table) {
  typedef typename Element::Stored Stored;
  typedef typename Element::Sum Sum;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (token >= in.num_tokens) return;
  const int lane = threadIdx.x % 32;
  const int32_t* copies = in.copies + token * in.topk;
  const Stored* rows = static_cast<const Stored*>(in.rows);
  const Sum* gates = static_cast<const Sum*>(in.gates);
  for (int64_t column = lane * kWidth; column < in.num_columns; column += 32 * kWidth) {
    Sum sums[kWidth] = {};
    for (int64_t first = 0; first < in.topk; first += kUnroll) {
      Columns<Element, kWidth> columns[kUnroll];
      int32_t copy[kUnroll];
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        copy[k] = first + k < in.topk ? copies[first + k] : -1;
      }
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        if (copy[k] >= 0) columns[k].Load(rows + copy[k] * in.num_columns + column);
      }
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        if (copy[k] < 0) continue;
        const Sum gate = gates == nullptr ? Sum{1} : gates[copy[k]];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sums[i] += gate * Element::Read(columns[k].at[i]);
      }
    }
    Columns<Element, kWidth> result;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) result.at[i] = Element::Write(sums[i]);
    result.StoreTo(static_cast<Stored*>(out) + token * in.num_columns + column);
  }
  if (in.entries == nullptr) return;
  for (int64_t expert = lane; expert < in.num_experts; expert += 32) {
    const int64_t cell = token * in.num_experts + expert;
    int64_t source = -1;
    for (int64_t k = 0; k < in.topk; ++k) {
      if (copies[k] >= 0 && in.cells[copies[k]] == cell) source = copies[k];
    }
    CopyEntry(source < 0 ? nullptr : in.entries, source, table, cell, in.entry_bytes);
  }
}

// One warp per copy. The product of gradient and row is summed per lane, then over the lanes.
template <class Element, int kWidth>
__global__ void __launch_bounds__(kThreads)
    MoeUnpermuteGradKernel(MoeUnpermuteGradInput in, void* grad_rows, void* grad_gates) {
  typedef typename Element::Stored Stored;
  typedef typename Element::Sum Sum;
  const int64_t copy = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (copy >= in.num_copies) return;
  const int lane = threadIdx.x % 32;
  const Stored* grad = static_cast<const Stored*>(in.grad) + in.tokens[copy] * in.num_columns;
  const Stored* row = static_cast<const Stored*>(in.rows) + copy * in.num_columns;
  Stored* to = static_cast<Stored*>(grad_rows) + copy * in.num_columns;
  const Sum gate = static_cast<const Sum*>(in.gates)[copy];
  Sum sum = 0;
  for (int64_t column = lane * kWidth; column < in.num_columns; column += 32 * kWidth) {
    Columns<Element, kWidth> g, x;
    g.Load(grad + column);
    x.Load(row + column);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const Sum value = Element::Read(g.at[i]);
      sum += value * Element::Read(x.at[i]);
      g.at[i] = Element::Write(gate * value);
    }
    g.StoreTo(to + column);
  }
  sum = WarpSum(sum);
  if (lane == 0) static_cast<Sum*>(grad_gates)[copy] = sum;
}

bool IsAligned(const void* address, int64_t num_bytes) {
  return reinterpret_cast<uintptr_t>(address) % num_bytes == 0;
}

template <class Unit>
void LaunchPermute(const MoePermuteInput& in, uintptr_t stream, void* out, void* entries) {
  MRL_LAUNCH(MoePermuteKernel<Unit>, Blocks(in.num_copies, kWarps), kThreads, stream, in, out,
             entries);
}

template <class Element>
void LaunchUnpermute(const MoeUnpermuteInput& in, uintptr_t stream, void* out, void* table) {
  constexpr int kWidth = kVectorBytes / sizeof(typename Element::Stored);
  const int64_t blocks = Blocks(in.num_tokens, kWarps);
  if (in.num_columns % kWidth == 0 && IsAligned(in.rows, kVectorBytes) &&
      IsAligned(out, kVectorBytes)) {
    MRL_LAUNCH((MoeUnpermuteKernel<Element, kWidth>), blocks, kThreads, stream, in, out, table);
  } else {
    MRL_LAUNCH((MoeUnpermuteKernel<Element, 1>), blocks, kThreads, stream, in, out, table);
  }
}

// Gradients of gates must not depend on the alignment, so a lane has the same columns for any
// alignment, and the narrow kernel is used only if the size is not a multiple of a vector.
template <class Element>
void LaunchGrad(const MoeUnpermuteGradInput& in, uintptr_t stream, void* grad_rows,
                void* grad_gates) {
  constexpr int kWidth = kVectorBytes / sizeof(typename Element::Stored);
  const int64_t blocks = Blocks(in.num_copies, kWarps);
  if (in.num_columns % kWidth == 0) {
    MRL_LAUNCH((MoeUnpermuteGradKernel<Element, kWidth>), blocks, kThreads, stream, in, grad_rows,
               grad_gates);
  } else {
    MRL_LAUNCH((MoeUnpermuteGradKernel<Element, 1>), blocks, kThreads, stream, in, grad_rows,
               grad_gates);
  }
}

}  // namespace

void MoePermuteCuda(const MoePermuteInput& in, uintptr_t stream, void* out, void* entries) {
  if (in.num_copies == 0) return;
  const auto fits = [&](int64_t num_bytes) {
    return in.row_bytes % num_bytes == 0 && IsAligned(in.rows, num_bytes) &&
           IsAligned(out, num_bytes);
  };
  if (fits(kVectorBytes)) {
    LaunchPermute<uint4>(in, stream, out, entries);
  } else if (fits(4)) {
    LaunchPermute<uint32_t>(in, stream, out, entries);
  } else {
    LaunchPermute<uint16_t>(in, stream, out, entries);
  }
}

void MoeUnpermuteCuda(const MoeUnpermuteInput& in, uintptr_t stream, void* out, void* table) {
  if (in.num_tokens == 0) return;
  switch (in.type) {
    case RowType::kFloat32:
      return LaunchUnpermute<Float32Element>(in, stream, out, table);
    case RowType::kBfloat16:
      return LaunchUnpermute<Bfloat16Element>(in, stream, out, table);
    case RowType::kFloat16:
      return LaunchUnpermute<Float16Element>(in, stream, out, table);
    case RowType::kFloat64:
      return LaunchUnpermute<Float64Element>(in, stream, out, table);
  }
}

void MoeUnpermuteGradCuda(const MoeUnpermuteGradInput& in, uintptr_t stream, void* grad_rows,
                          void* grad_gates) {
  if (in.num_copies == 0) return;
  switch (in.type) {
    case RowType::kFloat32:
      return LaunchGrad<Float32Element>(in, stream, grad_rows, grad_gates);
    case RowType::kBfloat16:
      return LaunchGrad<Bfloat16Element>(in, stream, grad_rows, grad_gates);
    case RowType::kFloat16:
      return LaunchGrad<Float16Element>(in, stream, grad_rows, grad_gates);
    case RowType::kFloat64:
      return LaunchGrad<Float64Element>(in, stream, grad_rows, grad_gates);
  }
}

}  // namespace mrl
