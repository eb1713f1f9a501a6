"""The adapter's parameters on this rank: their rules and their initial values."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from mrl.config import Recipe
from mrl.config.adapter import Adapter
from parallel.architectures.base import Rule
from parallel.hf_config import HfModel
from parallel.lora.peft_folder import PeftFolder
from parallel.lora.rules import adapter_rules, is_adapter
from parallel.mesh import Mesh
from parallel.shards import take_shard
from parallel.weights import Entry, WeightMap


@dataclass(frozen=True)
class LoraSetup:
    """The settings of a policy's adapter."""

    adapter: Adapter
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """The distribution of A's initial values if there is no `path`."""
    seed: int = 0
    """The seed of A's initial values. The values depend only on the seed and the name of the
    matrix, so they are the same in every layout."""
    path: Path | None = None
    """The PEFT folder with the initial values of A and B; None for a random A and B = 0."""
    merged: bool = False
    """Whether an export is the whole model with the adapter added to its weights, instead of the
    adapter alone."""


def lora_setup(adapter: Adapter | None, recipe: Recipe) -> LoraSetup | None:
    """Return the adapter settings of a recipe; None if it trains all weights."""
    if adapter is None or recipe.lora is None:
        return None
    path = None if recipe.lora.path is None else Path(recipe.lora.path)
    merged = recipe.lora.rollout == "merged"
    return LoraSetup(adapter, recipe.lora.init, recipe.seed, path, merged)


class AdapterMap(WeightMap):
    """The adapter's parameters of this rank's chunks, each with its rule and PEFT's name."""

    def __init__(
        self, model: HfModel, mesh: Mesh, chunks: Iterable[torch.nn.Module], setup: LoraSetup
    ) -> None:
        self.setup = setup
        super().__init__(model, mesh, chunks)

    @property
    def rules(self) -> list[Rule]:
        return adapter_rules(super().rules, self.setup.adapter)

    def owns(self, name: str) -> bool:
        return is_adapter(name)

    @torch.no_grad()
    def begin(self) -> None:
        """Set A and B to their initial values: those in the folder `setup.path`, or a random A and
        B = 0 if `setup.path` is None.

        Raises InputError if the folder does not hold this adapter of this model.
        """
        saved: Mapping[str, Tensor] | None = None
        if self.setup.path is not None:
            saved = PeftFolder(self.setup.path, self.setup.adapter, self.model)
        for entry in self.entries:
            (name,) = entry.hf_names()
            rank, size = self.tp_place(entry)
            full = self._first(name, entry, size) if saved is None else saved[name]
            entry.parameter.copy_(take_shard(full, entry.rule.split, rank, size))

    def _first(self, name: str, entry: Entry, size: int) -> Tensor:
        """Return the initial values of a whole matrix, of which each of `size` ranks holds a part:
        zeros for B, and random values for A from the same distribution as in PEFT's
        `reset_lora_parameters`."""
        shape = list(entry.parameter.shape)
        shape[entry.rule.shard_dim] *= size
        if name.endswith(".lora_B.weight"):
            return torch.zeros(shape)
        digest = hashlib.blake2b(f"{self.setup.seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        if self.setup.init == "gaussian":
            return torch.randn(shape, generator=generator) / self.setup.adapter.rank
        bound = 1 / math.sqrt(shape[1])  # kaiming_uniform_ with a = sqrt(5)
        return torch.rand(shape, generator=generator) * (2 * bound) - bound
