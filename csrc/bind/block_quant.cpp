#include "block_quant.h"

#include "bind/arguments.h"

namespace py = pybind11;

namespace mrl {
namespace {

QuantInput ReadQuant(const py::kwargs& a) {
  return {Pointer<const void>(a, "x"), static_cast<FloatType>(Value<int>(a, "type")),
          Value<int64_t>(a, "num_rows"), Value<int64_t>(a, "num_columns")};
}

DequantInput ReadDequant(const py::kwargs& a) {
  return {Pointer<const uint8_t>(a, "q"), Pointer<const float>(a, "scales"),
          Value<int64_t>(a, "num_rows"), Value<int64_t>(a, "num_columns"),
          static_cast<FloatType>(Value<int>(a, "type"))};
}

// The kernels of a CPU and of a GPU differ in one argument, which has this name and this type.
struct OnCpu {
  static constexpr const char* kName = "num_threads";
  typedef int Where;
};

struct OnGpu {
  static constexpr const char* kName = "stream";
  typedef uintptr_t Where;
};

template <class Place>
typename Place::Where Where(const py::kwargs& a) {
  return Value<typename Place::Where>(a, Place::kName);
}

template <class Place, class Kernel>
void DefineFp8Blocks(py::module_& module, const char* name, Kernel* kernel) {
  module.def(name, [kernel](const py::kwargs& a) {
    const QuantInput in = ReadQuant(a);
    const bool powers_of_two = Value<bool>(a, "powers_of_two");
    uint8_t* q = Pointer<uint8_t>(a, "q");
    float* scales = Pointer<float>(a, "scales");
    const auto where = Where<Place>(a);
    Run([&] { kernel(in, powers_of_two, where, q, scales); });
  });
}

template <class Place, class Kernel>
void DefineInt8Rows(py::module_& module, const char* name, Kernel* kernel) {
  module.def(name, [kernel](const py::kwargs& a) {
    const QuantInput in = ReadQuant(a);
    uint8_t* q = Pointer<uint8_t>(a, "q");
    float* scales = Pointer<float>(a, "scales");
    const auto where = Where<Place>(a);
    Run([&] { kernel(in, where, q, scales); });
  });
}

template <class Place, class Kernel>
void DefineDequantize(py::module_& module, const char* name, Kernel* kernel) {
  module.def(name, [kernel](const py::kwargs& a) {
    const DequantInput in = ReadDequant(a);
    void* out = Pointer<void>(a, "out");
    const auto where = Where<Place>(a);
    Run([&] { kernel(in, where, out); });
  });
}

template <class Place, class Kernel>
void DefineFakeFp8(py::module_& module, const char* name, Kernel* kernel) {
  module.def(name, [kernel](const py::kwargs& a) {
    const QuantInput in = ReadQuant(a);
    const int64_t group = Value<int64_t>(a, "group");
    void* out = Pointer<void>(a, "out");
    const auto where = Where<Place>(a);
    Run([&] { kernel(in, group, where, out); });
  });
}

template <class Place, class Kernel>
void DefineFakeInt8(py::module_& module, const char* name, Kernel* kernel) {
  module.def(name, [kernel](const py::kwargs& a) {
    const QuantInput in = ReadQuant(a);
    void* out = Pointer<void>(a, "out");
    const auto where = Where<Place>(a);
    Run([&] { kernel(in, where, out); });
  });
}

}  // namespace

void BindBlockQuant(py::module_& module) {
  DefineFp8Blocks<OnCpu>(module, "quantize_fp8_blocks_cpu", QuantizeFp8BlocksCpu);
  DefineInt8Rows<OnCpu>(module, "quantize_int8_rows_cpu", QuantizeInt8RowsCpu);
  DefineDequantize<OnCpu>(module, "dequantize_fp8_blocks_cpu", DequantizeFp8BlocksCpu);
  DefineDequantize<OnCpu>(module, "dequantize_int8_rows_cpu", DequantizeInt8RowsCpu);
  DefineFakeFp8<OnCpu>(module, "fake_quantize_fp8_groups_cpu", FakeQuantizeFp8GroupsCpu);
  DefineFakeInt8<OnCpu>(module, "fake_quantize_int8_rows_cpu", FakeQuantizeInt8RowsCpu);
#ifdef MRL_WITH_CUDA
  DefineFp8Blocks<OnGpu>(module, "quantize_fp8_blocks_cuda", QuantizeFp8BlocksCuda);
  DefineInt8Rows<OnGpu>(module, "quantize_int8_rows_cuda", QuantizeInt8RowsCuda);
  DefineDequantize<OnGpu>(module, "dequantize_fp8_blocks_cuda", DequantizeFp8BlocksCuda);
  DefineDequantize<OnGpu>(module, "dequantize_int8_rows_cuda", DequantizeInt8RowsCuda);
  DefineFakeFp8<OnGpu>(module, "fake_quantize_fp8_groups_cuda", FakeQuantizeFp8GroupsCuda);
  DefineFakeInt8<OnGpu>(module, "fake_quantize_int8_rows_cuda", FakeQuantizeInt8RowsCuda);
#endif
}

}  // namespace mrl
