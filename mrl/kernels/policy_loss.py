"""`mrl::policy_loss`: a policy loss, its gradient and its statistics in one pass.

    loss = sum_i seq_weight_i u_i sum_{t in y_i} (-w_t f(r_t, A_t) + KL_t)

The sums run over sequences i and their loss tokens y_i. r_t is the probability ratio, A_t the
advantage, f the clipped objective (`Clip`), w_t the weight (`ImportanceWeight`), KL_t the
`KlPenalty`.

Ratio `token` (PPO, GRPO: arXiv 2402.03300 eq. 3): `r_t = exp(logp_t - old_t)`, `u_i = 1`.

Ratio `sequence` (GSPO: arXiv 2507.18071 eq. 5 and 7): `r_t = s_i = exp(mean over y_i of logp -
old)`, `u_i = 1 / |y_i|`. The gradient of r_t is that of `s_i exp(logp_t - stopgrad(logp_t))`
(GSPO-token, eq. 13 and 14), which equals GSPO's own gradient if A and w are constant within the
sequence.

Masked tokens are skipped, not multiplied by 0: a NaN or inf at a masked token does not affect any
output, and the token's gradient is 0. If a token's advantage or weight w is 0, its term w_t f(r_t, A_t)
and the gradient of this term are 0 however large the ratio is. If a sequence's seq_weight is 0, its
loss and gradient are 0. In both cases the tokens still count in the statistics. Log-ratios are not
clamped: if a ratio exceeds float32 and the advantage is negative, the loss is infinite. The bits of
gradients and per-sequence statistics do not depend on the number of threads, the packing or the split
into micro-batches.

Dimensions: N packed tokens, B packed sequences, S statistics; sequence i is tokens [cu_seqlens[i],
cu_seqlens[i+1]). The kernel is in csrc/policy_loss.h.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import mrl._C as _C  # noqa: PLR0402  (a module, and no name of the package)
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
    """The results of `policy_loss`, in f64 for accurate sums over micro-batches.

    Only `loss` has a gradient.
    """

    loss: Tensor
    """f64[]: the loss, summed over sequences, differentiable with respect to `logprobs`."""
    stats: Tensor
    """f64[S]: for each name in `POLICY_STATS`, the sum of the statistic over sequences, or its
    maximum if the name ends in `_max`."""
    seq_stats: Tensor
    """f64[B, S]: for each sequence, its statistics under the names in `POLICY_STATS`."""

    def stat(self, name: str) -> Tensor:
        """Return f64[]: the entry of `stats` for `name`, which is one of `POLICY_STATS`."""
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
    """Compute the policy loss that the module docstring defines, with its statistics and gradient.

    Args:
        logprobs: f32[N], the policy's log-probs. The loss is differentiable with respect to them.
        old_logprobs: f32[N], the log-probs in the denominator of the ratio.
        loss_mask: bool[N] or u8[N], true for the loss tokens.
        cu_seqlens: i32[B+1], non-decreasing from 0 to N.
        advantages: f32[B], or f32[N] with `token_advantages`.
        seq_weight: f32[B], including all normalisation, e.g. 1/num_samples.
        ratio: `token` if each token has its own ratio, `sequence` if all tokens of a sequence share
            one.
        clip: how the ratio is bounded.
        token_advantages: whether `advantages` is f32[N]. Its shape cannot tell, because N may equal B.
        rollout_logprobs: f32[N], the engine's log-probs. `importance` requires them; otherwise they are
            used only for the mismatch statistics, and may be None.
        importance: how the weight w is computed. None: w = 1.
        ref_logprobs: f32[N], the reference model's log-probs; given if and only if `kl` is given.
        kl: the KL penalty. None: no penalty.
        seq_logratio: f64[B, 2], `mrl.kernels.seq_logratio(logprobs, old_logprobs, ...)` summed over
            the ranks that share each sequence (context parallelism). None: this rank has all tokens
            of its sequences.
        seq_importance: f64[B, 2], `mrl.kernels.seq_logratio(old_logprobs, rollout_logprobs, ...)`
            summed over the same ranks, for sequence-level `importance`.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value, requires grad although it
            must be constant, or is missing or superfluous. On GPUs bad values in `cu_seqlens` abort
            the kernel with an assertion instead, because checking them here would wait for the
            device.
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
        raise ValueError("ref_logprobs: got a tensor, but kl is None, so nothing uses it")


def _check_shared(
    ratio: RatioKind,
    importance: ImportanceWeight | None,
    seq_logratio: Tensor | None,
    seq_importance: Tensor | None,
) -> None:
    """Raise ValueError if `seq_logratio` or `seq_importance` does not fit the options. Both may be None
    with any options.

    Raises if `seq_logratio` is given but `ratio` is not `sequence`, or if `seq_importance` is given but
    the level of `importance` is not `sequence`. If `ratio` and the level are both `sequence`, raises if
    only one of the two tensors is given.
    """
    if seq_logratio is None and seq_importance is None:
        return
    given = {"seq_logratio": seq_logratio, "seq_importance": seq_importance}
    weight_level = importance.level if importance else "token"
    levels = {"seq_logratio": ratio, "seq_importance": weight_level}
    for name, tensor in given.items():
        if tensor is not None and levels[name] != "sequence":
            raise ValueError(f"{name}: got a tensor, but nothing at sequence level uses it")
    wanted = [name for name, level in levels.items() if level == "sequence"]
    missing = [name for name in wanted if given[name] is None]
    if missing and len(missing) < len(wanted):
        raise ValueError(
            f"{missing[0]}: got None although the other one is given, expected f64[B, 2]"
        )


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
    """Returns `loss`, with `grad` as its gradient with respect to `logprobs`.

    This does not use `register_autograd`, because its overhead per call grows with the number of
    arguments, and this op has many arguments.
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
        # The loss is rarely scaled. On a CPU the factor can be read, and a factor of 1 saves a pass
        # over memory. It is not read while torch traces, because fake tensors have no values.
        plain = type(loss_grad) is Tensor and loss_grad.device.type == "cpu"
        if not plain or torch.compiler.is_compiling() or float(loss_grad) != 1.0:
            grad = grad * loss_grad.to(grad.dtype)
        return grad, None, None
