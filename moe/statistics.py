"""Native against captured routes, counted on the router's own output.

Every rank counts the rows and layers that it owns; sums over all ranks give the whole model. n rows of
this rank, K experts per token, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe.align import RouterRows
from moe.replay import ReplayedChunk
from moe.routes import Routes, ids_of
from mrl.system.histogram import log_histograms
from mrl.types import NATIVE_ROUTE, Max, Mean, Quantiles, Statistics


@dataclass(frozen=True)
class LayerCounts:
    """Counts over rows with a captured route, of L layers of this rank in one pass."""

    num_choices: Tensor
    """i64[L]: those rows times K."""
    num_disagreements: Tensor
    """i64[L]: choices among them that the router alone would not have made."""
    margins: MarginCounts | None = None
    """None where the routers were not watched."""

    def __add__(self, other: LayerCounts) -> LayerCounts:
        margins = self.margins
        if margins is not None and other.margins is not None:
            margins = margins + other.margins
        return LayerCounts(
            self.num_choices + other.num_choices,
            self.num_disagreements + other.num_disagreements,
            margins,
        )


@dataclass(frozen=True)
class MarginCounts:
    """The margins of L layers, by whether the row's choice differs (index 0) or not (index 1)."""

    totals: Tensor
    """f64[2, L]: sums of the margins."""
    nums: Tensor
    """i64[2, L]: how many there were."""
    histograms: Tensor
    """i64[2, L, NUM_BINS]: see `mrl.system.histogram`."""

    @staticmethod
    def of(margins: Tensor, differs: Tensor, captured: Tensor) -> MarginCounts:
        """margins f32[L, n], differs and captured bool[L, n]."""
        rows = torch.stack([captured & differs, captured & ~differs])
        return MarginCounts(
            torch.where(rows, margins, 0.0).double().sum(-1),
            rows.sum(-1),
            log_histograms(margins.clamp(min=0).expand(rows.shape), rows),
        )

    def __add__(self, other: MarginCounts) -> MarginCounts:
        return MarginCounts(
            self.totals + other.totals,
            self.nums + other.nums,
            self.histograms + other.histograms,
        )


@dataclass
class RoutingCounter:
    """Counts over the micro-batches of one pass of one rank.

    A micro-batch is counted in one go for all layers of a chunk: the number of kernels does not grow
    with the number of layers, and none of them waits for the device.
    """

    num_expected: Tensor | int = 0
    num_captured: Tensor | int = 0
    num_replayed: Tensor | int = 0
    layers: dict[tuple[int, ...], LayerCounts] = field(default_factory=dict)
    """Counts by the layer numbers of what was counted together: the layers of one chunk."""
    _token_differs: dict[int, Tensor] = field(default_factory=dict)
    """One bool[n] per micro-batch, true where any layer of this rank differs."""
    _num_tokens: dict[int, Tensor] = field(default_factory=dict)
    _loads: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """Tokens that went to each expert, i64[L, E], by the layer numbers of a chunk."""

    def add(
        self,
        batch_number: int,
        chunk: ReplayedChunk,
        routes: Routes | None,
        rows: RouterRows,
        replays: bool = True,
    ) -> None:
        """Count one micro-batch after its forward. `replays` is false where `routes` were only to be
        compared with."""
        numbers = tuple(chunk.layers)
        maps = _stacked([layer.routing_map for layer in chunk.layers.values()])
        if maps is not None:
            loads = (maps & rows.counted.unsqueeze(-1)).sum(1)
            known = self._loads.get(numbers)
            self._loads[numbers] = loads if known is None else known + loads
        if routes is None:
            return
        self._num_tokens[batch_number] = rows.leading.sum()
        # A stage without MoE layers still takes part in the reduction over the pipeline.
        known = self._token_differs.get(batch_number, torch.zeros_like(rows.leading))
        compared = tuple(number for number in numbers if number in routes)
        if maps is not None and compared:
            if compared != numbers:
                maps = _stacked([chunk.layers[number].routing_map for number in compared])
                assert maps is not None
            known = known | self._compare(compared, chunk, routes, maps, rows, replays)
        self._token_differs[batch_number] = known

    def _compare(
        self,
        numbers: tuple[int, ...],
        chunk: ReplayedChunk,
        routes: Routes,
        maps: Tensor,
        rows: RouterRows,
        replays: bool,
    ) -> Tensor:
        """Count layers `numbers`, whose routing maps are bool[L, n, E] -> bool[n]: rows in which any
        layer's own choice differs from the captured one."""
        layers = [chunk.layers[number] for number in numbers]
        native = _stacked([layer.native_ids for layer in layers])
        assert native is not None
        target = torch.stack([ids_of(routes[number]) for number in numbers])
        # A row is native in all of its K places or in none.
        captured = (target[..., 0] != NATIVE_ROUTE) & rows.leading
        safe = torch.where(captured.unsqueeze(-1), target, native)
        differs = ~(safe.unsqueeze(-1) == native.unsqueeze(-2)).any(-1)
        row_differs = differs.any(-1)
        counts = LayerCounts(captured.sum(-1) * differs.shape[-1], differs.sum((1, 2)))
        if all(layer.margins is not None for layer in layers):
            margins = torch.stack([m for layer in layers if (m := layer.margins) is not None])
            counts = replace(counts, margins=MarginCounts.of(margins, row_differs, captured))
        known = self.layers.get(numbers)
        self.layers[numbers] = counts if known is None else known + counts
        if replays:
            self.num_expected += rows.leading.sum() * len(numbers)
            # The map has K experts a row, so holding all K captured ones is being equal to them.
            used = maps.gather(-1, safe).all(-1)
            self.num_captured += captured.sum()
            self.num_replayed += (used & captured).sum()
        return row_differs.any(0)

    def statistics(self, pp_group: ProcessGroup) -> Statistics:
        """This rank's share of `routing/*`. A collective over the pipeline, whose stages hold the
        other layers of the same tokens."""
        batches = sorted(self._token_differs)
        if not batches:
            return {}
        differs = torch.cat([self._token_differs[i] for i in batches]).int()
        if pp_group.size() > 1:
            dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=pp_group)
        first_stage = pp_group.rank() == 0
        numbers = [number for part in self.layers for number in part]
        wrong, choices = torch.zeros(0), torch.zeros(0)
        if numbers:
            wrong = torch.cat([c.num_disagreements for c in self.layers.values()])
            choices = torch.cat([c.num_choices for c in self.layers.values()])
        stats: Statistics = {
            "routing/disagreement": _share(wrong.sum(), choices.sum()),
            "routing/token_any_layer": _share(
                differs.sum() if first_stage else 0,
                sum(self._num_tokens.values()) if first_stage else 0,
            ),
        }
        if isinstance(self.num_expected, Tensor):
            stats["routing/replay_coverage"] = _share(self.num_replayed, self.num_expected)
            stats["routing/captured_coverage"] = _share(self.num_replayed, self.num_captured)
        names = [f"routing/disagreement/layer_{number:02d}" for number in numbers]
        return stats | _shares(names, wrong, choices) | margin_statistics(self.layers)

    def load_statistics(
        self, layer_numbers: Sequence[int], num_experts: int, device: torch.device
    ) -> Statistics:
        """How even the experts' load was in the pass, the same on every rank: a collective over all.

        By MoE layer (Megatron's 1-based number): `moe/load_max` is the fullest expert's share times E
        (1 is even, E is collapsed), `moe/load_entropy` the entropy of the shares over log E, and
        `moe/dead_experts` those without a single token. `moe/load_max` alone is the worst layer,
        `moe/dead_experts` alone the sum. The routes are those that were used: under replay the
        rollout's. Loads are summed over all ranks first: a mean of local ratios is another number.
        """
        if not layer_numbers:
            return {}
        empty = torch.zeros(num_experts, dtype=torch.int64, device=device)
        known = {
            number: load
            for numbers, loads in self._loads.items()
            for number, load in zip(numbers, loads, strict=True)
        }
        loads = torch.stack([known.get(number, empty) for number in layer_numbers])
        if dist.get_world_size() > 1:
            dist.all_reduce(loads)
        return load_ratios(dict(zip(layer_numbers, loads, strict=True)))


