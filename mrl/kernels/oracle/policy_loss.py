"""Reference of `mrl::policy_loss` in fp64, written from the papers, one sequence at a time."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class OracleLoss(NamedTuple):
    """The result of the reference `policy_loss`, with the fields of `mrl.kernels.PolicyLoss`.

    The statistics are Python floats by name, instead of tensors. Only `loss` has a gradient.
    """

    loss: Tensor
    stats: dict[str, float]
    seq_stats: list[dict[str, float]]


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    advantages: Tensor,
    seq_weight: Tensor,
    *,
    ratio: str,
    clip,
    token_advantages: bool = False,
    rollout_logprobs: Tensor | None = None,
    importance=None,
    ref_logprobs: Tensor | None = None,
    kl=None,
    frozen: Tensor | None = None,
) -> OracleLoss:
    """Compute in fp64 what `mrl.kernels.policy_loss` computes, if no sequence is split over ranks.

    The arguments have the same meaning as those of `mrl.kernels.policy_loss`, but floating-point
    tensors may have any dtype. frozen: f64[N], the log-probs at which factors without a gradient
    are evaluated; None for `logprobs` itself. A finite-difference test keeps `frozen` fixed while
    it varies `logprobs`.
    """
    logp = logprobs.double()
    held = logp.detach() if frozen is None else frozen.double()
    total = logp[:0].sum()  # 0, with a gradient even if no sequence counts
    rows = []
    for i, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        at = loss_mask[start:end].bool().nonzero().flatten() + start
        take = _Taker(at)
        advantage = advantages[at] if token_advantages else advantages[i].expand(len(at))
        row = {} if not len(at) else _sequence(
            take(logp), take(held), take(old_logprobs), advantage.double(),
            take(rollout_logprobs), importance, take(ref_logprobs), kl, ratio, clip,
        )  # fmt: skip
        weight = float(seq_weight[i]) / (len(at) if ratio == "sequence" and len(at) else 1)
        loss = row.pop("objective", total * 0)
        if weight == 0:
            loss, row["kl_loss"] = total * 0, 0.0
        total = total + weight * loss
        rows.append({
            **row, "loss": weight * float(loss.detach()),
            "kl_loss": weight * row.get("kl_loss", 0.0),
        })  # fmt: skip
    return OracleLoss(total, _over_sequences(rows), rows)


class _Taker:
    """A function that returns the elements of a tensor x at the indices `at`, in fp64.

    The indices are those of the loss tokens. The result is None if x is None.
    """

    def __init__(self, at: Tensor) -> None:
        self.at = at

    def __call__(self, x):
        return None if x is None else x[self.at].double()


def _sequence(logp, held, old, advantage, rollout, importance, ref, kl, ratio, clip):
    """Return a dict with the statistics of one sequence by name, and its summed loss as
    `objective`.

    The tensors have one entry per loss token of the sequence. `held` are the log-probs at which
    factors without a gradient are evaluated. The caller multiplies the loss by `seq_weight` and,
    for ratio `sequence`, divides it by the number of tokens.
    """
    n = len(logp)
    gap = held - old
    row = {"num_tokens": n, "k1_sum": float(-gap.sum()), "k3_sum": float((gap.expm1() - gap).sum())}
    if ratio == "token":
        r, seen = (logp - old).exp(), gap.exp()
        row |= {"ratio_sum": float(seen.sum()), "ratio_count": n, "ratio_max": float(seen.max())}
    else:
        s = gap.mean().exp()
        r, seen = s * (logp - held).exp(), s.expand(n)  # GSPO-token, arXiv 2507.18071 eq. 14
        row |= {"ratio_sum": float(s), "ratio_count": 1, "ratio_max": float(s)}
    objective, over, under = _objective(r, seen, advantage, logp, clip)
    share = n if ratio == "sequence" else 1
    row |= {"clip_high_count": float(over.sum()) / share}
    row |= {"clip_low_count": float(under.sum()) / share}
    weight = torch.ones_like(held)
    if rollout is not None:
        mismatch = (old - rollout).abs()
        row |= {"mismatch_abs_sum": float(mismatch.sum())}
        row |= {"mismatch_abs_max": float(mismatch.max())}
    if importance is not None:
        weight, numbers = _importance(old - rollout, importance)
        row |= numbers
    used = (advantage != 0) & (weight != 0)
    loss = -(weight[used] * objective[used]).sum()
    if kl is not None:
        d = ref - logp
        terms = _kl_terms(kl.kind.rstrip("+"), d)
        if kl.kind.endswith("+"):  # the value of k1 or k3 with the gradient of k2
            fixed = ref - held
            terms = _kl_terms(kl.kind[:2], fixed) + _kl_terms("k2", d) - _kl_terms("k2", fixed)
        row |= {"ref_kl_sum": float(terms.detach().sum())}
        penalty = kl.coef * terms.sum()
        row["kl_loss"] = float(penalty.detach())
        loss = loss + penalty
    return {**row, "objective": loss}


def _kl_terms(kind, d):
    return {"k1": -d, "k2": d**2 / 2, "k3": d.expm1() - d}[kind]


def _objective(r, seen, a, logp, clip):
    """Return three values per token: f(r, A), whether r was clipped above, and whether below.

    f is the objective that `clip` describes. r: the probability ratios. seen: r without its
    gradient. a: the advantages A. logp: the policy's log-probs.
    """
    never = torch.zeros_like(a, dtype=torch.bool)
    low, high = 1 - clip.low, 1 + clip.high
    if clip.kind == "none":
        return r * a, never, never
    if clip.kind == "cispo":
        return seen.clamp(low, high) * a * logp, seen > high, seen < low
    if clip.kind == "sapo":
        tau = torch.where(a > 0, clip.tau_positive, clip.tau_negative)
        return 4 / tau * torch.sigmoid(tau * (r - 1)) * a, never, never
    dual = clip.dual or math.inf
    value = torch.minimum(r * a, r.clamp(low, high) * a)
    capped = (a < 0) & (seen > dual)
    value = torch.where(capped, a * torch.tensor(dual).double(), value) if capped.any() else value
    return value, ((a > 0) & (seen > high)) | capped, (a < 0) & (seen < low)


def _importance(gap, importance):
    n = len(gap)
    raw = gap.exp() if importance.level == "token" else gap.mean().exp().reshape(1)
    outside = (raw < importance.low) | (raw > importance.high)
    if importance.kind == "tis":
        applied = raw.clamp(importance.low, importance.high)
    else:
        applied = torch.where(outside, 0.0, raw)
    numbers = {
        "weight_sum": float(applied.sum()),
        "weight_sq_sum": float((applied**2).sum()),
        "weight_count": len(raw),
        "truncated_count": float(outside.sum()),
    }
    return applied.expand(n), numbers


def _over_sequences(rows: list[dict[str, float]]) -> dict[str, float]:
    names = {name for row in rows for name in row}
    return {
        name: (max if name.endswith("_max") else sum)(row.get(name, 0.0) for row in rows)
        for name in names
    }


def seq_logratio(
    logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Return f64[B, 2]: each sequence's sum of `logprobs - old_logprobs`, and number of loss tokens.

    The sum runs over the loss tokens of the sequence.
    """
    rows = []
    for start, end in pairwise(cu_seqlens.tolist()):
        mask = loss_mask[start:end].bool()
        gap = logprobs[start:end][mask].double() - old_logprobs[start:end][mask].double()
        rows.append([float(gap.sum()), len(gap)])
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)
