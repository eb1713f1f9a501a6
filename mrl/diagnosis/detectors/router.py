"""This detector finds router choices that differ between engine and trainer, by layer.

All rows with captured routes count, those of prompts too. Which of a layer's choices were the engine's
is known only where routes were captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.diagnosis.detectors.base import Finding, LossTokens, excess_share
from mrl.diagnosis.tokens import TokenRecord


@dataclass(frozen=True)
class LayerRoutes:
    """This is what the routes of one MoE layer show."""

    number: int
    disagreement: float
    """Share of the K choices of a row that the trainer's router would not make."""
    margin: float
    """Median margin between the last expert chosen and the next, in the trainer's router."""
    margin_at_disagreement: float
    """The same where they differ; NaN without such a row. About 0 is a coin toss between two experts;
    as large as elsewhere, and the routers do not see the same thing."""


def layer_routes(record: TokenRecord) -> list[LayerRoutes]:
    """Return one `LayerRoutes` per MoE layer; none without captured routes."""
    captured, native, margins = record.expert_ids, record.native_ids, record.margins
    if captured is None or native is None or margins is None:
        return []
    differs, valid = _differs(captured, native)
    layers = []
    for i, number in enumerate(record.layer_numbers):
        rows = valid[:, i]
        odd = rows & differs[:, i].any(-1)
        layers.append(
            LayerRoutes(
                number,
                float(differs[rows, i].double().mean()) if rows.any() else 0.0,
                float(margins[rows, i].median()) if rows.any() else float("nan"),
                float(margins[odd, i].median()) if odd.any() else float("nan"),
            )
        )
    return layers


def detect(tokens: LossTokens) -> Finding | None:
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
    beside = ""
    if any_layer.any() and not any_layer.all():
        beside = (
            f"; mean |old - rollout| is {float(d[any_layer].mean()):.2g} behind such a row and "
            f"{float(d[~any_layer].mean()):.2g} elsewhere"
        )
    return Finding(
        name="router_disagreement",
        severity=tokens.severity(excess_share(tokens.d.square(), any_layer)),
        text=(
            f"{float(any_layer.double().mean()):.1%} of the loss tokens come out of a row that the "
            f"trainer would have routed otherwise in some layer, first in layer {first}, most in layer "
            f"{worst} ({shares[worst]:.1%} of its choices){beside}"
        ),
        where={"layers": sorted(shares, key=lambda number: -shares[number]), "first_layer": first},
    )


def _differs(captured: Tensor, native: Tensor) -> tuple[Tensor, Tensor]:
    """bool[N, L, K], true where a captured expert is not among the native ones; bool[N, L], true where
    there is a captured route at all."""
    valid = (captured[:, :, 0] >= 0) & (native[:, :, 0] >= 0)
    shared = (captured.unsqueeze(-1) == native.unsqueeze(-2)).any(-1)
    return ~shared & valid.unsqueeze(-1), valid


def expert_gaps(tokens: LossTokens) -> Tensor | None:
    """f64[L, E]: mean |d| of the loss tokens that went through each expert, NaN where none did; None
    without routes."""
    routes = tokens.routes
    if routes is None:
        return None
    num_layers, num_experts = routes.shape[1], tokens.record.num_experts
    places = (routes + torch.arange(num_layers).view(1, -1, 1) * num_experts).flatten()
    weights = tokens.d.abs().view(-1, 1, 1).expand_as(routes).flatten()
    size = num_layers * num_experts
    sums = torch.bincount(places, weights, minlength=size)
    return (sums / torch.bincount(places, minlength=size)).view(num_layers, num_experts)
