"""Torch ops that call the compiled module `mrl._C`, and their fp64 references (`oracle`).

Importing this package raises ImportError if `mrl._C` has not been built; there is no slow fallback.
"""

import torch  # noqa: F401  (before mrl._C, so that both use torch's libgomp)

try:
    import mrl._C  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"mrl._C, the compiled kernels, cannot be imported: run `make setup` to build it ({error})"
    ) from None

from mrl.kernels.block_quant import (
    dequantize_fp8_blocks,
    dequantize_int8_channels,
    fake_quantize_fp8_groups,
    fake_quantize_int8_tokens,
    quantize_fp8_blocks,
    quantize_int8_channels,
)
from mrl.kernels.empty_groups import zero_empty_groups_
from mrl.kernels.fused_experts import (
    SWIGLU,
    GatedActivation,
    fused_experts,
    gpt_oss_swiglu,
    supports_fused_experts,
)
from mrl.kernels.linear_logprob import Chunked, linear_logprob
from mrl.kernels.moe_permute import moe_permute, moe_unpermute
from mrl.kernels.moe_sort import ExpertOrder, moe_ids, moe_sort
from mrl.kernels.norm_rope import rms_norm, rotate, supports_rms_norm, supports_rotate
from mrl.kernels.packed_gae import packed_gae
from mrl.kernels.paged_attention import paged_attention, supports_paged_attention
from mrl.kernels.policy_loss import POLICY_STATS, PolicyLoss, policy_loss
from mrl.kernels.policy_options import Clip, ImportanceWeight, KlPenalty, RatioKind
from mrl.kernels.seeded_sample import seeded_sample
from mrl.kernels.seq_logratio import seq_logratio
from mrl.kernels.vp_logprob import vp_logprob

__all__ = [
    "POLICY_STATS",
    "SWIGLU",
    "Chunked",
    "Clip",
    "ExpertOrder",
    "GatedActivation",
    "ImportanceWeight",
    "KlPenalty",
    "PolicyLoss",
    "RatioKind",
    "dequantize_fp8_blocks",
    "dequantize_int8_channels",
    "fake_quantize_fp8_groups",
    "fake_quantize_int8_tokens",
    "fused_experts",
    "gpt_oss_swiglu",
    "linear_logprob",
    "moe_ids",
    "moe_permute",
    "moe_sort",
    "moe_unpermute",
    "packed_gae",
    "paged_attention",
    "policy_loss",
    "quantize_fp8_blocks",
    "quantize_int8_channels",
    "rms_norm",
    "rotate",
    "seeded_sample",
    "seq_logratio",
    "supports_fused_experts",
    "supports_paged_attention",
    "supports_rms_norm",
    "supports_rotate",
    "vp_logprob",
    "zero_empty_groups_",
]
