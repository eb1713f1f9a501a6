"""A model's low-rank updates: attach and detach them, turn them off, and sum their gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from parallel.hf_config import HfModel
from parallel.lora.attach import ChunkUpdates
from parallel.lora.layers import Switch
from parallel.lora.weights import AdapterMap, LoraSetup
from parallel.mesh import Mesh
from parallel.model import unwrap
from parallel.weights import WeightMap


class Adaptation:
    """The adapter of a model. The adapted layers have low-rank updates
    (`parallel.lora.layers.Update`), and all parameters outside the updates are frozen."""

    def __init__(self, setup: LoraSetup, model: HfModel, mesh: Mesh, chunks: list[Any]) -> None:
        """Make the updates and attach them. `chunks` must not have gradient buffers yet."""
        self.setup, self._model, self._mesh = setup, model, mesh
        self._switch = Switch()
        sizes = model.sizes
        for chunk in chunks:
            chunk.requires_grad_(False)
        self._updates = [
            ChunkUpdates(
                unwrap(chunk),
                model.architecture.rules(model.config),
                setup.adapter,
                mesh,
                self._switch,
                num_groups=sizes.num_query_groups,
                heads_per_group=sizes.num_attention_heads // sizes.num_query_groups,
            )
            for chunk in chunks
        ]
        self.attach()
        for updates in self._updates:
            updates.join()

    def attach(self) -> None:
        """Put the low-rank updates into the layers."""
        for updates in self._updates:
            updates.attach()

    def detach(self) -> None:
        """Remove the low-rank updates from the layers."""
        for updates in self._updates:
            updates.detach()

    def map_of(self, chunks: list[Any]) -> AdapterMap:
        """Return an `AdapterMap`: the adapter's parameters in `chunks`, each with its rule and PEFT's
        name."""
        return AdapterMap(self._model, self._mesh, chunks, self.setup)

    def off(self) -> AbstractContextManager[None]:
        """Return a context manager. In its `with` statement the updates are turned off, so the model
        computes the same as its base."""
        return self._switch.off()

    def sum_expert_gradients(self, adapter: WeightMap) -> None:
        """Sum, over an expert-tensor-parallel group, the gradients of the matrices that every rank
        of the group holds completely. A collective.

        Each of these ranks multiplies such a matrix by its own part of the expert, so the rank has
        only a part of the matrix's gradient. Megatron sums such parts for dense layers only.
        """
        if self._mesh.dims.etp == 1:
            return
        gradients: list[torch.Tensor] = [
            getattr(entry.parameter, "main_grad")  # noqa: B009
            for entry in adapter.entries
            if getattr(entry.parameter, "summed_over_etp", False)
        ]
        if gradients:
            flat = torch.cat([gradient.view(-1) for gradient in gradients])
            dist.all_reduce(flat, group=self._mesh.etp)
            for gradient, part in zip(
                gradients, flat.split([one.numel() for one in gradients]), strict=True
            ):
                gradient.copy_(part.view_as(gradient))
