#include "seeded_sample.h"

#include "bind/arguments.h"

namespace mrl {

void BindSeededSample(pybind11::module_& module) {
  module.def("seeded_sample_cpu", [](const pybind11::kwargs& arguments) {
    const SeededSampleInput input = {
        Pointer<const void>(arguments, "scores"),
        Pointer<const int64_t>(arguments, "seeds"),
        Pointer<const int64_t>(arguments, "positions"),
        Value<int64_t>(arguments, "num_rows"),
        Value<int64_t>(arguments, "num_columns"),
        static_cast<SampleScores>(Value<int>(arguments, "kind")),
    };
    const int num_threads = Value<int>(arguments, "num_threads");
    int64_t* ids = Pointer<int64_t>(arguments, "ids");
    Run([&] { SeededSampleCpu(input, num_threads, ids); });
  });
}

}  // namespace mrl
