"""Make the low-rank updates of a chunk's layers, put them into the layers, and take them out again.

Without updates the layers are Megatron's plain layers, so the base computes the same as a model
without an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor

from mrl.config.adapter import Adapter
from parallel.architectures.base import Rule, rule_pattern
from parallel.layers.experts import GroupedExperts
from parallel.lora.layers import (
    ADAPTED,
    PLAIN,
    LowRank,
    Switch,
    Update,
    add_expert_updates,
    join_updates,
)
from parallel.lora.rules import SHARED, adapted, is_shared, module_name
from parallel.mesh import Mesh


class ChunkUpdates:
    """The low-rank updates of one chunk's linear layers."""

    def __init__(
        self, chunk: torch.nn.Module, rules: Sequence[Rule], adapter: Adapter, mesh: Mesh,
        switch: Switch, *, num_groups: int, heads_per_group: int,
    ) -> None:  # fmt: skip
        """Make the updates, filled with zeros, without changing the chunk.

        `num_groups` is the number of query groups of the whole model. Raises ValueError for a layer
        of a kind that cannot have an update.
        """
        patterns = [(rule_pattern(rule), rule) for rule in rules if adapted(rule, adapter)]
        builder = _Builder(
            chunk, adapter, mesh, switch, num_groups // mesh.dims.tp, heads_per_group
        )
        for name, module in chunk.named_modules():
            for pattern, rule in patterns:
                if pattern.fullmatch(f"{name}.weight"):
                    builder.make(name, module, rule)
        self._linears, self._shared = builder.linears, list(builder.shared.items())
        self._embedding: Any = getattr(chunk, "embedding", None)
        self._hook: Any = None
        updated = {id(linear) for linear, _ in self._linears}
        self._experts = [
            module
            for module in chunk.modules()
            if isinstance(module, GroupedExperts) and id(module._linears[0][0]) in updated
        ]

    def join(self) -> None:
        """Lay the update matrices of each MoE layer's experts end to end in memory. Call this once,
        while the updates are attached."""
        for experts in self._experts:
            join_updates(experts)

    def attach(self) -> None:
        """Put the updates into the layers, which must not have updates yet."""
        for linear, update in self._linears:
            linear.lora = update
            linear.__class__ = ADAPTED[type(linear)]
        for layer, held in self._shared:
            layer.add_module(SHARED, held)
        for experts in self._experts:
            experts.add_update = add_expert_updates
        if self._embedding is not None:
            # Recomputed layers compute gradients only if their input requires one.
            self._hook = self._embedding.register_forward_hook(_require_gradient)

    def detach(self) -> None:
        """Take the updates out of the layers, which are then Megatron's plain layers again."""
        for linear, _ in self._linears:
            del linear.lora
            linear.__class__ = PLAIN[type(linear)]
        for layer, _ in self._shared:
            delattr(layer, SHARED)
        for experts in self._experts:
            experts.add_update = None
        if self._hook is not None:
            self._hook.remove()


def _require_gradient(module: Any, args: Any, output: Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_()


class _Builder:
    """Makes the updates of a chunk's layers."""

    def __init__(
        self, chunk: Any, adapter: Adapter, mesh: Mesh, switch: Switch, num_groups: int,
        heads_per_group: int,
    ) -> None:  # fmt: skip
        self.chunk, self.adapter, self.mesh, self.switch = chunk, adapter, mesh, switch
        self.num_groups, self.heads_per_group = num_groups, heads_per_group
        self.linears: list[tuple[Any, Update]] = []
        self.shared: dict[torch.nn.Module, torch.nn.ModuleDict] = {}
        """For each MoE layer, the module that holds the matrices that its experts share."""

    def make(self, name: str, linear: Any, rule: Rule) -> None:
        """Make the update of one linear layer. Raises ValueError for a layer of a class that is not
        in ADAPTED."""
        if type(linear) not in ADAPTED:
            raise ValueError(f"{name}: no update is known for a layer of {type(linear).__name__}")
        rows, inputs = linear.weight.shape
        sizes = [rows // len(rule.hf)] * len(rule.hf)
        if rule.split in ("qkv", "gated_qkv"):
            heads = self.heads_per_group * (2 if rule.split == "gated_qkv" else 1)
            one = rows // (heads + 2)
            sizes = [heads * one, one, one]
        update = Update(rule.split, sizes, self.num_groups, self.adapter.scale, self.switch)
        for number, hf in enumerate(rule.hf):
            if hf in adapted(rule, self.adapter):
                part, shared = self._part(name, linear, rule, hf, (inputs, sizes[number]))
                update.add(number, module_name(hf), part, shared)
        self.linears.append((linear, update))

    def _part(
        self, name: str, linear: Any, rule: Rule, hf: str, size: tuple[int, int]
    ) -> tuple[LowRank, LowRank | None]:
        inputs, outputs = size
        part, shared = LowRank(), None
        shapes = {"A": (self.adapter.rank, inputs), "B": (outputs, self.adapter.rank)}
        for matrix, shape in shapes.items():
            if is_shared(rule, self.adapter, "A" if matrix == "A" else "B"):
                setattr(part, matrix, None)
                shared = self._shared(name, hf)
                if not hasattr(shared, matrix):
                    parameter = self._parameter(linear.weight, shape, is_cut=False, is_expert=False)
                    setattr(shared, matrix, parameter)
                continue
            is_cut = rule.split != "none" and (matrix == "A") == (rule.split == "columns")
            is_expert = "{expert}" in rule.megatron
            parameter = self._parameter(linear.weight, shape, is_cut=is_cut, is_expert=is_expert)
            setattr(part, matrix, parameter)
        return part, shared

    def _shared(self, name: str, hf: str) -> LowRank:
        """Return the module that holds the matrices that all experts of a layer share for the
        Hugging Face weight `hf`. It is made if it does not exist yet."""
        layer = self.chunk.get_submodule(name.partition(".experts.")[0])
        held = self.shared.setdefault(layer, torch.nn.ModuleDict())
        if module_name(hf) not in held:
            held[module_name(hf)] = LowRank()
        found = held[module_name(hf)]
        assert isinstance(found, LowRank)
        return found

    def _parameter(
        self, weight: Tensor, shape: tuple[int, int], *, is_cut: bool, is_expert: bool
    ) -> Any:
        """Make a matrix of zeros, with the attributes that decide how its gradient is summed over
        ranks and counted in the gradient norm. `is_cut` says whether ranks split the matrix.

        If several ranks hold the whole matrix, each rank computes only a part of the matrix's
        gradient. Megatron sums these parts for dense matrices (`sequence_parallel`), and
        `sum_expert_gradients` sums them for matrices of experts. The gradient norm counts the
        matrix once.
        """
        made: Any = torch.nn.Parameter(torch.zeros(shape, dtype=weight.dtype, device=weight.device))
        set_tensor_model_parallel_attributes(made, is_cut or is_expert, 0, 1)
        if is_expert:
            made.allreduce = False  # it is reduced over the experts' own replicas
        if is_expert and not is_cut and self.mesh.dims.etp > 1:
            made.summed_over_etp = True
            made.shared = self.mesh.etp_rank > 0  # the norm skips it
        elif not is_cut and not is_expert:
            made.sequence_parallel = self.mesh.dims.sequence_parallel
        return made
