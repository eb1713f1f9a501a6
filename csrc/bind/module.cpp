// The Python module mrl._C; use it through mrl.kernels.
#include "bind/arguments.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "mrl's compiled kernels; use them through mrl.kernels";
#ifdef MRL_WITH_CUDA
  module.attr("has_cuda") = true;
#else
  module.attr("has_cuda") = false;
#endif
  mrl::BindBlockQuant(module);
  mrl::BindEmptyGroups(module);
  mrl::BindFusedExperts(module);
  mrl::BindInvariant(module);
  mrl::BindMoePermute(module);
  mrl::BindNormRope(module);
  mrl::BindPackedGae(module);
  mrl::BindPagedAttention(module);
  mrl::BindPolicyLoss(module);
  mrl::BindSeededSample(module);
  mrl::BindVpLogprob(module);
  mrl::BindWeightDelta(module);
  mrl::BindWeightDigest(module);
}
