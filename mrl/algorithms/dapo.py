"""DAPO (arXiv 2503.14476) has clip-higher, a mean over all tokens of the step, and no KL.

Its two other parts are the loop's: `algorithm.dynamic_sampling`, and `algorithm.overlong_buffer_len`
with `overlong_penalty`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algorithms.advantages import SPREAD_KEYS, group_normalised
from mrl.algorithms.aggregation import weights_by
from mrl.algorithms.ratio_loss import PPO_CLIP_KEYS, ppo_clip, ratio_loss
from mrl.config import AlgorithmConfig
from mrl.types import LossOutput, MicroBatch

READS = (*PPO_CLIP_KEYS, *SPREAD_KEYS)
CLIP_LOW = 0.2  # section 4.1
CLIP_HIGH = 0.28

advantages = group_normalised
sequence_weights = weights_by("token_mean")


def loss(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """Compute eq. 8, negated and weighted. Raises ValueError without `old_logprobs`."""
    clip = ppo_clip(config, CLIP_LOW, CLIP_HIGH)
    return ratio_loss(logprobs, batch, config, ratio="token", clip=clip)


def overlong_penalty(lengths: Tensor, max_len: int, buffer_len: int) -> Tensor:
    """What is added to the rewards, f32[S] in [-1, 0], of responses of i64[S] tokens (eq. 13).

    0 up to max_len - buffer_len tokens, from there linearly down to -1 at max_len and above.
    Raises ValueError where the buffer is empty or longer than a response.
    """
    if not 0 < buffer_len <= max_len:
        raise ValueError(f"buffer_len: got {buffer_len}, expected 1 to max_len = {max_len}")
    over = (lengths - (max_len - buffer_len)).double() / buffer_len
    return -over.clamp(0.0, 1.0).to(torch.float32)
