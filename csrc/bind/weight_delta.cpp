#include "weight_delta.h"

#include "bind/arguments.h"

namespace mrl {
namespace {

DeltaParts Parts(const pybind11::kwargs& arguments) {
  return {
      Pointer<const uint32_t>(arguments, "changed"),
      Pointer<const uint32_t>(arguments, "position_bytes"),
      Pointer<const int64_t>(arguments, "value_starts"),
      Pointer<const int64_t>(arguments, "position_starts"),
  };
}

}  // namespace

void BindWeightDelta(pybind11::module_& module) {
  module.def("weight_delta_mark_cpu", [](const pybind11::kwargs& arguments) {
    const void* before = Pointer<const void>(arguments, "before");
    const void* after = Pointer<const void>(arguments, "after");
    const int64_t element_size = Value<int64_t>(arguments, "element_size");
    const int64_t num_elements = Value<int64_t>(arguments, "num_elements");
    const int num_threads = Value<int>(arguments, "num_threads");
    uint64_t* marks = Pointer<uint64_t>(arguments, "marks");
    uint32_t* changed = Pointer<uint32_t>(arguments, "changed");
    uint32_t* position_bytes = Pointer<uint32_t>(arguments, "position_bytes");
    Run([&] {
      WeightDeltaMarkCpu(before, after, element_size, num_elements, num_threads, marks, changed,
                         position_bytes);
    });
  });
  module.def("weight_delta_encode_cpu", [](const pybind11::kwargs& arguments) {
    const void* after = Pointer<const void>(arguments, "after");
    const uint64_t* marks = Pointer<const uint64_t>(arguments, "marks");
    const int64_t element_size = Value<int64_t>(arguments, "element_size");
    const int64_t num_elements = Value<int64_t>(arguments, "num_elements");
    const int num_threads = Value<int>(arguments, "num_threads");
    const DeltaParts parts = Parts(arguments);
    void* values = Pointer<void>(arguments, "values");
    uint8_t* positions = Pointer<uint8_t>(arguments, "positions");
    Run([&] {
      WeightDeltaEncodeCpu(after, marks, element_size, num_elements, num_threads, parts, values,
                           positions);
    });
  });
  module.def("weight_delta_apply_cpu", [](const pybind11::kwargs& arguments) {
    void* base = Pointer<void>(arguments, "base");
    const int64_t element_size = Value<int64_t>(arguments, "element_size");
    const int64_t num_elements = Value<int64_t>(arguments, "num_elements");
    const int num_threads = Value<int>(arguments, "num_threads");
    const DeltaParts parts = Parts(arguments);
    const void* values = Pointer<const void>(arguments, "values");
    const uint8_t* positions = Pointer<const uint8_t>(arguments, "positions");
    Run([&] {
      WeightDeltaApplyCpu(base, element_size, num_elements, num_threads, parts, values, positions);
    });
  });
}

}  // namespace mrl
