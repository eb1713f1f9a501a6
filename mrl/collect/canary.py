"""Canaries are prompts to which trainer and engine must give the same log-probs after each weight sync.

Digests prove that the engine holds the numbers that were sent; canaries prove that it makes the same
model of them: names, layouts, the KV cache and the kernels included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.errors import NotFinite, RunFailed
from mrl.rollout.base import RolloutEngine
from mrl.types import Prompt

MAX_TOKENS = 64
TOLERANCE_FLOAT32 = 1e-3
TOLERANCE_HALF = 0.1
"""A few tokens change their experts in half precision; a wrong model is off by more than 1."""


def default_tolerance(*dtypes: torch.dtype) -> float:
    """Return the default tolerance for the canaries, given the dtypes of trainer and engine."""
    exact = all(dtype == torch.float32 for dtype in dtypes)
    return TOLERANCE_FLOAT32 if exact else TOLERANCE_HALF


def canary_sequences(prompts: Sequence[Prompt], num: int) -> list[Tensor]:
    """Return the first `num` prompts of at least two tokens, cut to 64 tokens: i64[T] each."""
    long_enough = [p.token_ids[:MAX_TOKENS] for p in prompts if p.token_ids.numel() > 1]
    return long_enough[:num]


def check_canaries(
    engine: RolloutEngine, sequences: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float
) -> float:
    """Return the mean |engine - trainer| of the log-probs over all canary tokens.

    Raises RunFailed where it is above `tolerance` or not a number, before anything is generated, and
    NotFinite where the trainer's own are not finite: then the weights are at fault, not the engine.
    """
    bad = [i for i, own in enumerate(expected) if not bool(own[1:].isfinite().all())]
    if bad:
        raise NotFinite(
            f"weight sync to version {engine.weight_version}: the trainer's own log-probs of canary "
            f"prompt {bad[0]} are not finite: its weights hold NaN or infinity, or overflow; look at "
            "the model with mrl check --deep, or continue from an earlier checkpoint"
        )
    got = engine.sequence_logprobs(sequences)
    differences = [(a - b)[1:].abs() for a, b in zip(got, expected, strict=True)]
    mean = float(torch.cat(differences).mean())
    if not mean <= tolerance:
        worst = max(
            range(len(differences)), key=lambda i: float(differences[i].nan_to_num(1e9).mean())
        )
        raise RunFailed(
            f"weight sync to version {engine.weight_version}: engine and trainer disagree on the "
            f"canary prompts: mean |difference| of log-probs {mean:.3g}, expected at most "
            f"{tolerance:g} "
            f"(rollout.canary_tolerance); worst is canary {worst} with "
            f"{float(differences[worst].mean()):.3g}. The engine does not run the trainer's model: "
            "check model.path, dtype and the versions; debug.rollout_only=true is a short way to try"
        )
    return mean
