"""Finds the cause of the gap between trainer and engine: runs one micro-batch repeatedly.

By what is replayed: nothing, the engine's expert ids, its gate weights too. By layer: with its ids
replayed in all MoE layers but one, and in those up to one; and how far the hidden states after each
layer lie apart between the native and the replayed pass. Nothing but the routes differs between these
two, so the first layer whose states differ is the first where a router decided otherwise.

Every data-parallel rank takes a micro-batch of its own; all ranks run the same passes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe.align import router_rows
from moe.routes import GatedRoute, Replay, Route, ids_of
from mrl.diagnosis.mismatch import gap_statistics
from mrl.run.json_lines import finite_or_null
from mrl.types import Max, MicroBatch, Statistics, Sum
from parallel.layer_outputs import LayerOutputs
from parallel.policy import Policy
from parallel.reduce import reduce_statistics

MEASURES = ("logprob_abs_mean", "k3", "extreme_share")
NOISE = 1e-6
"""Relative differences of hidden states up to this are no divergence."""


@dataclass(frozen=True)
class LayerGap:
    layer: int
    """Megatron's number."""
    gap_without: float | None
    """Mean |log-prob - rollout's| with the ids replayed in all MoE layers but this one; None where the
    layer was left out to save passes."""
    gap_first: float | None
    """The same with the ids replayed up to and with this layer, and not after it."""
    hidden_rel_diff: float
    """|native - replayed| over |replayed|, of the hidden states after the layer (Frobenius)."""


@dataclass(frozen=True)
class Decomposition:
    num_tokens: int
    """Tokens of the loss, in the micro-batches of all data-parallel ranks."""
    levels: dict[str, dict[str, float]]
    """`none`, `ids` and `weights`, as far as there were routes, to MEASURES."""
    layers: list[LayerGap]
    """Numbers of the MoE layers; empty without routes."""
    first_divergent_layer: int | None

    def metrics(self) -> dict[str, float]:
        """`decompose/*`; the layer is NaN where none diverges."""
        found = {
            f"decompose/{level}/{name}": value
            for level, values in self.levels.items()
            for name, value in values.items()
        }
        first = self.first_divergent_layer
        found["decompose/first_divergent_layer"] = math.nan if first is None else float(first)
        return found

    def as_json(self) -> dict[str, Any]:
        """Numbers that are not finite become None."""
        return finite_or_null(dataclasses.asdict(self))


def decompose(
    policy: Policy,
    batch: MicroBatch,
    captured: Mapping[int, Route],
    layer_numbers: Sequence[int],
    max_layers: int,
) -> Decomposition:
    """A collective of 2 + 2 min(L, max_layers) forward passes of one micro-batch, less where there are
    no routes.

    captured: the engine's routes of this rank's rows and layers (`PipelineRunner.captured`), with its
    gate weights where they are known; layer_numbers: all L MoE layers of the model.
    """
    runs = _Runs(policy, batch)
    have = reduce_statistics(_kinds(captured))
    native = runs.run("none", None, keep_states=True)
    looked_at: list[int] = []
    if have["ids"]:
        ids = {n: ids_of(route) for n, route in captured.items()}
        replayed = runs.run("ids", ids, keep_states=True)
        runs.stats |= _state_differences(native, replayed, runs.counted)
        looked_at = spread(layer_numbers, max_layers)
        for layer in looked_at:
            runs.run(f"without/{layer}", _only(ids, set(layer_numbers) - {layer}))
            if layer != layer_numbers[-1]:  # that is `ids`
                runs.run(f"first/{layer}", _only(ids, {n for n in layer_numbers if n <= layer}))
    if have["weights"]:
        with policy.runner.replaying_gates(True):
            runs.run("weights", captured)
    return summarize(reduce_statistics(runs.stats), layer_numbers, looked_at)


def spread(numbers: Sequence[int], most: int) -> list[int]:
    """Choose at most `most` of them, evenly spaced, the first and the last included."""
    if len(numbers) <= most:
        return list(numbers)
    steps = max(most - 1, 1)
    return [numbers[i * (len(numbers) - 1) // steps] for i in range(most)]


class _Runs:
    """Passes over one micro-batch and what they measured on this rank."""

    def __init__(self, policy: Policy, batch: MicroBatch) -> None:
        self.policy, self.batch = policy, batch
        dims = policy.mesh.dims
        self.repeats = dims.pp if dims.vpp > 1 else 1  # Megatron's interleaving wants a multiple
        self.counted = router_rows(batch, policy.runner.row_places(batch)).counted
        mask = batch.loss_mask if policy.mesh.reports_loss else batch.loss_mask[:0]
        self.stats: Statistics = {"num_tokens": Sum(mask.sum())}

    def run(
        self, name: str, routes: Mapping[int, Route] | None, keep_states: bool = False
    ) -> dict[int, Tensor]:
        """A pass that replays `routes` and nothing else; the states by layer where they are kept."""
        replay = Replay.off if routes is None else Replay.recorded([routes] * self.repeats)
        outputs = LayerOutputs(self.policy.chunks if keep_states else [])
        with outputs:
            found = self.policy.forward_only([self.batch] * self.repeats, replay)
        if self.policy.mesh.reports_loss:
            ours = found.logprobs[0].cpu()
            gap = gap_statistics(ours, self.batch.rollout_logprobs, self.batch.loss_mask)
            self.stats |= {f"{name}/{key}": gap[f"mismatch/{key}"] for key in MEASURES}
        return outputs.states


def _kinds(captured: Mapping[int, Route]) -> Statistics:
    """What there is to replay on any rank: they must all run the same passes."""
    gated = any(isinstance(route, GatedRoute) for route in captured.values())
    return {
        "ids": Max(torch.tensor(float(bool(captured)))),
        "weights": Max(torch.tensor(float(gated))),
    }


def _only(routes: Mapping[int, Tensor], layers: Collection[int]) -> dict[int, Route]:
    return {n: route for n, route in routes.items() if n in layers}


def _state_differences(
    native: Mapping[int, Tensor], replayed: Mapping[int, Tensor], counted: Tensor
) -> Statistics:
    """Sums of squares over this rank's rows, which are tokens of samples: bool[n]."""
    stats: Statistics = {}
    for layer, states in replayed.items():
        base = states[counted].double()
        stats[f"difference/{layer}"] = Sum((native[layer][counted].double() - base).square().sum())
        stats[f"size/{layer}"] = Sum(base.square().sum())
    return stats


def summarize(
    found: Mapping[str, float], layer_numbers: Sequence[int], looked_at: Sequence[int]
) -> Decomposition:
    """`found`: the sums and means of all ranks, by the names that `decompose` gives them."""
    levels = {
        level: {key: found[f"{level}/{key}"] for key in MEASURES}
        for level in ("none", "ids", "weights")
        if f"{level}/k3" in found
    }
    layers = []
    for layer in layer_numbers if "ids" in levels else ():
        size, difference = found[f"size/{layer}"], found[f"difference/{layer}"]
        is_last = layer == layer_numbers[-1]
        first = "ids" if is_last else f"first/{layer}"
        layers.append(
            LayerGap(
                layer=layer,
                gap_without=found.get(f"without/{layer}/logprob_abs_mean"),
                gap_first=found.get(f"{first}/logprob_abs_mean") if layer in looked_at else None,
                hidden_rel_diff=math.sqrt(difference / size) if size else 0.0,
            )
        )
    divergent = (gap.layer for gap in layers if gap.hidden_rel_diff > NOISE)
    return Decomposition(int(found["num_tokens"]), levels, layers, next(divergent, None))
