"""Measure, for each MoE layer, how often the routers of engine and trainer choose different experts.

All rows with captured routes count, including the rows of prompts. Rows without captured routes are
left out, because the engine's choices for them are unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.diagnosis.detectors.base import Finding, LossTokens, excess_share, layer_experts
from mrl.diagnosis.tokens import TokenRecord


@dataclass(frozen=True)
class LayerRoutes:
    """The disagreement and the margins of one MoE layer's router, over the captured rows.

    A captured row is a row whose route the engine reported.
    """

    number: int
    """Megatron's 1-based number of the layer."""
    disagreement: float
    """The share of the engine's expert choices, in the captured rows, that the trainer's router
    would not make; 0 without a captured row."""
    margin: float
    """The median of the margin over the captured rows; NaN without a captured row. The margin of a
    row is the K-th highest minus the (K+1)-th highest score of the layer's router."""
    margin_at_disagreement: float
    """The median of the margin over the captured rows in which the engine's choice differs from the
    trainer's; NaN without such a row. A value near 0 means that two experts were nearly tied. A
    value as large as `margin` means that the routers of trainer and engine have different inputs or
    weights."""


def layer_routes(record: TokenRecord) -> list[LayerRoutes]:
    """Return the router statistics of each MoE layer; an empty list without captured routes."""
    captured, native, margins = record.expert_ids, record.native_ids, record.margins
    if captured is None or native is None or margins is None:
        return []
    differs, valid = _differs(captured, native)
    layers = []
    for i, number in enumerate(record.layer_numbers):
        rows = valid[:, i]
        differing = rows & differs[:, i].any(-1)
        layers.append(
            LayerRoutes(
                number,
                float(differs[rows, i].double().mean()) if rows.any() else 0.0,
                float(margins[rows, i].median()) if rows.any() else float("nan"),
                float(margins[differing, i].median()) if differing.any() else float("nan"),
            )
        )
    return layers


def detect(tokens: LossTokens) -> Finding | None:
    """Report how often the engine chose experts that the trainer's routers would not choose.

    Returns None if this never happened, or if the record has no captured routes.
    """
    record = tokens.record
    layers = layer_routes(record)
    shares = {layer.number: layer.disagreement for layer in layers if layer.disagreement > 0}
    if not shares:
        return None
    assert record.expert_ids is not None
    assert record.native_ids is not None
    differs, valid = _differs(record.expert_ids, record.native_ids)
    any_layer = (differs.any(-1) & valid).any(1)[tokens.index - 1]
    d = tokens.d.abs()
    worst, first = max(shares, key=lambda number: shares[number]), min(shares)
    comparison = ""
    if any_layer.any() and not any_layer.all():
        comparison = (
            f"; mean |old - rollout| is {float(d[any_layer].mean()):.2g} for these tokens and "
            f"{float(d[~any_layer].mean()):.2g} for the others"
        )
    return Finding(
        name="router_disagreement",
        severity=tokens.severity(excess_share(tokens.d.square(), any_layer)),
        text=(
            f"{float(any_layer.double().mean()):.1%} of the loss tokens come from a row that the "
            f"trainer would have routed differently in some layer, first in layer {first}, most in "
            f"layer {worst} ({shares[worst]:.1%} of its choices){comparison}"
        ),
        where={"layers": sorted(shares, key=lambda number: -shares[number]), "first_layer": first},
    )


def _differs(captured: Tensor, native: Tensor) -> tuple[Tensor, Tensor]:
    """Compare the captured and native routes, i16[N, L, K]; return the masks `(differs, valid)`.

    `differs`, bool[N, L, K], is true for a captured expert that is not among the native experts of
    the same row. `valid`, bool[N, L], is true for a row that has both a captured and a native route.
    In all other rows `differs` is false.
    """
    valid = (captured[:, :, 0] >= 0) & (native[:, :, 0] >= 0)
    shared = (captured.unsqueeze(-1) == native.unsqueeze(-2)).any(-1)
    return ~shared & valid.unsqueeze(-1), valid


def expert_gaps(tokens: LossTokens) -> Tensor | None:
    """Return f64[L, E]: for each expert, the mean mismatch `|d|` of the loss tokens routed to it.

    An entry is NaN for an expert without tokens. Returns None without routes.
    """
    routes = tokens.routes
    if routes is None:
        return None
    num_layers, num_experts = routes.shape[1], tokens.record.num_experts
    chosen = layer_experts(routes, num_experts).flatten()
    weights = tokens.d.abs().view(-1, 1, 1).expand_as(routes).flatten()
    size = num_layers * num_experts
    sums = torch.bincount(chosen, weights, minlength=size)
    return (sums / torch.bincount(chosen, minlength=size)).view(num_layers, num_experts)
