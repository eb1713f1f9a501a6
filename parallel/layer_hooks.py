"""Hooks on a model's layers that find overflows in the backward pass, and that record hidden
states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.errors import NotFinite
from mrl.types import MicroBatch
from parallel.mesh import Mesh, gather_objects
from parallel.model import unwrap

MAX_NAMED = 8
"""The largest number of samples that an error message names."""


class BackwardWatch:
    """Finds the micro-batches whose backward pass overflowed, from the gradient at the input of each
    chunk's first layer.

    A NaN or an infinity in the backward pass of a layer spreads with the gradient to all earlier
    layers, so it appears in the gradient at the first layer's input. An overflow in the gradient of
    a weight alone does not appear there.

    The hooks find the index of a micro-batch by counting the forward passes with gradient. Megatron
    runs these passes, which may be recomputes, in the order of the micro-batches.
    """

    def __init__(self, chunks: Iterable[Any]) -> None:
        """Install the hooks in the first layer of each of `chunks`, which are models without DDP's
        wrapper."""
        self._num_seen: dict[int, int] = {}
        self._bad: list[tuple[int, Tensor]] = []
        """Pairs (index of a micro-batch, bool[] that is true if its backward pass overflowed)."""
        self._layers = [layer for chunk in chunks for layer in list(chunk.decoder.layers)[:1]]
        self._hooks: list[Any] = []
        self.attach()

    def attach(self) -> None:
        """Install the hooks."""
        for layer in self._layers:
            hook = layer.register_forward_pre_hook(self._before_layer, with_kwargs=True)
            self._hooks.append(hook)

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def begin_step(self) -> None:
        """Forget the micro-batches of the previous step."""
        self._num_seen.clear()
        self._bad.clear()

    def require_finite(
        self, gradients: Iterable[Tensor], batches: Sequence[MicroBatch], mesh: Mesh
    ) -> None:
        """Raise NotFinite on all ranks if one of the `gradients` of any rank is not finite. A
        collective. The message names the samples of the micro-batches that overflowed.

        Megatron's own check raises on the affected rank alone, while the other ranks wait in a
        collective.
        """
        norms = [tensor.norm() for tensor in gradients]
        norms = norms or [torch.zeros((), device=mesh.device)]  # no adapter on this pipeline stage
        bad = (~torch.stack(norms).isfinite()).any().float()
        if mesh.dims.world > 1:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if not bool(bad):
            return
        ids = gather_samples(self.samples(batches))
        where = f", in the micro-batches of the samples {named(ids)}" if ids else ""
        raise NotFinite(
            "a gradient of the weights is not finite, though the gradients of the model's outputs are: "
            f"the backward pass of the model overflowed{where}"
        )

    def samples(self, batches: Sequence[MicroBatch]) -> list[int]:
        """Return the sorted ids of the samples in those micro-batches of this rank whose backward
        pass overflowed."""
        bad = {number for number, is_bad in self._bad if bool(is_bad)}
        found: set[int] = set()
        for number in bad & set(range(len(batches))):
            ids = batches[number].sample_ids
            found |= set() if ids is None else set(ids.tolist())
        return sorted(found - {-1})  # -1: padding

    def _before_layer(self, layer: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():  # no training, or the first forward pass under recompute
            return
        number = self._num_seen.get(id(layer), 0)
        self._num_seen[id(layer)] = number + 1
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.requires_grad:
            # No reference to self: the graph must not keep the layers alive (`MegatronModel.close`).
            bad = self._bad
            hidden.register_hook(lambda grad: bad.append((number, ~grad.isfinite().all())))


def gather_samples(own: list[int]) -> list[int]:
    """Return the sample ids of all ranks, sorted and without duplicates. A collective."""
    return sorted({number for part in gather_objects(own) for number in part})


def named(samples: Sequence[object]) -> str:
    """Return the samples as a string for a message: the first MAX_NAMED of them, and how many more
    there are."""
    more = f" and {len(samples) - MAX_NAMED} more" if len(samples) > MAX_NAMED else ""
    return ", ".join(map(str, samples[:MAX_NAMED])) + more


class LayerOutputs:
    """A context manager that records what each layer returns for the first micro-batch.

    Dimensions: n rows of the micro-batch that this rank has (only a part of the rows under sequence
    or context parallelism), h hidden size.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self.layers = [layer for chunk in chunks for layer in unwrap(chunk).decoder.layers]
        self.states: dict[int, Tensor] = {}
        """Hidden states [n, h] by Megatron's 1-based layer number, on the CPU to save GPU memory."""

    def __enter__(self) -> LayerOutputs:
        self._hooks = [layer.register_forward_hook(self._note) for layer in self.layers]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, layer: Any, inputs: Any, output: Any) -> None:
        if layer.layer_number not in self.states:
            hidden = output[0] if isinstance(output, tuple) else output
            self.states[layer.layer_number] = hidden.detach().flatten(0, 1).to("cpu", copy=True)
