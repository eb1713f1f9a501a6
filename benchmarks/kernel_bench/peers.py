"""Liger-Kernel and TRL: what they have of our kernels on this device, or a sentence on why not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

INSTALL = "pip install --no-deps -r requirements/bench.txt"


@cache
def liger_policy_loss() -> Callable[..., Any] | str:
    """Return Liger-Kernel's loss over given log-probs, which it runs under torch.compile by default."""
    try:
        from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction
    except ImportError as error:
        return f"Liger-Kernel cannot be imported ({error}): {INSTALL}"
    return LigerFusedLinearGRPOFunction.ppo_loss_fn


@cache
def liger_cross_entropy(device_type: str) -> Callable[..., Any] | str:
    """-log-probability with the gradient written over the logits in the forward; no entropy."""
    if device_type != "cuda":
        return "Liger-Kernel's log-probabilities from logits are Triton kernels: they need a GPU"
    try:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
    except ImportError as error:
        return f"Liger-Kernel cannot be imported ({error}): {INSTALL}"

    def negative_logprob(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return LigerCrossEntropyFunction.apply(
            logits, labels, None, -100, 0.0, 0.0, "none", None, False
        )[0]

    return negative_logprob


@cache
def trl_logprob() -> Callable[..., Any] | str:
    """Return TRL's (logprobs, entropy) of (logits, labels); a Triton kernel on GPUs."""
    try:
        from trl.trainer.utils import selective_log_softmax_and_entropy
    except (ImportError, RuntimeError) as error:  # transformers wraps what fails inside TRL
        return f"TRL cannot be imported ({error}): {INSTALL}"
    return selective_log_softmax_and_entropy


TRL_POLICY_LOSS = (
    "TRL has its policy loss only inside GRPOTrainer._compute_loss, together with the model's "
    "forward; eager follows its expressions"
)
NO_GAE = "has no generalized advantage estimation"
NO_LOGRATIO = "has no log-ratio sums over packed sequences"
