"""Find the routes and layers that cause the mismatch between trainer and engine.

The same micro-batch runs through the model several times, and each pass replays a different part of
the engine's routes. One pass replays nothing, one replays the expert ids of all MoE layers, and one
replays the expert ids and gate weights of all MoE layers. For each examined layer, one pass replays
the ids in all MoE layers except that layer, and one replays the ids in all MoE layers up to and
including that layer.

The hidden states after each layer are compared between the pass without replay (the native pass)
and the pass with all ids. These two passes differ only in their routes, so the first layer after
which the states differ is the first layer whose router did not choose the engine's experts.

Each data-parallel rank uses its own micro-batch, and all ranks run the same sequence of passes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe.align import RouterRows
from moe.routes import GatedRoute, Replay, Route, ids_of
from mrl.diagnosis.mismatch import gap_statistics
from mrl.run.json_lines import finite_or_null
from mrl.types import Max, MicroBatch, Statistics, Sum
from parallel.layer_hooks import LayerOutputs
from parallel.policy import Policy
from parallel.reduce import reduce_statistics

MEASURES = ("logprob_abs_mean", "k3", "extreme_share")
NOISE = 1e-6
"""The hidden states after a layer count as divergent if `LayerGap.hidden_rel_diff` is larger
than this."""


@dataclass(frozen=True)
class LayerGap:
    """The part of the mismatch that is due to one MoE layer."""

    layer: int
    """Megatron's 1-based number of the layer."""
    gap_without: float | None
    """The mean `|log-prob - rollout log-prob|` over loss tokens, with expert ids replayed in all
    MoE layers except this layer. None if the layer was not among the examined layers."""
    gap_first: float | None
    """The mean `|log-prob - rollout log-prob|` over loss tokens, with expert ids replayed only in
    the MoE layers up to and including this layer. None if the layer was not among the examined
    layers."""
    hidden_rel_diff: float
    """`|native - replayed| / |replayed|` (Frobenius norms) of the hidden states after the layer.
    `native` are the states of the pass without replay, `replayed` those of the pass that replays
    the expert ids of all MoE layers."""


