#include "weight_digest.h"

#include "bind/arguments.h"

namespace mrl {

void BindWeightDigest(pybind11::module_& module) {
  module.def("weight_digest_cpu", [](const pybind11::kwargs& arguments) {
    const WeightDigestInput input = {
        Pointer<const void>(arguments, "weights"),
        static_cast<WeightType>(Value<int>(arguments, "type")),
        Value<int64_t>(arguments, "num_groups"),
        Value<int64_t>(arguments, "group_size"),
    };
    const int num_threads = Value<int>(arguments, "num_threads");
    uint64_t* sums = Pointer<uint64_t>(arguments, "sums");
    Run([&] { WeightDigestCpu(input, num_threads, sums); });
  });
}

}  // namespace mrl
