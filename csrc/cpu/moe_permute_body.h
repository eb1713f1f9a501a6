// Handles one row of copies or sums at a time. The compiler vectorizes the loops.
//
// No include guard: compiled once for each instruction set, see cpu/for_each_target.h.

// Sums two vectors of columns from `start` on, which stay in registers over all copies.
inline void SumTwoVectors(const MoeUnpermuteInput& in, int64_t token, int64_t start, float* to) {
  const int32_t* copies = in.copies + token * in.topk;
  const float* gates = static_cast<const float*>(in.gates);
  Floats first(0.0f), second(0.0f);
  for (int64_t k = 0; k < in.topk; ++k) {
    if (copies[k] < 0) continue;
    const float* x = static_cast<const float*>(in.rows) + copies[k] * in.num_columns + start;
    if (gates == nullptr) {
      first = first + Load(x);
      second = second + Load(x + kLanes);
    } else {
      const Floats gate(gates[copies[k]]);
      first = first + gate * Load(x);
      second = second + gate * Load(x + kLanes);
    }
  }
  Store(to + start, first);
  Store(to + start + kLanes, second);
}

template <class Element>
inline void SumCopiesOf(const MoeUnpermuteInput& in, int64_t token, void* out) {
  typedef typename Element::Stored Stored;
  typedef typename Element::Sum Sum;
  const int32_t* copies = in.copies + token * in.topk;
  const Sum* gates = static_cast<const Sum*>(in.gates);
  Stored* to = static_cast<Stored*>(out) + token * in.num_columns;
  int64_t begin = 0;
  if constexpr (std::is_same_v<Element, Float32Element>) {
    for (; begin + 2 * kLanes <= in.num_columns; begin += 2 * kLanes) {
      SumTwoVectors(in, token, begin, to);
    }
  }
  for (int64_t start = begin; start < in.num_columns; start += kSumColumns) {
    const int64_t count = std::min(kSumColumns, in.num_columns - start);
    Sum sums[kSumColumns] = {};
    for (int64_t k = 0; k < in.topk; ++k) {
      if (copies[k] < 0) continue;
      const Stored* __restrict x =
          static_cast<const Stored*>(in.rows) + copies[k] * in.num_columns + start;
      if (gates == nullptr) {
        for (int64_t i = 0; i < count; ++i) sums[i] += Element::Read(x[i]);
      } else {
        const Sum gate = gates[copies[k]];
        for (int64_t i = 0; i < count; ++i) sums[i] += gate * Element::Read(x[i]);
      }
    }
    for (int64_t i = 0; i < count; ++i) to[start + i] = Element::Write(sums[i]);
  }
}

// Products are summed in kLanes lanes, whatever the machine's vector width, then over the lanes in
// order.
template <class Element>
inline void GradientsOf(const MoeUnpermuteGradInput& in, int64_t copy, void* grad_rows,
                        void* grad_gates) {
  typedef typename Element::Stored Stored;
  typedef typename Element::Sum Sum;
  const int64_t size = in.num_columns;
  const Stored* __restrict grad = static_cast<const Stored*>(in.grad) + in.tokens[copy] * size;
  const Stored* __restrict row = static_cast<const Stored*>(in.rows) + copy * size;
  Stored* __restrict to = static_cast<Stored*>(grad_rows) + copy * size;
  const Sum gate = static_cast<const Sum*>(in.gates)[copy];
  Sum sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const Sum g = Element::Read(grad[i + lane]);
      sums[lane] += g * Element::Read(row[i + lane]);
      to[i + lane] = Element::Write(gate * g);
    }
  }
  for (; i < size; ++i) {
    const Sum g = Element::Read(grad[i]);
    sums[i % kLanes] += g * Element::Read(row[i]);
    to[i] = Element::Write(gate * g);
  }
  Sum total = 0;
  for (const Sum sum : sums) total += sum;
  static_cast<Sum*>(grad_gates)[copy] = total;
}

inline void SumCopies(const MoeUnpermuteInput& in, int64_t token, void* out) {
  switch (in.type) {
    case RowType::kFloat32:
      return SumCopiesOf<Float32Element>(in, token, out);
    case RowType::kBfloat16:
      return SumCopiesOf<Bfloat16Element>(in, token, out);
    case RowType::kFloat16:
      return SumCopiesOf<Float16Element>(in, token, out);
    case RowType::kFloat64:
      return SumCopiesOf<Float64Element>(in, token, out);
  }
}

inline void Gradients(const MoeUnpermuteGradInput& in, int64_t copy, void* rows, void* gates) {
  switch (in.type) {
    case RowType::kFloat32:
      return GradientsOf<Float32Element>(in, copy, rows, gates);
    case RowType::kBfloat16:
      return GradientsOf<Bfloat16Element>(in, copy, rows, gates);
    case RowType::kFloat16:
      return GradientsOf<Float16Element>(in, copy, rows, gates);
    case RowType::kFloat64:
      return GradientsOf<Float64Element>(in, copy, rows, gates);
  }
}