@dataclass(frozen=True)
class Decomposition:
    """The result of `decompose`: the mismatch that remains when parts of the routes are replayed."""

    num_tokens: int
    """The number of loss tokens in the micro-batches of all data-parallel ranks."""
    levels: dict[str, dict[str, float]]
    """Measures of the mismatch (with the names MEASURES) for each level of replay;
    `levels["ids"]["k3"]` is an example. The level `none` replays nothing. The level `ids` replays
    the expert ids, if the engine reported them. The level `weights` also replays the gate weights,
    if the engine reported them. The level `quantized` replays the same ids as `ids`, and the
    trainer's weights are quantised like the engine's."""
    layers: list[LayerGap]
    """One entry per MoE layer; empty if the engine reported no routes."""
    first_divergent_layer: int | None
    """Megatron's 1-based number of the first MoE layer after which the hidden states diverge;
    None if they diverge after no layer, or if the engine reported no routes."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics `decompose/*`.

        `decompose/first_divergent_layer` is NaN if `first_divergent_layer` is None.
        """
        found = {
            f"decompose/{level}/{name}": value
            for level, values in self.levels.items()
            for name, value in values.items()
        }
        first = self.first_divergent_layer
        found["decompose/first_divergent_layer"] = math.nan if first is None else float(first)
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON-able values, with None in place of numbers that are not finite."""
        return finite_or_null(dataclasses.asdict(self))


def decompose(
    policy: Policy,
    batch: MicroBatch,
    captured: Mapping[int, Route],
    layer_numbers: Sequence[int],
    max_layers: int,
    quantized: Callable[[], AbstractContextManager[None]] | None = None,
) -> Decomposition:
    """Measure how much mismatch remains when different parts of the engine's routes are replayed.

    All ranks must call this together. It takes one forward pass over `batch` if the engine reported
    no routes, otherwise about `2 + 2 * min(L, max_layers)` passes.

    captured: the engine's routes by layer number, for this rank's rows and layers, as
    `PipelineRunner.captured` returns them. layer_numbers: the numbers of all L MoE layers of the
    model, ascending. max_layers: the largest number of layers to examine one by one. quantized:
    makes a context manager, inside whose block the policy's weights are quantised as in the
    engines; None if the engines do not quantise.
    """
    runs = _Runs(policy, batch)
    available = reduce_statistics(_available_routes(captured))
    native = runs.run("none", None, keep_states=True)
    examined: list[int] = []
    ids_of_routes = None
    if available["ids"]:
        ids = ids_of_routes = {n: ids_of(route) for n, route in captured.items()}
        replayed = runs.run("ids", ids, keep_states=True)
        runs.stats |= _state_differences(native, replayed, runs.rows)
        examined = spread(layer_numbers, max_layers)
        for layer in examined:
            runs.run(f"without/{layer}", _only(ids, set(layer_numbers) - {layer}))
            if layer != layer_numbers[-1]:  # replay up to the last layer is the pass `ids`
                runs.run(f"first/{layer}", _only(ids, {n for n in layer_numbers if n <= layer}))
    if quantized is not None:
        with quantized():
            runs.run("quantized", ids_of_routes)
    if available["weights"]:
        with policy.runner.replaying_gates(True):
            runs.run("weights", captured)
    return summarize(reduce_statistics(runs.stats), layer_numbers, examined)


def spread(numbers: Sequence[int], most: int) -> list[int]:
    """Choose at most `most` of the numbers, evenly spaced in the list, including the first number.

    The last number is included too if `most` is at least 2.
    """
    if len(numbers) <= most:
        return list(numbers)
    steps = max(most - 1, 1)
    return [numbers[i * (len(numbers) - 1) // steps] for i in range(most)]


class _Runs:
    """Runs forward passes over one micro-batch, and collects statistics of the passes on this rank."""

    def __init__(self, policy: Policy, batch: MicroBatch) -> None:
        self.policy, self.batch = policy, batch
        dims = policy.mesh.dims
        # Megatron's interleaved schedule requires a multiple of pp micro-batches.
        self.repeats = dims.pp if dims.vpp > 1 else 1
        self.rows = policy.runner.router_rows(batch)
        mask = batch.loss_mask if policy.mesh.reports_loss else batch.loss_mask[:0]
        self.stats: Statistics = {"num_tokens": Sum(mask.sum())}

    def run(
        self, name: str, routes: Mapping[int, Route] | None, keep_states: bool = False
    ) -> dict[int, Tensor]:
        """Run a forward pass that replays only `routes`, and record how large the mismatch is.

        The statistics `NAME/MEASURE`, one for each of MEASURES, are added to `stats`.

        name: the name of the pass. routes: the routes to replay, by layer number; None to replay
        nothing.

        Returns the hidden states after each of this rank's layers, by layer number, or {} if
        `keep_states` is false.
        """
        replay = Replay.off if routes is None else Replay.recorded([routes] * self.repeats)
        outputs = LayerOutputs(self.policy.chunks if keep_states else [])
        with outputs:
            found = self.policy.forward_only([self.batch] * self.repeats, replay)
        if self.policy.mesh.reports_loss:
            ours = found.logprobs[0].cpu()
            gap = gap_statistics(ours, self.batch.rollout_logprobs, self.batch.loss_mask)
            self.stats |= {f"{name}/{key}": gap[f"mismatch/{key}"] for key in MEASURES}
        return outputs.states


def _available_routes(captured: Mapping[int, Route]) -> Statistics:
    """Return two statistics: whether this rank has expert ids (`ids`) and gate weights (`weights`).

    Each statistic is 1 or 0. The maxima over all ranks decide which passes run, so that all ranks
    run the same passes.
    """
    gated = any(isinstance(route, GatedRoute) for route in captured.values())
    return {
        "ids": Max(torch.tensor(float(bool(captured)))),
        "weights": Max(torch.tensor(float(gated))),
    }


def _only(routes: Mapping[int, Tensor], layers: Collection[int]) -> dict[int, Route]:
    return {n: route for n, route in routes.items() if n in layers}


def _state_differences(
    native: Mapping[int, Tensor], replayed: Mapping[int, Tensor], rows: RouterRows
) -> Statistics:
    """Return two sums of squares for each layer, over the rows that count (`RouterRows.counted`).

    `size/LAYER` is the sum of squares of the hidden states in `replayed`. `difference/LAYER` is the
    sum of squares of the states in `native` minus those in `replayed`.
    """
    stats: Statistics = {}
    weights = rows.weights(rows.counted)
    counted = weights > 0
    weights = weights[counted].double().unsqueeze(-1)
    for layer, states in replayed.items():
        base, other = (each[counted].double() for each in (states, native[layer]))
        stats[f"difference/{layer}"] = Sum(((other - base).square() * weights).sum())
        stats[f"size/{layer}"] = Sum((base.square() * weights).sum())
    return stats


def summarize(
    found: Mapping[str, float], layer_numbers: Sequence[int], examined: Sequence[int]
) -> Decomposition:
    """Build the `Decomposition` from `found`, the statistics of all passes after reduction over ranks.

    layer_numbers: the numbers of all MoE layers. examined: the numbers of the examined layers.
    """
    levels = {
        level: {key: found[f"{level}/{key}"] for key in MEASURES}
        for level in ("none", "ids", "weights", "quantized")
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
                gap_first=found.get(f"{first}/logprob_abs_mean") if layer in examined else None,
                hidden_rel_diff=math.sqrt(difference / size) if size else 0.0,
            )
        )
    divergent = (gap.layer for gap in layers if gap.hidden_rel_diff > NOISE)
    return Decomposition(int(found["num_tokens"]), levels, layers, next(divergent, None))
