// The Python module mrl._C. Addresses come in as integers: no torch headers, so one binary serves
// every torch version. mrl/kernels/ checks shapes, types and devices before it calls.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "policy_loss.h"

namespace py = pybind11;

namespace {

template <typename T>
T* Pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void BindPolicyLoss(py::module_& module) {
  py::enum_<mrl::Ratio>(module, "Ratio")
      .value("token", mrl::Ratio::kToken)
      .value("sequence", mrl::Ratio::kSequence);
  module.def(
      "policy_loss",
      [](uintptr_t logprobs, uintptr_t old_logprobs, uintptr_t loss_mask, uintptr_t cu_seqlens,
         uintptr_t advantages, uintptr_t seq_weight, int64_t num_tokens, int64_t num_sequences,
         mrl::Ratio ratio, double clip_low, double clip_high, int num_threads, uintptr_t loss,
         uintptr_t grad, uintptr_t stats) {
        const mrl::PolicyLossInput input{
            Pointer<const float>(logprobs),
            Pointer<const float>(old_logprobs),
            Pointer<const uint8_t>(loss_mask),
            Pointer<const int32_t>(cu_seqlens),
            Pointer<const float>(advantages),
            Pointer<const float>(seq_weight),
            num_tokens,
            num_sequences,
            ratio,
            clip_low,
            clip_high,
        };
        mrl::PolicyLossStats result;
        *Pointer<double>(loss) = mrl::PolicyLoss(input, num_threads, Pointer<float>(grad), &result);
        double* out = Pointer<double>(stats);
        out[0] = result.ratio_sum;
        out[1] = result.ratio_count;
        out[2] = result.ratio_max;
        out[3] = result.clip_count;
      },
      py::kw_only(), py::arg("logprobs"), py::arg("old_logprobs"), py::arg("loss_mask"),
      py::arg("cu_seqlens"), py::arg("advantages"), py::arg("seq_weight"), py::arg("num_tokens"),
      py::arg("num_sequences"), py::arg("ratio"), py::arg("clip_low"), py::arg("clip_high"),
      py::arg("num_threads"), py::arg("loss"), py::arg("grad"), py::arg("stats"),
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "mrl's compiled kernels; use them through mrl.kernels";
  BindPolicyLoss(module);
}
