"""Detect that the engine's weights of one expert differ from the trainer's.

Here `d` is the trainer's log-prob of a token minus the engine's. Tokens that go through an expert
with different weights have a larger `|d|` than comparable tokens. Tokens are comparable if they
have about the same log-prob, because `|d|` is smaller for likely tokens. Among comparable tokens,
`|d|` is replaced by its rank, so that a few extreme tokens cannot decide the result, and the ranks
are converted to normal scores. Experts that are often chosen together with the faulty expert also
get high scores. Therefore the scores are regressed on the most suspect experts jointly, and an
expert is reported only if it is far ahead of the next expert.

Dimensions: M loss tokens, L MoE layers, K experts per token, E experts of a layer, C candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.diagnosis.detectors.base import (
    MIN_TOKENS,
    Finding,
    LossTokens,
    excess_share,
    layer_experts,
)

MIN_SHARE = 0.2
"""A faulty expert must explain at least this share of the squared mismatch. If the whole model is
stale, some experts stand out too, but each of them explains little."""
NUM_STRATA = 10
"""The largest number of groups into which tokens are divided by log-prob. Tokens of a group are
comparable. A group has at least 50 tokens, unless there are fewer than 50 tokens in total."""
NUM_CANDIDATES = 32
"""The largest number C of candidates. Candidates are the experts with the largest `expert_z`; their
effects on the tokens' `|d|` are estimated together, in one regression."""
MIN_T = 6.0
"""An expert counts as faulty only if its t value is at least this. The threshold is high because the
tokens of a sample are not independent, and because one of L * E experts may have a large t value by
chance."""
LEAD = 1.5
"""An expert counts as faulty only if its t value is at least this many times the next largest t
value."""
MIN_COUNT = 10
"""An expert with fewer tokens than this is not judged."""
MIN_RATIO = 1.5
"""An expert counts as faulty only if the median `|d|` of its tokens is at least this many times the
median `|d|` of the other tokens. `|d|` is the absolute difference between the log-probs that
trainer and engine computed for a token."""


@dataclass(frozen=True)
class Suspect:
    """The expert that most likely has different weights in the engine, and the evidence."""

    layer: int
    """The index of the layer among the L MoE layers, from 0."""
    expert: int
    t: float
    """The expert's t value in the joint regression of the tokens' mismatch scores on all candidate
    experts."""
    runner_up: float
    """The t value of the next most suspect expert; 0 without another candidate."""
    inside: Tensor
    """bool[M]: the tokens that went through the expert."""
    ratio: float
    """The median absolute log-prob difference between trainer and engine over the tokens in
    `inside`, divided by the same median over the other tokens."""

    @property
    def stands_out(self) -> bool:
        """Whether the t value and the ratio are large enough to call the expert faulty."""
        leads = self.t >= MIN_T and self.t >= LEAD * self.runner_up
        return leads and self.ratio >= MIN_RATIO


def detect(tokens: LossTokens) -> Finding | None:
    """Report the most suspect expert if it stands out and explains enough of the squared mismatch.

    See `Suspect.stands_out` and MIN_SHARE.
    """
    found = suspect(tokens)
    if found is None or not found.stands_out:
        return None
    share = excess_share(tokens.d.square(), found.inside)
    if share < MIN_SHARE:
        return None
    record, d = tokens.record, tokens.d.abs()
    number, inside = record.layer_numbers[found.layer], found.inside
    return Finding(
        name="stale_expert",
        severity=tokens.severity(share),
        text=(
            f"expert {found.expert} of layer {number} is not the same on both sides: the "
            f"{int(inside.sum())} tokens that went through it have a mean |old - rollout| of "
            f"{float(d[inside].mean()):.2g}, the {int((~inside).sum())} others "
            f"{float(d[~inside].mean()):.2g} (t = {found.t:.0f}, the next expert {found.runner_up:.0f})"
        ),
        where={
            "layers": [number],
            "experts": [found.expert],
            "t": found.t,
            "runner_up_t": found.runner_up,
            "ratio": found.ratio,
        },
        is_cause=True,
    )


