"""The adapter's parameters of this rank: their rules, their first values, and what merging adds."""

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
from parallel.lora.peft_folder import read_peft_folder
from parallel.lora.rules import adapter_rules, is_adapter
from parallel.mesh import Mesh
from parallel.shards import take_shard
from parallel.weights import Entry, WeightMap


@dataclass(frozen=True)
class LoraSetup:
    """How a policy is adapted."""

    adapter: Adapter
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """How A begins, where there is no `path`."""
    seed: int = 0
    """What the first values of A follow from, with their names: they are the same in every layout."""
    path: Path | None = None
    """PEFT folder to begin with."""
    merged: bool = False
    """Whether an export is the whole model with the updates added, and not the adapter alone."""


def lora_setup(adapter: Adapter | None, recipe: Recipe) -> LoraSetup | None:
    """Return how a recipe adapts its policy, where `adapter` says that it does."""
    if adapter is None or recipe.lora is None:
        return None
    path = None if recipe.lora.path is None else Path(recipe.lora.path)
    merged = recipe.lora.rollout == "merged"
    return LoraSetup(adapter, recipe.lora.init, recipe.seed, path, merged)


class AdapterMap(WeightMap):
    """An `AdapterMap` holds the adapter's parameters of this rank's chunks, each with its rule. Its
    Hugging Face names are PEFT's."""

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
        """Set the first values: those of `path`, or A at random and B zero.

        Raises InputError where the folder does not hold this adapter of this model.
        """
        saved: Mapping[str, Tensor] | None = None
        if self.setup.path is not None:
            saved = read_peft_folder(self.setup.path, self.setup.adapter, self.model)
        for entry in self.entries:
            (name,) = entry.hf_names()
            rank, size = self.tp_place(entry)
            full = self._first(name, entry, size) if saved is None else saved[name]
            entry.parameter.copy_(take_shard(full, entry.rule.split, rank, size))

    def _first(self, name: str, entry: Entry, size: int) -> Tensor:
        """Return the whole matrix as it begins (PEFT's `reset_lora_parameters`)."""
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
