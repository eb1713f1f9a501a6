"""Finds the micro-batches whose backward pass overflowed inside the model.

A NaN or an infinity that arises in a layer travels with the gradient to the layers before it, so the
gradient of the first layer's input on this rank tells which micro-batches are concerned. What arises in
a weight's gradient alone leaves no trace there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.errors import NotFinite
from mrl.types import MicroBatch
from parallel.mesh import Mesh

MAX_NAMED = 8
"""Samples that a message names."""


class BackwardWatch:
    """A `BackwardWatch` looks at the gradient of the first layer's input, in each chunk of this rank.

    Megatron runs the micro-batches of a chunk in their order, and recomputes them in it.
    """

    def __init__(self, chunks: Iterable[Any]) -> None:
        """`chunks`: the bare models."""
        self._num_seen: dict[int, int] = {}
        self._bad: list[tuple[int, Tensor]] = []
        """(number of the micro-batch, bool[])."""
        self._layers = [layer for chunk in chunks for layer in list(chunk.decoder.layers)[:1]]
        self._hooks: list[Any] = []
        self.attach()

    def attach(self) -> None:
        """Begin to look, after `detach`."""
        for layer in self._layers:
            hook = layer.register_forward_pre_hook(self._before_layer, with_kwargs=True)
            self._hooks.append(hook)

    def detach(self) -> None:
        """Look no longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def begin_step(self) -> None:
        """Forget the step before."""
        self._num_seen.clear()
        self._bad.clear()

    def require_finite(
        self, gradients: Iterable[Tensor], batches: Sequence[MicroBatch], mesh: Mesh
    ) -> None:
        """Raise NotFinite, on all ranks, where a gradient of any rank is not finite. A collective.

        Megatron's own check raises on the rank that has it while the others wait in a collective.
        """
        norms = [tensor.norm() for tensor in gradients]
        norms = norms or [torch.zeros((), device=mesh.device)]  # a stage without an adapter
        bad = (~torch.stack(norms).isfinite()).any().float()
        if mesh.dims.world > 1:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if not bool(bad):
            return
        ids = gather_samples(self.samples(batches))
        where = f", in the micro-batches of the samples {named(ids)}" if ids else ""
        raise NotFinite(
            "a gradient of the weights is not finite, though those of its outputs are: the "
            f"backward pass of the model overflowed{where}"
        )

    def samples(self, batches: Sequence[MicroBatch]) -> list[int]:
        """Return the ids of the samples of this rank's micro-batches that overflowed."""
        bad = {number for number, is_bad in self._bad if bool(is_bad)}
        found: set[int] = set()
        for number in bad & set(range(len(batches))):
            ids = batches[number].sample_ids
            found |= set() if ids is None else set(ids.tolist())
        return sorted(found - {-1})  # of the padding

    def _before_layer(self, layer: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():  # a pass without gradient, or the first one under recompute
            return
        number = self._num_seen.get(id(layer), 0)
        self._num_seen[id(layer)] = number + 1
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.requires_grad:
            # The graph must not keep the layers, which keep tensors of it: see `MegatronModel.close`.
            bad = self._bad
            hidden.register_hook(lambda grad: bad.append((number, ~grad.isfinite().all())))


def gather_samples(own: list[int]) -> list[int]:
    """Return the sample ids of all ranks, sorted. A collective."""
    everyone: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    return sorted({number for part in everyone for number in part})


def named(samples: Sequence[object]) -> str:
    """Return the first samples in words, and how many more there are."""
    more = f" and {len(samples) - MAX_NAMED} more" if len(samples) > MAX_NAMED else ""
    return ", ".join(map(str, samples[:MAX_NAMED])) + more
