"""Cases of the policy loss: random packed batches, every combination of options, both runs."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from mrl.kernels import POLICY_STATS, Clip, ImportanceWeight, KlPenalty, oracle, policy_loss

RATIOS = ("token", "sequence")
CLIPS = (
    Clip("none"),
    Clip("ppo", 0.2, 0.3),
    Clip("ppo", 0.2, 0.3, dual=1.6),
    Clip("cispo", 0.4, 0.3),
    Clip("sapo"),
)
WEIGHTS = (
    None,
    ImportanceWeight("tis", "token", 0.0, 1.3),
    ImportanceWeight("tis", "sequence", 0.8, 1.1),
    ImportanceWeight("mis", "token", 0.7, 1.4),
    ImportanceWeight("mis", "sequence", 0.9, 1.1),
)
KLS = (
    None,
    KlPenalty("k1", 0.1),
    KlPenalty("k2", 0.1),
    KlPenalty("k3", 0.1),
    KlPenalty("k1+", 0.1),
    KlPenalty("k3+", 0.1),
)
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
TOKEN_BUDGET = 64.0


@dataclass(frozen=True)
class Options:
    ratio: str = "token"
    clip: Clip = CLIPS[1]
    importance: ImportanceWeight | None = None
    kl: KlPenalty | None = None

    def __str__(self) -> str:
        weight = f"{self.importance.kind}-{self.importance.level}" if self.importance else "none"
        dual = "-dual" if self.clip.dual else ""
        return f"{self.ratio}-{self.clip.kind}{dual}-{weight}-{self.kl.kind if self.kl else 'none'}"


ALL_OPTIONS = [Options(*chosen) for chosen in product(RATIOS, CLIPS, WEIGHTS, KLS)]
# Every value of every option, and the pairs that share code, without the whole product.
FEW_OPTIONS = [
    Options("token", CLIPS[1], WEIGHTS[1], KLS[3]),
    Options("token", CLIPS[2], WEIGHTS[4], KLS[1]),
    Options("token", CLIPS[3], WEIGHTS[3], None),
    Options("token", CLIPS[4], WEIGHTS[2], KLS[2]),
    Options("sequence", CLIPS[1], WEIGHTS[1], KLS[3]),
    Options("sequence", CLIPS[2], WEIGHTS[3], KLS[2]),
    Options("sequence", CLIPS[3], WEIGHTS[2], KLS[1]),
    Options("sequence", CLIPS[4], WEIGHTS[4], None),
    Options("token", CLIPS[1], None, KLS[4]),
    Options("sequence", CLIPS[1], None, KLS[5]),
    Options("sequence", CLIPS[0], None, None),
]


@dataclass(frozen=True)
class Case:
    """Arguments of `policy_loss`; the two optional log-probs are passed where options need them."""

    logprobs: Tensor
    old_logprobs: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor
    advantages: Tensor
    seq_weight: Tensor
    rollout_logprobs: Tensor
    ref_logprobs: Tensor
    token_advantages: bool = False

    def arguments(self, o: Options) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if o.kl is None:
            del values["ref_logprobs"]
        return values | {"ratio": o.ratio, "clip": o.clip, "importance": o.importance, "kl": o.kl}

    @property
    def lengths(self) -> list[int]:
        return self.cu_seqlens.diff().tolist()


def make_case(
    lengths: list[int],
    seed: int = 0,
    scale: float = 0.2,
    keep: float = 0.7,
    token_advantages: bool = False,
) -> Case:
    """Ragged sequences, each with mean log-ratios of its own, so that sequences clip at times too."""
    rng = torch.Generator().manual_seed(seed)
    n, b = sum(lengths), len(lengths)
    sizes = torch.tensor(lengths, dtype=torch.long)

    def gap() -> Tensor:
        shift = torch.randn(b, generator=rng).repeat_interleave(sizes)
        return scale * (shift + torch.randn(n, generator=rng))

    logprobs = -torch.rand(n, generator=rng) * 3
    advantages = torch.randn(n if token_advantages else b, generator=rng)
    advantages[torch.rand(len(advantages), generator=rng) < 0.15] = 0.0
    old = logprobs - gap()
    return Case(
        logprobs,
        old,
        torch.rand(n, generator=rng) < keep,
        torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int(),
        advantages,
        torch.rand(b, generator=rng) + 0.1,
        old - gap(),
        logprobs + gap(),
        token_advantages,
    )


def select(case: Case, order: list[int]) -> Case:
    """The sequences of `order`, packed in that order."""
    bounds = case.cu_seqlens.tolist()
    tokens = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in order]).long()
    sizes = torch.tensor([bounds[i + 1] - bounds[i] for i in order])
    return Case(
        case.logprobs[tokens],
        case.old_logprobs[tokens],
        case.loss_mask[tokens],
        torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int(),
        case.advantages[tokens if case.token_advantages else order],
        case.seq_weight[order],
        case.rollout_logprobs[tokens],
        case.ref_logprobs[tokens],
        case.token_advantages,
    )


@dataclass(frozen=True)
class Result:
    loss: Tensor
    grad: Tensor
    stats: Tensor
    seq_stats: Tensor


def run_op(case: Case, o: Options) -> Result:
    leaf = case.logprobs.clone().requires_grad_()
    result = policy_loss(**case.arguments(o) | {"logprobs": leaf})
    (grad,) = torch.autograd.grad(result.loss, leaf)
    return Result(result.loss.detach(), grad, result.stats, result.seq_stats)


def run_oracle(case: Case, o: Options, frozen: Tensor | None = None) -> Result:
    leaf = case.logprobs.double().requires_grad_()
    result = oracle.policy_loss(**case.arguments(o) | {"logprobs": leaf}, frozen=frozen)
    (grad,) = torch.autograd.grad(result.loss, leaf)
    rows = [[row.get(name, 0.0) for name in POLICY_STATS] for row in result.seq_stats]
    return Result(
        result.loss.detach(),
        grad,
        torch.tensor([result.stats.get(name, 0.0) for name in POLICY_STATS], dtype=torch.float64),
        torch.tensor(rows, dtype=torch.float64).reshape(-1, len(POLICY_STATS)),
    )


def near_a_bound(case: Case, o: Options) -> bool:
    """Whether fp32 could see a ratio or a weight on the other side of its bound than fp64 does."""
    bounds = [1 - o.clip.low, 1 + o.clip.high, o.clip.dual or 0.0]
    gaps = [(case.logprobs - case.old_logprobs, o.ratio, bounds)]
    if o.importance:
        ends = [o.importance.low, o.importance.high]
        gaps.append((case.old_logprobs - case.rollout_logprobs, o.importance.level, ends))
    for gap, level, bounds_ in gaps:
        values = gap.double()[case.loss_mask]
        if level == "sequence":
            parts = [gap[s:e].double()[case.loss_mask[s:e]] for s, e in pairwise(case.cu_seqlens)]
            values = torch.tensor([p.mean() for p in parts if len(p)], dtype=torch.float64)
        if any(bool(((values.exp() - bound).abs() < 1e-5).any()) for bound in bounds_):
            return True
    return False


def assert_close(got: Result, expected: Result, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """`atol` is for a single term of size 1; sums of many that cancel get ten times as much."""
    for name in ("loss", "grad", "stats", "seq_stats"):
        actual, wanted = getattr(got, name).double(), getattr(expected, name).double()
        atol_ = atol if name == "grad" else 10 * atol
        try:
            torch.testing.assert_close(actual, wanted, rtol=rtol, atol=atol_)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def with_garbage(case: Case, garbage: float) -> Case:
    """The same case with `garbage` wherever a token is masked."""
    masked = ~case.loss_mask
    names = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs")
    signs = (1, -1, 1, -1)
    return replace(
        case,
        **{
            name: getattr(case, name).masked_fill(masked, sign * garbage)
            for name, sign in zip(names, signs, strict=True)
        },
    )
