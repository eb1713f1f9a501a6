"""The op `mrl::policy_loss` computes a policy loss, its gradient and its statistics in one pass.

The loss is the sum over sequences i of seq_weight_i * u_i * sum over t in y_i of
(-w_t f(r_t, A_t) + KL_t).

`token` (PPO, GRPO: arXiv 2402.03300 eq. 3): r_t = exp(logp_t - old_t), u_i = 1.
`sequence` (GSPO: arXiv 2507.18071 eq. 5 and 7): r_t = s_i = exp(mean over y_i of logp - old),
u_i = 1/|y_i|. Where A or w differ within the sequence, each token keeps its own: r_t has the value
s_i and the gradient of s_i exp(logp_t - stopgrad(logp_t)) (GSPO-token, eq. 13 and 14); where they
do not, that is GSPO's own gradient.

Masked tokens are selected away: NaN or inf there changes no bit of any output, and their gradient
is 0. A token whose advantage or weight w is 0 has objective and gradient 0 however large its
ratio, and counts in the statistics; so does a sequence with seq_weight 0. Nothing clamps a
log-ratio: a ratio past float32 under a negative advantage is an infinite loss. Gradients and
per-sequence statistics are the same bits for any threads, packing or split into micro-batches.

Dimensions: N packed tokens, B packed sequences; sequence i is tokens
[cu_seqlens[i], cu_seqlens[i+1]), y_i its loss tokens. The kernel is csrc/policy_loss.h.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mrl import _C  # pyright: ignore[reportAttributeAccessIssue]
from mrl.kernels import backend
from mrl.kernels.policy_options import (
    RATIOS,
    TOKEN_ADVANTAGES,
    Clip,
    ImportanceWeight,
    KlPenalty,
    RatioKind,
    check_choice,
    encode_options,
)

POLICY_STATS: tuple[str, ...] = _C.POLICY_STATS
"""Names of the columns of `PolicyLoss.stats`, explained in csrc/policy_loss.h."""


class PolicyLoss(NamedTuple):
    """Everything f64, so that sums over micro-batches lose nothing. Only `loss` has a gradient."""

    loss: Tensor
    """f64[], summed over sequences, with a gradient to `logprobs`."""
    stats: Tensor
    """f64[S]: the columns `POLICY_STATS`, summed over sequences (the `_max` ones: their largest)."""
    seq_stats: Tensor
    """f64[B, S]: the same for each sequence."""

    def stat(self, name: str) -> Tensor:
        """Return f64[]: one of `POLICY_STATS` over all sequences."""
        return self.stats[POLICY_STATS.index(name)]


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    advantages: Tensor,
    seq_weight: Tensor,
    *,
    ratio: RatioKind,
    clip: Clip,
    token_advantages: bool = False,
    rollout_logprobs: Tensor | None = None,
    importance: ImportanceWeight | None = None,
    ref_logprobs: Tensor | None = None,
    kl: KlPenalty | None = None,
    seq_logratio: Tensor | None = None,
    seq_importance: Tensor | None = None,
) -> PolicyLoss:
    """Compute the loss of this module's docstring with its statistics and its gradient.

    Args:
        logprobs, old_logprobs: f32[N].
        loss_mask: bool[N] or u8[N].
        cu_seqlens: i32[B+1], from 0 to N, never decreasing.
        advantages: f32[B], or f32[N] with `token_advantages` (said, not guessed: N may equal B).
        seq_weight: f32[B]; carries the whole normaliser, e.g. 1/num_samples.
        rollout_logprobs: f32[N]; required by `importance`, else for the mismatch statistics only.
        ref_logprobs: f32[N]; required by `kl`.
        seq_logratio: f64[B, 2] of `mrl.kernels.seq_logratio(logprobs, old_logprobs, ...)`, summed over
            the ranks that share each sequence (context parallelism). None: sequences are whole.
        seq_importance: f64[B, 2], the same of (old_logprobs, rollout_logprobs), for `importance` at
            sequence level.

    Raises:
        ValueError: names the argument, what was given and what was expected. On GPUs bad values in
            `cu_seqlens` stop the kernel with an assertion: reading them here would wait for it.
    """
    check_choice("ratio", ratio, RATIOS)
    others = {
        "advantages": advantages,
        "seq_weight": seq_weight,
        "rollout_logprobs": rollout_logprobs,
        "ref_logprobs": ref_logprobs,
        "seq_logratio": seq_logratio,
        "seq_importance": seq_importance,
    }
    backend.check_constant(old_logprobs=old_logprobs, **others)
    _check_needs(importance, rollout_logprobs, kl, ref_logprobs)
    _check_shared(ratio, importance, seq_logratio, seq_importance)
    loss, grad, stats, seq_stats = torch.ops.mrl.policy_loss(
        logprobs.detach(),
        old_logprobs,
        loss_mask,
        cu_seqlens,
        *others.values(),
        encode_options(ratio, clip, token_advantages, importance, kl),
    )
    if logprobs.requires_grad and torch.is_grad_enabled():
        loss = cast(Tensor, _AttachGradient.apply(logprobs, loss, grad))
    return PolicyLoss(loss, stats, seq_stats)


def _check_needs(
    importance: ImportanceWeight | None,
    rollout_logprobs: Tensor | None,
    kl: KlPenalty | None,
    ref_logprobs: Tensor | None,
) -> None:
    if importance and rollout_logprobs is None:
        raise ValueError("rollout_logprobs: got None, expected f32[N]: importance weights need it")
    if kl and ref_logprobs is None:
        raise ValueError("ref_logprobs: got None, expected f32[N]: the KL penalty needs it")
    if ref_logprobs is not None and not kl:
        raise ValueError("ref_logprobs: got a tensor, but no kl that would use it")


def _check_shared(
    ratio: RatioKind,
    importance: ImportanceWeight | None,
    seq_logratio: Tensor | None,
    seq_importance: Tensor | None,
) -> None:
    """Sums over ranks are given for all that is per sequence, or for nothing: not for a part."""
    if seq_logratio is None and seq_importance is None:
        return
    given = {"seq_logratio": seq_logratio, "seq_importance": seq_importance}
    weight_level = importance.level if importance else "token"
    levels = {"seq_logratio": ratio, "seq_importance": weight_level}
    for name, tensor in given.items():
        if tensor is not None and levels[name] != "sequence":
            raise ValueError(
                f"{name}: got a tensor, but nothing at sequence level that would use it"
            )
    wanted = [name for name, level in levels.items() if level == "sequence"]
    missing = [name for name in wanted if given[name] is None]
    if missing and len(missing) < len(wanted):
        raise ValueError(f"{missing[0]}: got None beside the other one, expected f64[B, 2] too")


def _check(
    logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    advantages: Tensor,
    seq_weight: Tensor,
    rollout_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    seq_logratio: Tensor | None,
    seq_importance: Tensor | None,
    options: list[float],
) -> None:
    num_tokens, num_sequences = backend.check_packed(logprobs, loss_mask, cu_seqlens, "logprobs")
    per_token, per_sequence = (num_tokens,), (num_sequences,)
    fp32, fp64 = (torch.float32,), (torch.float64,)
    expected = {
        "old_logprobs": (old_logprobs, per_token, fp32),
        "advantages": (advantages, per_token if options[TOKEN_ADVANTAGES] else per_sequence, fp32),
        "seq_weight": (seq_weight, per_sequence, fp32),
        "rollout_logprobs": (rollout_logprobs, per_token, fp32),
        "ref_logprobs": (ref_logprobs, per_token, fp32),
        "seq_logratio": (seq_logratio, (num_sequences, 2), fp64),
        "seq_importance": (seq_importance, (num_sequences, 2), fp64),
    }
    legend = f"N = {num_tokens} tokens, B = {num_sequences} sequences"
    for name, (tensor, shape, dtypes) in expected.items():
        if tensor is not None:
            backend.check_tensor(name, tensor, shape, dtypes, logprobs.device, legend)


torch.library.define(
    "mrl::policy_loss",
    "(Tensor logprobs, Tensor old_logprobs, Tensor loss_mask, Tensor cu_seqlens, Tensor advantages, "
    "Tensor seq_weight, Tensor? rollout_logprobs, Tensor? ref_logprobs, Tensor? seq_logratio, "
    "Tensor? seq_importance, float[] options) -> (Tensor loss, Tensor grad, Tensor stats, "
    "Tensor seq_stats)",
)


def _outputs(logprobs: Tensor, seq_weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    width = len(POLICY_STATS)
    return (
        logprobs.new_empty((), dtype=torch.float64),
        torch.empty_like(logprobs, memory_format=torch.contiguous_format),
        logprobs.new_empty(width, dtype=torch.float64),
        logprobs.new_empty((seq_weight.shape[0], width), dtype=torch.float64),
    )


@torch.library.impl("mrl::policy_loss", ("cpu", "cuda"))
def _run(
    logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(logprobs, old_logprobs, loss_mask, cu_seqlens, *rest)
    *tensors, options = rest
    advantages, seq_weight, rollout, ref, logratio, importance = map(_contiguous, tensors)
    loss, grad, stats, seq_stats = _outputs(logprobs, tensors[1])
    sizes = logprobs.shape[0], tensors[1].shape[0]
    backend.run(
        "policy_loss",
        logprobs.device,
        logprobs=logprobs.contiguous(),
        old_logprobs=old_logprobs.contiguous(),
        loss_mask=loss_mask.contiguous(),
        cu_seqlens=cu_seqlens.contiguous(),
        advantages=advantages,
        seq_weight=seq_weight,
        rollout_logprobs=rollout,
        ref_logprobs=ref,
        seq_logratio=logratio,
        seq_importance=importance,
        num_tokens=sizes[0],
        num_sequences=sizes[1],
        options=options,
        workspace=backend.workspace("policy_loss", logprobs.device, *sizes),
        grad=grad,
        loss=loss,
        stats=stats,
        seq_stats=seq_stats,
    )
    return loss, grad, stats, seq_stats


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


@torch.library.register_fake("mrl::policy_loss")
def _fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(*arguments)
    return _outputs(arguments[0], arguments[5])


class _AttachGradient(torch.autograd.Function):
    """`loss` again, whose gradient by `logprobs` is `grad`.

    Not `register_autograd`: what torch spends there on each call grows with the number of the op's
    arguments, and this op has many.
    """

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, loss: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, loss_grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        # Mostly nobody scales the loss; on a CPU that can be seen, and a pass over memory saved. Not
        # while torch traces: its stand-ins have no values.
        plain = type(loss_grad) is Tensor and loss_grad.device.type == "cpu"
        if not plain or torch.compiler.is_compiling() or float(loss_grad) != 1.0:
            grad = grad * loss_grad.to(grad.dtype)
        return grad, None, None
