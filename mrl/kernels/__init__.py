"""This room holds torch ops over the compiled module `mrl._C`, and their fp64 references (`oracle`).

Raises ImportError when `mrl._C` is not built: there is no slow path to fall back to unnoticed.
"""

import torch  # noqa: F401  (before mrl._C: both then share torch's libgomp)

try:
    import mrl._C  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"mrl._C, the compiled kernels, cannot be imported: run `make setup` to build it ({error})"
    ) from None

from mrl.kernels.empty_groups import zero_empty_groups_
from mrl.kernels.linear_logprob import Chunked, linear_logprob
from mrl.kernels.moe_permute import moe_permute, moe_unpermute
from mrl.kernels.moe_sort import ExpertOrder, moe_ids, moe_sort
from mrl.kernels.packed_gae import packed_gae
from mrl.kernels.policy_loss import POLICY_STATS, PolicyLoss, policy_loss
from mrl.kernels.policy_options import Clip, ImportanceWeight, KlPenalty, RatioKind
from mrl.kernels.routes import pack_routes, route_row_bytes, unpack_routes
from mrl.kernels.seq_logratio import seq_logratio
from mrl.kernels.vp_logprob import vp_logprob

__all__ = [
    "POLICY_STATS",
    "Chunked",
    "Clip",
    "ExpertOrder",
    "ImportanceWeight",
    "KlPenalty",
    "PolicyLoss",
    "RatioKind",
    "linear_logprob",
    "moe_ids",
    "moe_permute",
    "moe_sort",
    "moe_unpermute",
    "pack_routes",
    "packed_gae",
    "policy_loss",
    "route_row_bytes",
    "seq_logratio",
    "unpack_routes",
    "vp_logprob",
    "zero_empty_groups_",
]
