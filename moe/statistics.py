"""Native against captured routes, counted on the router's own output.

Every rank counts the rows and layers that it owns; sums over all ranks give the whole model. n rows of
this rank, K experts per token, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe.align import RouterRows
from moe.replay import ReplayedChunk, Routes, ids_of
from mrl.histogram import log_histogram
from mrl.types import NATIVE_ROUTE, Max, Mean, Quantiles, Statistics


@dataclass
class LayerCounts:
    """Of one layer of this rank, over the micro-batches of a pass: rows with a captured route."""

    # Tensors after the first addition: counting must not wait for the device.
    num_choices: Tensor | int = 0
    """Those rows times K."""
    num_disagreements: Tensor | int = 0
    """Choices among them that the router alone would not have made."""
    margins: dict[bool, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    """By whether the row's choice differs: sum and number of the margins, and their histogram."""

    def add_margins(self, margins: Tensor, differs: Tensor, captured: Tensor) -> None:
        """margins f32[n], differs and captured bool[n]."""
        for kind, rows in ((True, captured & differs), (False, captured & ~differs)):
            total = torch.where(rows, margins, 0.0).double().sum()
            new = (total, rows.sum(), log_histogram(margins.clamp(min=0), rows))
            old = self.margins.get(kind)
            self.margins[kind] = (
                new if old is None else (old[0] + new[0], old[1] + new[1], old[2] + new[2])
            )


@dataclass
class RoutingCounter:
    """Counts over the micro-batches of one pass of one rank."""

    num_expected: Tensor | int = 0
    num_replayed: Tensor | int = 0
    layers: dict[int, LayerCounts] = field(default_factory=dict)
    _token_differs: dict[int, Tensor] = field(default_factory=dict)
    """By micro-batch: bool[n], true where any layer of this rank differs."""
    _num_tokens: dict[int, Tensor] = field(default_factory=dict)
    _loads: dict[int, Tensor] = field(default_factory=dict)
    """By layer number: i64[E], tokens that went to each expert."""

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
        expected = rows.leading
        for number, layer in chunk.layers.items():
            assert layer.routing_map is not None
            load = (layer.routing_map & rows.counted.unsqueeze(-1)).sum(0)
            self._loads[number] = self._loads[number] + load if number in self._loads else load
        if routes is None:
            return
        self._num_tokens[batch_number] = expected.sum()
        # A stage without MoE layers still takes part in the reduction over the pipeline.
        differs_anywhere = self._token_differs.get(batch_number, torch.zeros_like(expected))
        for number, layer in chunk.layers.items():
            if number not in routes:
                continue
            target, native = ids_of(routes[number]), layer.native_ids
            assert native is not None
            assert layer.routing_map is not None
            # A row is native in all of its K places or in none.
            captured = (target[:, 0] != NATIVE_ROUTE) & expected
            safe = torch.where(captured.unsqueeze(-1), target, native)
            differs = ~(safe.unsqueeze(-1) == native.unsqueeze(-2)).any(-1)
            counts = self.layers.setdefault(number, LayerCounts())
            counts.num_choices += captured.sum() * differs.shape[-1]
            counts.num_disagreements += differs.sum()
            if layer.margins is not None:
                counts.add_margins(layer.margins, differs.any(-1), captured)
            if replays:
                self.num_expected += self._num_tokens[batch_number]
                # The map has K experts a row, so holding all K captured ones is being equal to them.
                used = layer.routing_map.gather(1, safe).all(-1)
                self.num_replayed += (used & captured).sum()
            differs_anywhere = differs_anywhere | differs.any(-1)
        self._token_differs[batch_number] = differs_anywhere

    def statistics(self, pp_group: ProcessGroup) -> Statistics:
        """This rank's share of `routing/*`. A collective over the pipeline, whose stages hold the
        other layers of the same tokens."""
        numbers = sorted(self._token_differs)
        if not numbers:
            return {}
        differs = torch.cat([self._token_differs[i] for i in numbers]).int()
        if pp_group.size() > 1:
            dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=pp_group)
        first_stage = pp_group.rank() == 0
        layers = self.layers.values()
        stats: Statistics = {
            "routing/disagreement": _share(
                sum(c.num_disagreements for c in layers), sum(c.num_choices for c in layers)
            ),
            "routing/token_any_layer": _share(
                differs.sum() if first_stage else 0,
                sum(self._num_tokens.values()) if first_stage else 0,
            ),
        }
        if isinstance(self.num_expected, Tensor):
            stats["routing/replay_coverage"] = _share(self.num_replayed, self.num_expected)
        for number, counts in self.layers.items():
            name = f"routing/disagreement/layer_{number:02d}"
            stats[name] = _share(counts.num_disagreements, counts.num_choices)
        return stats | margin_statistics(self.layers)

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
        loads = torch.stack([self._loads.get(number, empty) for number in layer_numbers])
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


def margin_statistics(layers: Mapping[int, LayerCounts]) -> Statistics:
    """How sure the routers were of their choices, where the engine's were others and where not.

    Means over rows and layers, and medians (to 2%); by layer, the means where they differ. Rows that
    are a tie away from the engine's choice say rounding; sure ones that differ say other weights.
    """
    stats: Statistics = {}
    for differs, name in ((True, "disagreement"), (False, "agreement")):
        parts = {n: c.margins[differs] for n, c in layers.items() if differs in c.margins}
        if not parts:
            continue
        key = f"routing/margin_at_{name}"
        totals, nums, histograms = zip(*parts.values(), strict=True)
        stats[key] = _share(sum(totals), sum(nums))
        median = (f"routing/margin_median_at_{name}", 0.5)
        stats[median[0]] = Quantiles(torch.stack(histograms).sum(0), (median,))
        if differs:
            for number, (total, num, _) in parts.items():
                stats[f"{key}/layer_{number:02d}"] = _share(total, num)
    return stats


def _share(part: Tensor | int, whole: Tensor | int) -> Mean:
    return Mean(torch.as_tensor(part).double(), torch.as_tensor(whole).double())
