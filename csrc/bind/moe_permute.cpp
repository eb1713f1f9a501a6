#include "moe_permute.h"

#include "bind/arguments.h"

namespace py = pybind11;

namespace mrl {
namespace {

MoeIdsInput ReadIds(const py::kwargs& a) {
  return {Pointer<const uint8_t>(a, "chosen"), Value<int64_t>(a, "num_tokens"),
          Value<int64_t>(a, "num_experts"), Value<int64_t>(a, "width")};
}

MoeSortInput ReadSort(const py::kwargs& a) {
  return {Pointer<const int32_t>(a, "ids"), Value<int64_t>(a, "num_tokens"),
          Value<int64_t>(a, "topk"),        Value<int64_t>(a, "num_experts"),
          Value<int64_t>(a, "num_copies"),  Pointer<int32_t>(a, "scratch")};
}

MoeSortOutput ReadSorted(const py::kwargs& a) {
  return {Pointer<int32_t>(a, "tokens"), Pointer<int32_t>(a, "cells"),
          Pointer<int32_t>(a, "copies"), Pointer<int64_t>(a, "counts")};
}

MoePermuteInput ReadPermute(const py::kwargs& a) {
  return {Pointer<const void>(a, "rows"),  Pointer<const int32_t>(a, "index"),
          Value<int64_t>(a, "num_copies"), Value<int64_t>(a, "row_bytes"),
          Pointer<const void>(a, "table"), Pointer<const int32_t>(a, "cells"),
          Value<int64_t>(a, "entry_bytes")};
}

MoeUnpermuteInput ReadUnpermute(const py::kwargs& a) {
  return {static_cast<RowType>(Value<int>(a, "type")),
          Pointer<const void>(a, "rows"),
          Pointer<const int32_t>(a, "copies"),
          Value<int64_t>(a, "num_tokens"),
          Value<int64_t>(a, "topk"),
          Value<int64_t>(a, "num_columns"),
          Pointer<const void>(a, "gates"),
          Pointer<const void>(a, "entries"),
          Pointer<const int32_t>(a, "cells"),
          Value<int64_t>(a, "num_experts"),
          Value<int64_t>(a, "entry_bytes")};
}

MoeUnpermuteGradInput ReadGrad(const py::kwargs& a) {
  return {static_cast<RowType>(Value<int>(a, "type")),
          Pointer<const void>(a, "grad"),
          Pointer<const void>(a, "rows"),
          Pointer<const void>(a, "gates"),
          Pointer<const int32_t>(a, "tokens"),
          Value<int64_t>(a, "num_copies"),
          Value<int64_t>(a, "num_columns")};
}

void BindCpu(py::module_& module) {
  module.def("moe_ids_cpu", [](const py::kwargs& a) {
    const MoeIdsInput in = ReadIds(a);
    const int num_threads = Value<int>(a, "num_threads");
    int32_t* ids = Pointer<int32_t>(a, "ids");
    Run([&] { MoeIdsCpu(in, num_threads, ids); });
  });
  module.def("moe_sort_cpu", [](const py::kwargs& a) {
    const MoeSortInput in = ReadSort(a);
    const MoeSortOutput out = ReadSorted(a);
    const int num_threads = Value<int>(a, "num_threads");
    Run([&] { MoeSortCpu(in, num_threads, out); });
  });
  module.def("moe_permute_cpu", [](const py::kwargs& a) {
    const MoePermuteInput in = ReadPermute(a);
    const int num_threads = Value<int>(a, "num_threads");
    void *out = Pointer<void>(a, "out"), *entries = Pointer<void>(a, "entries");
    Run([&] { MoePermuteCpu(in, num_threads, out, entries); });
  });
  module.def("moe_unpermute_cpu", [](const py::kwargs& a) {
    const MoeUnpermuteInput in = ReadUnpermute(a);
    const int num_threads = Value<int>(a, "num_threads");
    void *out = Pointer<void>(a, "out"), *table = Pointer<void>(a, "table");
    Run([&] { MoeUnpermuteCpu(in, num_threads, out, table); });
  });
  module.def("moe_unpermute_grad_cpu", [](const py::kwargs& a) {
    const MoeUnpermuteGradInput in = ReadGrad(a);
    const int num_threads = Value<int>(a, "num_threads");
    void *rows = Pointer<void>(a, "grad_rows"), *gates = Pointer<void>(a, "grad_gates");
    Run([&] { MoeUnpermuteGradCpu(in, num_threads, rows, gates); });
  });
}

#ifdef MRL_WITH_CUDA
void BindCuda(py::module_& module) {
  module.def("moe_ids_cuda", [](const py::kwargs& a) {
    const MoeIdsInput in = ReadIds(a);
    const uintptr_t stream = Value<uintptr_t>(a, "stream");
    int32_t* ids = Pointer<int32_t>(a, "ids");
    Run([&] { MoeIdsCuda(in, stream, ids); });
  });
  module.def("moe_sort_cuda", [](const py::kwargs& a) {
    const MoeSortInput in = ReadSort(a);
    const MoeSortOutput out = ReadSorted(a);
    const uintptr_t stream = Value<uintptr_t>(a, "stream");
    Run([&] { MoeSortCuda(in, stream, out); });
  });
  module.def("moe_permute_cuda", [](const py::kwargs& a) {
    const MoePermuteInput in = ReadPermute(a);
    const uintptr_t stream = Value<uintptr_t>(a, "stream");
    void *out = Pointer<void>(a, "out"), *entries = Pointer<void>(a, "entries");
    Run([&] { MoePermuteCuda(in, stream, out, entries); });
  });
  module.def("moe_unpermute_cuda", [](const py::kwargs& a) {
    const MoeUnpermuteInput in = ReadUnpermute(a);
    const uintptr_t stream = Value<uintptr_t>(a, "stream");
    void *out = Pointer<void>(a, "out"), *table = Pointer<void>(a, "table");
    Run([&] { MoeUnpermuteCuda(in, stream, out, table); });
  });
  module.def("moe_unpermute_grad_cuda", [](const py::kwargs& a) {
    const MoeUnpermuteGradInput in = ReadGrad(a);
    const uintptr_t stream = Value<uintptr_t>(a, "stream");
    void *rows = Pointer<void>(a, "grad_rows"), *gates = Pointer<void>(a, "grad_gates");
    Run([&] { MoeUnpermuteGradCuda(in, stream, rows, gates); });
  });
}
#endif

}  // namespace

void BindMoePermute(py::module_& module) {
  module.attr("MOE_CHUNK") = kMoeChunk;
  BindCpu(module);
#ifdef MRL_WITH_CUDA
  BindCuda(module);
#endif
}

}  // namespace mrl
