"""Compare the routers' own choices with captured routes, and measure the load of the experts.

Every rank counts only its own rows and layers. The sums of these counts over all ranks are the
counts of the whole model. A row that several samples share counts once for each of them.

Dimensions: n rows (tokens) of this rank, m entries of its `RouterRows` (m = n if nothing is shared),
L MoE layers, K experts per token, E experts.
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
    """Counts of one pass for L layers of this rank. Only the rows that have a captured route and
    come before the last loss token of their sample are counted."""

    num_choices: Tensor
    """i64[L]: the number of expert choices in the captured routes, K for each counted row."""
    num_disagreements: Tensor
    """i64[L]: the number of expert choices in the captured routes that the trainer's router did not
    make itself."""
    margins: MarginCounts | None = None
    """The router margins of the counted rows; None if the pass recorded no margins."""

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
    """Sums and histograms of the router margins of L layers. A row's margin is the lowest score of
    the chosen experts minus the highest score of the other experts (`moe.replay.margins`).

    In the first dimension of each tensor, index 0 stands for the rows in which the router chose
    other experts than the captured route, and index 1 for the rows in which both chose the same
    experts.
    """

    totals: Tensor
    """f64[2, L]: the sums of the margins over the rows."""
    nums: Tensor
    """i64[2, L]: the number of rows that each entry of `totals` sums over."""
    histograms: Tensor
    """i64[2, L, NUM_BINS]: histograms of the margins (see `mrl.system.histogram`). Negative margins
    count as 0."""

    @staticmethod
    def of(margins: Tensor, differs: Tensor, weights: Tensor) -> MarginCounts:
        """Count the margins of one micro-batch.

        margins: f32[L, n]. differs: bool[L, n], true where the router chose other experts than the
        captured route. weights: bool or i16[L, n], how often each row counts.
        """
        counts = torch.stack([differs * weights, ~differs * weights])
        return MarginCounts(
            (torch.where(counts > 0, margins, 0.0).double() * counts).sum(-1),
            counts.sum(-1),
            log_histograms(margins.clamp(min=0).expand(counts.shape), counts),
        )

    def __add__(self, other: MarginCounts) -> MarginCounts:
        return MarginCounts(
            self.totals + other.totals,
            self.nums + other.nums,
            self.histograms + other.histograms,
        )


@dataclass
class RoutingCounter:
    """Counts router choices and expert loads of one pass on one rank, micro-batch by micro-batch.

    All layers of a model chunk are counted together, so the number of counting kernels does not
    grow with the number of layers, and the host never waits for the device.
    """

    num_expected: Tensor | int = 0
    num_captured: Tensor | int = 0
    num_replayed: Tensor | int = 0
    layers: dict[tuple[int, ...], LayerCounts] = field(default_factory=dict)
    """Maps the tuple of the layer numbers that were counted in a model chunk to their counts."""
    _row_differs: dict[int, Tensor] = field(default_factory=dict)
    """Maps the number of a micro-batch to bool[n]: true for rows in which the router of at least
    one layer of this rank chose other experts than the captured route."""
    _row_weights: dict[int, Tensor] = field(default_factory=dict)
    """Maps the number of a micro-batch to the weights of its rows: bool or i16[n], the number of
    tokens before the last loss token of their sample that have the row."""
    _loads: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """Maps the tuple of a model chunk's layer numbers to i64[L, E], the number of counted tokens
    (`RouterRows.counted`) that went to each expert."""

    def add(
        self,
        batch_number: int,
        chunk: ReplayedChunk,
        routes: Routes | None,
        rows: RouterRows,
        replays: bool = True,
    ) -> None:
        """Count one micro-batch after its forward pass.

        batch_number: the index of the micro-batch in the pass.
        chunk: the model chunk that ran.
        routes: the captured routes to compare with the routers' own choices; None counts only the
        load of the experts.
        rows: the rows of the micro-batch that the routers of this rank processed.
        replays: whether the pass was meant to replay `routes`. If so, the rows in which the router
        used the captured experts are counted too.
        """
        numbers = tuple(chunk.layers)
        maps = _stacked([layer.routing_map for layer in chunk.layers.values()])
        if maps is not None:
            loads = (maps * rows.weights(rows.counted).unsqueeze(-1)).sum(1)
            known = self._loads.get(numbers)
            self._loads[numbers] = loads if known is None else known + loads
        if routes is None:
            return
        self._row_weights[batch_number] = weights = rows.weights(rows.leading)
        # A stage without MoE layers also takes part in the reduction over the pipeline.
        none = torch.zeros_like(weights, dtype=torch.bool)
        known = self._row_differs.get(batch_number, none)
        compared = tuple(number for number in numbers if number in routes)
        if maps is not None and compared:
            if compared != numbers:
                maps = _stacked([chunk.layers[number].routing_map for number in compared])
                assert maps is not None
            known = known | self._compare(compared, chunk, routes, maps, weights, replays)
        self._row_differs[batch_number] = known

    def _compare(
        self,
        numbers: tuple[int, ...],
        chunk: ReplayedChunk,
        routes: Routes,
        maps: Tensor,
        weights: Tensor,
        replays: bool,
    ) -> Tensor:
        """Compare the routers' own choices with the captured routes in the layers `numbers`, and add
        the counts to this counter.

        maps: bool[L, n, E], the routing maps of these layers. weights: bool or i16[n], how often
        each row counts. Returns bool[n]: true for rows in which the router of at least one of the
        layers chose other experts than the captured route.
        """
        layers = [chunk.layers[number] for number in numbers]
        native = _stacked([layer.native_ids for layer in layers])
        assert native is not None
        target = torch.stack([ids_of(routes[number]) for number in numbers])
        # Either all K ids of a row are NATIVE_ROUTE or none is.
        captured = (target[..., 0] != NATIVE_ROUTE) & (weights > 0)
        safe = torch.where(captured.unsqueeze(-1), target, native)
        differs = ~(safe.unsqueeze(-1) == native.unsqueeze(-2)).any(-1)
        row_differs = differs.any(-1)
        often = captured * weights  # [L, n]; boolean, too, if no rows are shared
        counts = LayerCounts(often.sum(-1) * differs.shape[-1], (differs.sum(-1) * often).sum(-1))
        if all(layer.margins is not None for layer in layers):
            margins = torch.stack([m for layer in layers if (m := layer.margins) is not None])
            counts = replace(counts, margins=MarginCounts.of(margins, row_differs, often))
        known = self.layers.get(numbers)
        self.layers[numbers] = counts if known is None else known + counts
        if replays:
            self.num_expected += weights.sum() * len(numbers)
            # The map has K experts per row, so it equals the route if it contains all K of it.
            used = maps.gather(-1, safe).all(-1)
            self.num_captured += often.sum()
            self.num_replayed += (used * often).sum()
        return row_differs.any(0)

    def statistics(self, pp_group: ProcessGroup) -> Statistics:
        """Return the statistics `routing/*` of this rank, which the caller still has to reduce over
        the ranks. The result is empty if no micro-batch had routes.

        A collective over `pp_group`, whose ranks are the pipeline stages. They have the same tokens
        and different layers.
        """
        batches = sorted(self._row_differs)
        if not batches:
            return {}
        differs = torch.cat([self._row_differs[i] for i in batches]).int()
        weights = torch.cat([self._row_weights[i] for i in batches])
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
                (differs * weights).sum() if first_stage else 0,
                weights.sum() if first_stage else 0,
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
        """Measure how evenly the pass loaded the experts. A collective over all ranks.

        The load of an expert is the number of counted tokens that were sent to it, by the router or
        by a replayed route. A token counts if it is not after the last loss token of its sample
        (`RouterRows.counted`). Loads are summed over all ranks before any ratio is taken, and every
        rank returns the same statistics. Each MoE layer has three statistics, whose keys end in
        `/layer_NN` (Megatron's 1-based layer number):

        - `moe/load_max`: the highest load of an expert, divided by the mean load (1 to E).
        - `moe/load_entropy`: the entropy of the experts' shares of the load, divided by log E.
        - `moe/dead_experts`: the number of experts without a token.

        Without the ending, `moe/load_max` is the maximum over the layers, and `moe/dead_experts`
        is the sum over the layers.

        layer_numbers: the numbers of all L MoE layers of the model; if there are none, the result
        is empty. num_experts: E. device: where the loads are summed.
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
    """Compute the statistics that `RoutingCounter.load_statistics` describes.

    loads: maps a layer number to i64[E], the load of each expert in this layer, summed over all
    ranks. A layer without a counted token has no ratios, so it is left out.
    """
    loads = {number: load for number, load in loads.items() if load.any()}
    if not loads:
        return {}
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
    """Return means and medians (accurate to 2.2%) of the router margins of the counted rows. A
    margin is explained in `MarginCounts`.

    All layers together have one mean and one median for the rows in which the router chose other
    experts than the captured route (`disagreement`), and one mean and one median for the other rows
    (`agreement`). For the disagreements the mean of each layer is returned too. Small margins at
    disagreements point to rounding, large margins to different weights. The result is empty if the
    pass recorded no margins.
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
    """Stack one recorded tensor per layer along a new first dimension. Return None if there are no
    layers."""
    noted = [part for part in parts if part is not None]
    assert len(noted) == len(parts), "a router was not called in this forward"
    return torch.stack(noted) if noted else None


def _share(part: Tensor | int, whole: Tensor | int) -> Mean:
    return Mean(torch.as_tensor(part).double(), torch.as_tensor(whole).double())


def _shares(names: Sequence[str], parts: Tensor, wholes: Tensor) -> Statistics:
    """Return one statistic per key in `names`. Statistic i is the ratio `parts[i] / wholes[i]`."""
    columns = zip(names, parts.double().unbind(), wholes.double().unbind(), strict=True)
    return {name: Mean(part, whole) for name, part, whole in columns}
