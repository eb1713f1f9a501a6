"""DAPO (arXiv 2503.14476): a clip range that is wider above 1 than below, a mean over all tokens of
the step, and no KL by default.

DAPO's other two techniques are options of the training loop: `algorithm.dynamic_sampling`, and
`algorithm.overlong_buffer_len`, which adds `overlong_penalty` to the rewards (`shaped_rewards`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algorithms.advantages import SPREAD_KEYS, group_normalised
from mrl.algorithms.aggregation import weights_by
from mrl.algorithms.ratio_loss import PPO_CLIP_KEYS, ppo_clip, ratio_loss
from mrl.config import AlgorithmConfig
from mrl.types import LossOutput, MicroBatch, SampleGroup

READS = (*PPO_CLIP_KEYS, *SPREAD_KEYS)
CLIP_LOW = 0.2  # section 4.1
CLIP_HIGH = 0.28

advantages = group_normalised
sequence_weights = weights_by("token_mean")


def loss(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """Compute DAPO's objective (eq. 8) as a loss: negated, and weighted by `batch.seq_weight`.
    Raises ValueError if `batch.old_logprobs` is None."""
    clip = ppo_clip(config, CLIP_LOW, CLIP_HIGH)
    return ratio_loss(logprobs, batch, config, ratio="token", clip=clip)


def overlong_penalty(lengths: Tensor, max_len: int, buffer_len: int) -> Tensor:
    """Return f32[S]: the term from -1 to 0 that is added to the reward of a long response (eq. 13).

    It is 0 up to `max_len - buffer_len` tokens, falls linearly to -1 at `max_len` tokens, and is -1
    above. lengths: i64[S], the length of each response in tokens. Raises ValueError if `buffer_len`
    is not between 1 and `max_len`.
    """
    if not 0 < buffer_len <= max_len:
        raise ValueError(f"buffer_len: got {buffer_len}, expected 1 to max_len = {max_len}")
    over = (lengths - (max_len - buffer_len)).double() / buffer_len
    return -over.clamp(0.0, 1.0).to(torch.float32)


def shaped_rewards(group: SampleGroup, config: AlgorithmConfig, max_response_len: int) -> Tensor:
    """Return f32[G]: the rewards plus DAPO's soft penalty for long answers, which is at most 0.

    The penalty (arXiv 2503.14476 eq. 13) is added only with `overlong_buffer_len`. A sample without
    a reward has NaN.
    """
    assert group.rewards is not None
    if not config.overlong_buffer_len:
        return group.rewards
    lengths = torch.tensor([sample.num_generated for sample in group.samples])
    return group.rewards + overlong_penalty(lengths, max_response_len, config.overlong_buffer_len)
