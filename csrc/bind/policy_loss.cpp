#include "policy_loss.h"

#include <pybind11/stl.h>

#include <stdexcept>
#include <vector>

#include "bind/arguments.h"

namespace py = pybind11;

namespace mrl {
namespace {

// Makes PolicyLossOptions from its fields, in order.
PolicyLossOptions ReadOptions(const std::vector<double>& x) {
  if (x.size() != 14) throw std::invalid_argument("options: expected 14 numbers");
  const auto kind = [&x](int i) { return static_cast<int>(x[i]); };
  return {static_cast<Ratio>(kind(0)),
          static_cast<Clip>(kind(1)),
          x[2],
          x[3],
          x[4],
          x[5],
          x[6],
          x[7] != 0,
          static_cast<Importance>(kind(8)),
          static_cast<Level>(kind(9)),
          x[10],
          x[11],
          static_cast<Kl>(kind(12)),
          x[13]};
}

PolicyLossInput ReadInput(const py::kwargs& a) {
  PolicyLossInput in;
  in.options = ReadOptions(Value<std::vector<double>>(a, "options"));
  in.logprobs = Pointer<const float>(a, "logprobs");
  in.old_logprobs = Pointer<const float>(a, "old_logprobs");
  in.loss_mask = Pointer<const uint8_t>(a, "loss_mask");
  in.cu_seqlens = Pointer<const int32_t>(a, "cu_seqlens");
  in.advantages = Pointer<const float>(a, "advantages");
  in.seq_weight = Pointer<const float>(a, "seq_weight");
  in.rollout_logprobs = Pointer<const float>(a, "rollout_logprobs");
  in.ref_logprobs = Pointer<const float>(a, "ref_logprobs");
  in.seq_logratio = Pointer<const double>(a, "seq_logratio");
  in.seq_importance = Pointer<const double>(a, "seq_importance");
  in.num_tokens = Value<int64_t>(a, "num_tokens");
  in.num_sequences = Value<int64_t>(a, "num_sequences");
  return in;
}

PolicyLossOutput ReadOutput(const py::kwargs& a) {
  return {Pointer<float>(a, "grad"), Pointer<double>(a, "loss"), Pointer<double>(a, "stats"),
          Pointer<double>(a, "seq_stats")};
}

SeqLogratioInput ReadSeqLogratio(const py::kwargs& a) {
  return {Pointer<const float>(a, "logprobs"),    Pointer<const float>(a, "old_logprobs"),
          Pointer<const uint8_t>(a, "loss_mask"), Pointer<const int32_t>(a, "cu_seqlens"),
          Value<int64_t>(a, "num_tokens"),        Value<int64_t>(a, "num_sequences")};
}

}  // namespace

void BindPolicyLoss(py::module_& module) {
  py::tuple names(static_cast<size_t>(kNumPolicyStats));
  for (int i = 0; i < kNumPolicyStats; ++i) names[i] = py::str(kPolicyStatNames[i]);
  module.attr("POLICY_STATS") = names;
  module.def("policy_loss_cpu", [](const py::kwargs& a) {
    const PolicyLossInput in = ReadInput(a);
    const PolicyLossOutput out = ReadOutput(a);
    const int num_threads = Value<int>(a, "num_threads");
    Run([&] { PolicyLossCpu(in, out, num_threads); });
  });
  module.def("seq_logratio_cpu", [](const py::kwargs& a) {
    const SeqLogratioInput in = ReadSeqLogratio(a);
    double* sums = Pointer<double>(a, "sums");
    const int num_threads = Value<int>(a, "num_threads");
    Run([&] { SeqLogratioCpu(in, sums, num_threads); });
  });
#ifdef MRL_WITH_CUDA
  module.def("policy_loss_workspace_bytes", &PolicyLossWorkspaceBytes);
  module.def("policy_loss_cuda", [](const py::kwargs& a) {
    const PolicyLossInput in = ReadInput(a);
    const PolicyLossOutput out = ReadOutput(a);
    void* workspace = Pointer<void>(a, "workspace");
    const uintptr_t stream = Value<uintptr_t>(a, "stream");
    Run([&] { PolicyLossCuda(in, out, workspace, stream); });
  });
  module.def("seq_logratio_cuda", [](const py::kwargs& a) {
    const SeqLogratioInput in = ReadSeqLogratio(a);
    double* sums = Pointer<double>(a, "sums");
    void* workspace = Pointer<void>(a, "workspace");
    const uintptr_t stream = Value<uintptr_t>(a, "stream");
    Run([&] { SeqLogratioCuda(in, sums, workspace, stream); });
  });
#endif
}

}  // namespace mrl
