"""One expert whose weights are not the trainer's.

Its tokens have a larger |d| than comparable ones. Comparable: of about the same log-prob, as a likely
token moves less than an unlikely one. |d| is ranked among them, so that a few wild tokens decide
nothing, and the ranks become normal scores. A layer's experts and those that often come together share
in the blame of the guilty one; so the most suspect are regressed on together, and one is named only
where it stands out from the runner-up.

M loss tokens, L MoE layers, E experts of a layer, C candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.diagnosis.detectors.base import MIN_TOKENS, Finding, LossTokens, excess_share

MIN_SHARE = 0.2
"""A share of the squared mismatch. Where the whole model is stale, the experts of the tokens
that move most stand out too, but little would be gained by mending one."""
NUM_STRATA = 10
NUM_CANDIDATES = 32
MIN_T = 6.0
"""Tokens of a sample are not independent, and there are L * E experts to be wrong about."""
LEAD = 1.5
"""Times the runner-up."""
MIN_COUNT = 10
"""Tokens of an expert, to say anything of it."""
MIN_RATIO = 1.5
"""The ratio of the median |d| of its tokens to that of the others."""


@dataclass(frozen=True)
class Suspect:
    """A suspect is the expert whose tokens differ most."""

    layer: int
    """Place among the L layers."""
    expert: int
    t: float
    runner_up: float
    """t of the next one."""
    inside: Tensor
    """bool[M]: tokens that went through it."""
    ratio: float
    """Median |d| of its tokens over that of the others."""

    @property
    def stands_out(self) -> bool:
        leads = self.t >= MIN_T and self.t >= LEAD * self.runner_up
        return leads and self.ratio >= MIN_RATIO


def detect(tokens: LossTokens) -> Finding | None:
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
    """f64[L, E]: how much larger |d| is on the tokens that went through each expert than on comparable
    ones, in standard errors; -inf where too few did. None without routes or with too few tokens."""
    if tokens.routes is None or len(tokens.d) < MIN_TOKENS:
        return None
    places, scores = _places(tokens.routes, tokens.record.num_experts), _scores(tokens)
    num_tokens, num_layers, _ = places.shape
    size = num_layers * tokens.record.num_experts
    counts = torch.bincount(places.flatten(), minlength=size).double()
    each = scores.view(-1, 1, 1).expand_as(places).flatten()
    sums = torch.bincount(places.flatten(), each, minlength=size)
    # A sum of n scores of M, drawn without putting back.
    z = sums / (counts * (1 - counts / num_tokens)).clamp(min=1).sqrt()
    z[counts < MIN_COUNT] = -math.inf
    return z.view(num_layers, -1)


def suspect(tokens: LossTokens) -> Suspect | None:
    """Return the most suspect expert, guilty or not; None without routes or with too few tokens."""
    table = expert_z(tokens)
    if table is None or tokens.routes is None:
        return None
    z, num_experts = table.flatten(), tokens.record.num_experts
    places = _places(tokens.routes, num_experts)
    candidates = z.topk(min(NUM_CANDIDATES, len(z))).indices
    # One at a time: of a large record, M x L K x C truth values are a gigabyte.
    inside = torch.stack([(places == each).flatten(1).any(1) for each in candidates], 1)
    t = _t_values(inside.double(), _scores(tokens))
    t[z[candidates].isinf()] = -math.inf
    order = t.argsort(descending=True)
    best = int(order[0])
    its, d = inside[:, best], tokens.d.abs()
    if its.all() or not its.any():
        return None
    ratio = float(d[its].median()) / max(float(d[~its].median()), 1e-12)
    place = int(candidates[best])
    runner_up = float(t[order[1]]) if len(order) > 1 else 0.0
    layer, expert = divmod(place, num_experts)
    return Suspect(layer, expert, float(t[best]), runner_up, its, ratio)


def _places(routes: Tensor, num_experts: int) -> Tensor:
    """i64[M, L, K]: each choice as layer * E + expert."""
    return routes + torch.arange(routes.shape[1]).view(1, -1, 1) * num_experts


def _scores(tokens: LossTokens) -> Tensor:
    return normal_scores(tokens.d.abs(), tokens.old)


def normal_scores(values: Tensor, covariate: Tensor) -> Tensor:
    """Return f64[M], the ranks of `values` among the tokens of about the same `covariate`, as
    normal quantiles."""
    num = len(values)
    num_strata = max(1, min(NUM_STRATA, num // 50))
    stratum = covariate.argsort().argsort() * num_strata // num
    # Equal values (d = 0) must not be ranked by their place in the record.
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
    """f64[C]: of the coefficients of `scores` on all columns of `inside` [M, C] together."""
    x = inside - inside.mean(0)
    gram = x.T @ x
    # The experts of a layer add up to K: a trifle of ridge makes that solvable, and what it invents in
    # that direction has no variance.
    trifle = gram.diagonal().mean().clamp(min=1e-9) * 1e-3
    inverse = torch.linalg.inv(gram + trifle * torch.eye(len(gram), dtype=gram.dtype))
    coefficients = inverse @ (x.T @ scores)
    residual = scores - scores.mean() - x @ coefficients
    variance = residual.square().sum() / max(1, len(scores) - len(gram) - 1)
    return coefficients / ((inverse @ gram @ inverse).diagonal() * variance).clamp(min=1e-30).sqrt()
