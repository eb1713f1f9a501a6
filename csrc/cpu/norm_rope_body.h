// RMSNorm of one token's rows, and the rotation of one token's rows.
//
// No include guard: compiled once for each instruction set, see cpu/for_each_target.h.

// `row` has room for whole vectors.
template <class Element>
inline void RmsNormTokenOf(const RmsNormInput& in, int64_t token, float* row, void* out,
                           void* sum) {
  typedef typename Element::Stored Stored;
  const int64_t size = in.size, padded = (size + kLanes - 1) / kLanes * kLanes;
  const auto* weight = static_cast<const Stored*>(in.weight);
  for (int64_t head = 0; head < in.num_heads; ++head) {
    const auto* x = static_cast<const Stored*>(in.x) + token * in.stride + head * size;
    const int64_t at = (token * in.num_heads + head) * size;
    auto* to = static_cast<Stored*>(out) + at;
    if (in.residual) {
      const auto* residual = static_cast<const Stored*>(in.residual) + at;
      auto* added = static_cast<Stored*>(sum) + at;
      for (int64_t i = 0; i < size; ++i) {
        row[i] = Element::Read(x[i]) + Element::Read(residual[i]);
        added[i] = Element::Write(row[i]);
      }
    } else {
      for (int64_t i = 0; i < size; ++i) row[i] = Element::Read(x[i]);
    }
    for (int64_t i = size; i < padded; ++i) row[i] = 0;
    Floats squares(0.0f);
    for (int64_t i = 0; i < padded; i += kLanes) {
      const Floats values = Load(row + i);
      squares = squares + values * values;
    }
    const float mean = SumOfLanes(squares) / static_cast<float>(size);
    const float scale = 1.0f / std::sqrt(mean + in.eps);
    for (int64_t i = 0; i < size; ++i) {
      to[i] = Element::Write(row[i] * scale * Element::Read(weight[i]));
    }
  }
}

template <class Element>
inline void RotateRows(const RotateInput& in, const RotatedTensor& tensor, int64_t token,
                       const float* cosines, const float* sines) {
  typedef typename Element::Stored Stored;
  const int64_t pairs = in.rotary_size / 2, step = in.halves ? 1 : 2;
  const int64_t other = in.halves ? pairs : 1;
  for (int64_t head = 0; head < tensor.num_heads; ++head) {
    const auto* x = static_cast<const Stored*>(tensor.x) + token * tensor.stride + head * in.size;
    auto* to = static_cast<Stored*>(tensor.out) + (token * tensor.num_heads + head) * in.size;
    for (int64_t i = 0; i < pairs; ++i) {
      const float first = Element::Read(x[i * step]), second = Element::Read(x[i * step + other]);
      to[i * step] = Element::Write(first * cosines[i] - second * sines[i]);
      to[i * step + other] = Element::Write(second * cosines[i] + first * sines[i]);
    }
    for (int64_t i = in.rotary_size; i < in.size; ++i) to[i] = x[i];
  }
}

template <class Element>
inline void RotateTokenOf(const RotateInput& in, int64_t token) {
  const float* cosines = in.cos_sin + in.positions[token] * in.rotary_size;
  const float* sines = cosines + in.rotary_size / 2;
  RotateRows<Element>(in, in.query, token, cosines, sines);
  RotateRows<Element>(in, in.key, token, cosines, sines);
}

inline void RmsNormToken(const RmsNormInput& in, int64_t token, float* row, void* out, void* sum) {
  switch (in.type) {
    case FloatType::kBfloat16:
      return RmsNormTokenOf<Bfloat16Element>(in, token, row, out, sum);
    case FloatType::kFloat16:
      return RmsNormTokenOf<Float16Element>(in, token, row, out, sum);
    default:
      return RmsNormTokenOf<Float32Element>(in, token, row, out, sum);
  }
}

inline void RotateToken(const RotateInput& in, int64_t token) {
  switch (in.type) {
    case FloatType::kBfloat16:
      return RotateTokenOf<Bfloat16Element>(in, token);
    case FloatType::kFloat16:
      return RotateTokenOf<Float16Element>(in, token);
    default:
      return RotateTokenOf<Float32Element>(in, token);
  }
}
