"""Every algorithm of the folder by its textbook definition: fp64, autograd, sequence by sequence.

No packing, no weights of sequences, no kernel: means are taken as the papers write them, over all
sequences of the step. Shares no code with `mrl`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.algorithms.cases import MAX_RESPONSE_LEN, VERSION, Drawn


@dataclass(frozen=True)
class Rule:
    """What an algorithm is made of."""

    aggregation: str
    clip: tuple[float, float] = (0.2, 0.2)
    ratio: str = "token"
    form: str = "ppo"
    weight_cap: float | None = None  # of exp(old - rollout), beyond which a token is left out
    nll: float = 0.0


PPO = Rule("token_mean")
RULES = {
    "grpo": Rule("seq_mean_token_mean"),
    "dr_grpo": Rule("seq_mean_token_sum_norm"),
    "dapo": Rule("token_mean", (0.2, 0.28)),
    "gspo": Rule("seq_mean_token_mean", (3e-4, 4e-4), "sequence"),
    "gspo_token": Rule("seq_mean_token_mean", (3e-4, 4e-4), "sequence"),
    "cispo": Rule("token_mean", (1.0, 4.0), form="cispo"),
    "sapo": Rule("seq_mean_token_mean", form="sapo"),
    "ppo": PPO,
    "vapo": Rule("token_mean", (0.2, 0.28), nll=0.1),
    "reinforce_pp": PPO,
    "reinforce_pp_baseline": PPO,
    "rloo": Rule("seq_mean_token_sum"),
    "decoupled_ppo": Rule("token_mean", weight_cap=5.0),
    "a3po": Rule("token_mean", weight_cap=5.0),
    "nll": Rule("token_mean", form="nll"),
}
TOKEN_ADVANTAGES = ("ppo", "vapo", "gspo_token")


@dataclass
class Result:
    value: Tensor
    grads: list[Tensor]
    margin: float
    """How near anything comes to a bound: where fp32 could see it on the other side."""


class Margin:
    def __init__(self) -> None:
        self.least = float("inf")

    def __call__(self, values: Tensor, *bounds: float) -> Tensor:
        for bound in bounds:
            if values.numel():
                self.least = min(self.least, float((values.detach() - bound).abs().min()))
        return values


def loss(name: str, drawn: Sequence[Drawn], config) -> Result:
    """The whole step's loss and its gradient by each sequence's log-probs f64[T]."""
    rule, margin = RULES[name], Margin()
    leaves = [d.logprobs.double().requires_grad_() for d in drawn]
    kept = [i for i, d in enumerate(drawn) if bool(d.mask.any())]
    terms = [_tokens(name, rule, leaves[i], drawn[i], config, margin) for i in kept]
    value = _aggregate(config.aggregation or rule.aggregation, terms, leaves)
    right = [i for i in kept if drawn[i].advantage > 0]
    if rule.nll and right:
        logps = torch.cat([leaves[i][drawn[i].mask] for i in right])
        value = value - (rule.nll if config.nll_coef is None else config.nll_coef) * logps.mean()
    grads = torch.autograd.grad(value, leaves, materialize_grads=True)
    return Result(value.detach(), list(grads), margin.least)


def _aggregate(kind: str, terms: list[Tensor], leaves: list[Tensor]) -> Tensor:
    if not terms:
        return torch.cat([leaf[:0] for leaf in leaves]).sum()
    if kind == "token_mean":
        return torch.cat(terms).mean()
    each: dict[str, Callable[[Tensor], Tensor]] = {
        "seq_mean_token_mean": torch.mean,
        "seq_mean_token_sum": torch.sum,
        "seq_mean_token_sum_norm": lambda t: t.sum() / MAX_RESPONSE_LEN,
    }
    return torch.stack([each[kind](t) for t in terms]).mean()


def _tokens(name: str, rule: Rule, leaf: Tensor, d: Drawn, config, margin: Margin) -> Tensor:
    """f64[|y|]: the loss of each token of the response."""
    logp, old, roll, ref = (t.double()[d.mask] for t in (leaf, d.old, d.rollout, d.ref))
    if rule.form == "nll":
        return -logp
    a = torch.full_like(logp.detach(), d.advantage)
    if name in TOKEN_ADVANTAGES:
        a = d.token_advantages[d.mask].double()
    if name == "a3po":
        stale = VERSION - d.versions[d.mask].double()
        share = torch.where(stale > 1, (stale - 1) / stale.clamp(min=1), 0.0)
        if config.proximal_at_no_lag == "policy":
            share = torch.where(stale == 0, 1.0, share)
        old = share * logp.detach() + (1 - share) * roll
    r = (logp - old).exp()
    if rule.ratio == "sequence":  # arXiv 2507.18071 eq. 14
        s = (logp - old).mean().exp().detach()
        r = s * (logp - logp.detach()).exp()
    objective = _objective(rule, r, a, logp, config, margin)
    weight = _weight(rule, old - roll, config, margin)
    for mask in config.masks:
        weight = torch.where(_dropped(mask, logp.detach(), old, roll, a, margin), 0.0, weight)
    used = (weight != 0) & (a != 0)
    loss = torch.where(used, -torch.where(used, weight, 1.0) * objective, 0.0)
    if config.kl_coef and config.kl_in == "loss":
        loss = loss + config.kl_coef * _kl(config.kl_estimator, ref - logp, (logp - old).exp())
    return loss


def _objective(rule: Rule, r: Tensor, a: Tensor, logp: Tensor, config, margin: Margin) -> Tensor:
    low = 1 - (rule.clip[0] if config.clip_low is None else config.clip_low)
    high = 1 + (rule.clip[1] if config.clip_high is None else config.clip_high)
    if rule.form == "sapo":
        tau = torch.where(a > 0, config.tau_positive or 1.0, config.tau_negative or 1.05)
        return 4 / tau * torch.sigmoid(tau * (r - 1)) * a
    margin(r, low, high)
    if rule.form == "cispo":
        return r.detach().clamp(low, high) * a * logp
    value = torch.minimum(r * a, r.clamp(low, high) * a)
    if config.dual_clip is not None:
        margin(r, config.dual_clip)
        value = torch.where(a < 0, torch.maximum(value, config.dual_clip * a), value)
    return value


def _weight(rule: Rule, gap: Tensor, config, margin: Margin) -> Tensor:
    kind, level = config.importance, config.importance_level
    if kind == "none" and rule.weight_cap is None:
        return torch.ones_like(gap)
    if kind == "none":
        raw = margin(gap.exp(), rule.weight_cap)
        return torch.where(raw > rule.weight_cap, 0.0, raw)
    raw = gap.exp() if level == "token" else gap.mean().exp().expand_as(gap)
    usual = {("mis", "token"): (0.5, 5.0), ("mis", "sequence"): (0.999, 1.002)}
    low, high = usual.get((kind, level), (0.0, 2.0))
    low = low if config.importance_low is None else config.importance_low
    high = high if config.importance_high is None else config.importance_high
    margin(raw, low, high)
    return (
        raw.clamp(low, high) if kind == "tis" else torch.where((raw < low) | (raw > high), 0.0, raw)
    )


def _dropped(mask, logp: Tensor, old: Tensor, roll: Tensor, a: Tensor, margin: Margin) -> Tensor:
    low, high = mask.low, mask.high
    if mask.name == "opsm":
        return (a < 0) & (margin((roll - logp).mean(), high) > high)
    if mask.name == "dppo":
        moved = margin(logp.exp() - roll.exp(), high or 0.15, -(low or 0.15))
        return ((a > 0) & (moved > (high or 0.15))) | ((a < 0) & (moved < -(low or 0.15)))
    ends = {"token_mask": (0.5, 5.0), "sequence_mask": (0.999, 1.002)}[mask.name]
    low, high = low or ends[0], high or ends[1]
    gap = old - roll if mask.name == "token_mask" else (old - roll).mean().expand_as(old)
    value = margin(gap.exp(), low, high)
    return (value < low) | (value > high)


def _kl(kind: str, d: Tensor, r: Tensor) -> Tensor:
    values = {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - 1 - d}
    if kind == "k3_unbiased":
        return r * values["k3"]
    if kind.endswith("+"):
        return values[kind[:2]].detach() + values["k2"] - values["k2"].detach()
    return values[kind]
