"""These fp64 references of the ops in `mrl.kernels` are slow, plain and differentiable by autograd.

Tests and benchmarks compare against these. They share no code with the ops.
"""

from mrl.kernels.oracle.moe_permute import moe_permute, moe_sort, moe_unpermute
from mrl.kernels.oracle.packed_gae import packed_gae
from mrl.kernels.oracle.policy_loss import policy_loss, seq_logratio
from mrl.kernels.oracle.routes import pack_routes, unpack_routes
from mrl.kernels.oracle.truncated_logprob import truncated_logprob
from mrl.kernels.oracle.vp_logprob import vp_logprob

__all__ = [
    "moe_permute",
    "moe_sort",
    "moe_unpermute",
    "pack_routes",
    "packed_gae",
    "policy_loss",
    "seq_logratio",
    "truncated_logprob",
    "unpack_routes",
    "vp_logprob",
]
