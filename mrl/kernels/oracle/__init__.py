"""References of the ops in `mrl.kernels`, written in plain torch without regard to speed.

They compute in fp64, except those of `block_quant`, whose fp32 results are defined to the bit.

Tests and benchmarks compare the ops with the references. References and ops share no code, except
that the op `seeded_sample` calls its reference for rows that its kernel cannot decide. The references
of differentiable ops are differentiable by autograd.
"""

from mrl.kernels.oracle.block_quant import (
    dequantize_fp8_blocks,
    dequantize_int8_channels,
    fake_quantize_fp8_groups,
    fake_quantize_int8_tokens,
    quantize_fp8_blocks,
    quantize_int8_channels,
)
from mrl.kernels.oracle.fused_experts import fused_experts
from mrl.kernels.oracle.moe_permute import moe_permute, moe_sort, moe_unpermute
from mrl.kernels.oracle.norm_rope import rms_norm, rotate
from mrl.kernels.oracle.packed_gae import packed_gae
from mrl.kernels.oracle.paged_attention import paged_attention
from mrl.kernels.oracle.policy_loss import policy_loss, seq_logratio
from mrl.kernels.oracle.seeded_sample import seeded_sample
from mrl.kernels.oracle.truncated_logprob import truncated_logprob
from mrl.kernels.oracle.vp_logprob import vp_logprob
from mrl.kernels.oracle.weight_delta import weight_delta

__all__ = [
    "dequantize_fp8_blocks",
    "dequantize_int8_channels",
    "fake_quantize_fp8_groups",
    "fake_quantize_int8_tokens",
    "fused_experts",
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
    "truncated_logprob",
    "vp_logprob",
    "weight_delta",
]