def load_ratios(loads: Mapping[int, Tensor]) -> Statistics:
    """Loads i64[E] of the whole model by layer number -> the statistics of `load_statistics`."""
    counts = torch.stack(list(loads.values())).double()  # [L, E]
    num_experts = counts.shape[-1]
    shares = counts / counts.sum(-1, keepdim=True)
    fullest = shares.max(-1).values * num_experts
    entropy = -torch.special.xlogy(shares, shares).sum(-1) / max(math.log(num_experts), 1e-9)
    dead = (counts == 0).sum(-1).double()
    stats: Statistics = {
        "moe/load_max": Max(fullest.max()),
        "moe/dead_experts": Max(dead.sum()),
    }
    for i, number in enumerate(loads):
        stats[f"moe/load_max/layer_{number:02d}"] = Max(fullest[i])
        stats[f"moe/load_entropy/layer_{number:02d}"] = Max(entropy[i])
        stats[f"moe/dead_experts/layer_{number:02d}"] = Max(dead[i])
    return stats


def margin_statistics(layers: Mapping[tuple[int, ...], LayerCounts]) -> Statistics:
    """How sure the routers were of their choices, where the engine's were others and where not.

    Means over rows and layers, and medians (to 2%); by layer, the means where they differ. Rows that
    are a tie away from the engine's choice say rounding; sure ones that differ say other weights.
    """
    parts = {part: c.margins for part, c in layers.items() if c.margins is not None}
    stats: Statistics = {}
    if not parts:
        return stats
    numbers = [number for part in parts for number in part]
    totals = torch.cat([margins.totals for margins in parts.values()], dim=1)
    nums = torch.cat([margins.nums for margins in parts.values()], dim=1)
    histograms = torch.cat([margins.histograms for margins in parts.values()], dim=1).sum(1)
    for i, name in enumerate(("disagreement", "agreement")):
        key = f"routing/margin_at_{name}"
        stats[key] = _share(totals[i].sum(), nums[i].sum())
        median = (f"routing/margin_median_at_{name}", 0.5)
        stats[median[0]] = Quantiles(histograms[i], (median,))
        if name == "disagreement":
            stats |= _shares([f"{key}/layer_{n:02d}" for n in numbers], totals[i], nums[i])
    return stats


def _stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
    """One tensor of what every layer has noted; None for no layers."""
    noted = [part for part in parts if part is not None]
    assert len(noted) == len(parts), "a router was not called in this forward"
    return torch.stack(noted) if noted else None


def _share(part: Tensor | int, whole: Tensor | int) -> Mean:
    return Mean(torch.as_tensor(part).double(), torch.as_tensor(whole).double())


def _shares(names: Sequence[str], parts: Tensor, wholes: Tensor) -> Statistics:
    """parts and wholes [L] -> a mean under each of L names."""
    columns = zip(names, parts.double().unbind(), wholes.double().unbind(), strict=True)
    return {name: Mean(part, whole) for name, part, whole in columns}
