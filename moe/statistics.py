"""Native against captured routes, counted on the router's own output.

Every rank counts the rows and layers that it owns; sums over all ranks give the whole model. n rows of
this rank, K experts per token, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe.replay import ReplayedChunk, Routes
from mrl.types import NATIVE_ROUTE, Mean, Statistics


@dataclass
class RoutingCounter:
    """Counts over the micro-batches of one pass of one rank."""

    # Tensors after the first addition: counting must not wait for the device.
    num_choices: Tensor | int = 0
    num_disagreements: Tensor | int = 0
    num_expected: Tensor | int = 0
    num_replayed: Tensor | int = 0
    _token_differs: dict[int, Tensor] = field(default_factory=dict)
    """By micro-batch: bool[n], true where any layer of this rank differs."""
    _num_tokens: dict[int, Tensor] = field(default_factory=dict)

    def add(
        self, batch_number: int, chunk: ReplayedChunk, routes: Routes | None, expected: Tensor
    ) -> None:
        """Count one micro-batch after its forward. `expected` bool[n]: rows that must be replayed."""
        if routes is None:
            return
        # A stage without MoE layers still takes part in the reduction over the pipeline.
        differs_anywhere = self._token_differs.get(batch_number, torch.zeros_like(expected))
        self._num_tokens[batch_number] = expected.sum()
        for number, layer in chunk.layers.items():
            target = routes[number]
            assert layer.native_ids is not None
            assert layer.routing_map is not None
            captured = (target != NATIVE_ROUTE).all(-1) & expected
            safe = torch.where(captured.unsqueeze(-1), target, layer.native_ids)
            shared = (safe.unsqueeze(-1) == layer.native_ids.unsqueeze(-2)).any(-1)
            differs = ~shared & captured.unsqueeze(-1)
            # The map has K experts a row, so holding all K captured ones means being equal to them.
            used = layer.routing_map.gather(1, safe).all(-1) & captured
            self.num_choices += captured.sum() * target.shape[-1]
            self.num_disagreements += differs.sum()
            self.num_expected += expected.sum()
            self.num_replayed += used.sum()
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
        return {
            "routing/disagreement": _share(self.num_disagreements, self.num_choices),
            "routing/replay_coverage": _share(self.num_replayed, self.num_expected),
            "routing/token_any_layer": _share(
                differs.sum() if first_stage else 0,
                sum(self._num_tokens.values()) if first_stage else 0,
            ),
        }


def _share(part: Tensor | int, whole: Tensor | int) -> Mean:
    return Mean(torch.as_tensor(part).double(), torch.as_tensor(whole).double())
