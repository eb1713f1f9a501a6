// These kernels are short and called often, so their arguments are positional: reading them by name
// takes as long as a kernel.
#include "norm_rope.h"

#include "bind/arguments.h"

namespace mrl {
namespace {

template <class T>
T* At(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

void BindNormRope(pybind11::module_& module) {
  module.def("rms_norm_cpu", [](int type, uintptr_t x, uintptr_t residual, uintptr_t weight,
                                int64_t num_tokens, int64_t num_heads, int64_t size, int64_t stride,
                                float eps, uintptr_t out, uintptr_t sum, int num_threads) {
    const RmsNormInput input{static_cast<FloatType>(type),
                             At<const void>(x),
                             At<const void>(residual),
                             At<const void>(weight),
                             num_tokens,
                             num_heads,
                             size,
                             stride,
                             eps};
    Run([&] { RmsNormCpu(input, num_threads, At<void>(out), At<void>(sum)); });
  });
  module.def("rotate_cpu", [](int type, uintptr_t query, int64_t query_heads, int64_t query_stride,
                              uintptr_t query_out, uintptr_t key, int64_t key_heads,
                              int64_t key_stride, uintptr_t key_out, uintptr_t positions,
                              uintptr_t cos_sin, int64_t num_tokens, int64_t num_positions,
                              int64_t size, int64_t rotary_size, bool halves, int num_threads) {
    const RotateInput input{static_cast<FloatType>(type),
                            {At<const void>(query), query_heads, query_stride, At<void>(query_out)},
                            {At<const void>(key), key_heads, key_stride, At<void>(key_out)},
                            At<const int64_t>(positions),
                            At<const float>(cos_sin),
                            num_tokens,
                            num_positions,
                            size,
                            rotary_size,
                            halves};
    Run([&] { RotateCpu(input, num_threads); });
  });
}

}  // namespace mrl