def expert_z(tokens: LossTokens) -> Tensor | None:
    """Return f64[L, E]: a score of how much larger the mismatch `|d|` is for each expert's tokens.

    The expert's tokens are compared with tokens of about the same log-prob. An entry is the sum of
    the normal scores of the expert's tokens, divided by the standard error of this sum. The entry
    is -inf for an expert with fewer than MIN_COUNT tokens. Returns None without routes, or with
    fewer than MIN_TOKENS loss tokens.
    """
    if tokens.routes is None or len(tokens.d) < MIN_TOKENS:
        return None
    chosen, scores = layer_experts(tokens.routes, tokens.record.num_experts), _scores(tokens)
    num_tokens, num_layers, _ = chosen.shape
    size = num_layers * tokens.record.num_experts
    counts = torch.bincount(chosen.flatten(), minlength=size).double()
    each = scores.view(-1, 1, 1).expand_as(chosen).flatten()
    sums = torch.bincount(chosen.flatten(), each, minlength=size)
    # n (1 - n / M) is the variance of the sum of n of M scores, sampled without replacement.
    z = sums / (counts * (1 - counts / num_tokens)).clamp(min=1).sqrt()
    z[counts < MIN_COUNT] = -math.inf
    return z.view(num_layers, -1)


def suspect(tokens: LossTokens) -> Suspect | None:
    """Return the expert with the largest t value in the joint regression, faulty or not.

    Returns None without routes, with fewer than MIN_TOKENS loss tokens, or if either all loss
    tokens or none went through this expert.
    """
    table = expert_z(tokens)
    if table is None or tokens.routes is None:
        return None
    z, num_experts = table.flatten(), tokens.record.num_experts
    chosen = layer_experts(tokens.routes, num_experts)
    candidates = z.topk(min(NUM_CANDIDATES, len(z))).indices
    # One candidate at a time, as M x L x K x C booleans of a large record would take a gigabyte.
    inside = torch.stack([(chosen == each).flatten(1).any(1) for each in candidates], 1)
    t = _t_values(inside.double(), _scores(tokens))
    t[z[candidates].isinf()] = -math.inf
    order = t.argsort(descending=True)
    best = int(order[0])
    routed, d = inside[:, best], tokens.d.abs()
    if routed.all() or not routed.any():
        return None
    ratio = float(d[routed].median()) / max(float(d[~routed].median()), 1e-12)
    runner_up = float(t[order[1]]) if len(order) > 1 else 0.0
    layer, expert = divmod(int(candidates[best]), num_experts)
    return Suspect(layer, expert, float(t[best]), runner_up, routed, ratio)


def _scores(tokens: LossTokens) -> Tensor:
    return normal_scores(tokens.d.abs(), tokens.old)


def normal_scores(values: Tensor, covariate: Tensor) -> Tensor:
    """Return f64[M]: the rank of each value among tokens with a similar covariate, as a normal score.

    `values` and `covariate` are f64[M]. The normal score of a rank is the quantile of the standard
    normal distribution at that rank. Equal values are ranked in a fixed pseudo-random order.
    """
    num = len(values)
    num_strata = max(1, min(NUM_STRATA, num // 50))
    stratum = covariate.argsort().argsort() * num_strata // num
    # The shuffle keeps equal values (d = 0) from being ranked by their order in the record.
    shuffled = torch.randperm(num, generator=torch.Generator().manual_seed(0))
    by_value = shuffled[values[shuffled].argsort(stable=True)]
    order = by_value[stratum[by_value].argsort(stable=True)]
    sizes = stratum.bincount(minlength=num_strata)
    starts = sizes.cumsum(0) - sizes
    rank = torch.empty(num, dtype=torch.float64)
    rank[order] = torch.arange(num, dtype=torch.float64)
    share = (rank - starts[stratum] + 0.5) / sizes[stratum]
    return math.sqrt(2) * (2 * share - 1).erfinv()


def _t_values(inside: Tensor, scores: Tensor) -> Tensor:
    """Return f64[C]: the t values of the joint regression of `scores` [M] on the columns of `inside`.

    A column of `inside` [M, C] is 1 for tokens that went through one candidate expert, otherwise 0.
    """
    x = inside - inside.mean(0)
    gram = x.T @ x
    # The columns of a layer add up to K, so the matrix may be singular. A small ridge makes it
    # invertible, and adds no variance in that direction.
    ridge = gram.diagonal().mean().clamp(min=1e-9) * 1e-3
    inverse = torch.linalg.inv(gram + ridge * torch.eye(len(gram), dtype=gram.dtype))
    coefficients = inverse @ (x.T @ scores)
    residual = scores - scores.mean() - x @ coefficients
    variance = residual.square().sum() / max(1, len(scores) - len(gram) - 1)
    return coefficients / ((inverse @ gram @ inverse).diagonal() * variance).clamp(min=1e-30).sqrt()
