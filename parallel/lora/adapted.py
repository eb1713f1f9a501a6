"""A model that is adapted: its updates are attached, turned off for the reference, and summed up."""

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
    """An `Adaptation` gives a model's layers their updates and freezes all the rest."""

    def __init__(self, setup: LoraSetup, model: HfModel, mesh: Mesh, chunks: list[Any]) -> None:
        """Make the updates and attach them. `chunks`: as they are before gradient buffers are made."""
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
        """Put the updates back into the layers."""
        for updates in self._updates:
            updates.attach()

    def detach(self) -> None:
        """Take the updates out of the layers, for another adapter's or for none."""
        for updates in self._updates:
            updates.detach()

    def map_of(self, chunks: list[Any]) -> AdapterMap:
        """Return the adapter's parameters of the chunks."""
        return AdapterMap(self._model, self._mesh, chunks, self.setup)

    def off(self) -> AbstractContextManager[None]:
        """Let the model be the base."""
        return self._switch.off()

    def sum_expert_gradients(self, adapter: WeightMap) -> None:
        """Add up the gradients of what every rank of an expert holds whole. A collective.

        Each of these ranks multiplied it with its own part of the expert, so each has a part of its
        gradient. Megatron does this for dense layers only.
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
