"""Map this rank's parameters to the architecture's rules, and load them from HF folders.

Parameters are loaded one at a time: no rank ever holds more than its own shard and one whole parameter.
`parallel.export` is the opposite direction.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch

from mrl.errors import InputError
from parallel.architectures.base import Rule, rule_pattern
from parallel.architectures.mtp import MTP
from parallel.hf_config import HfModel
from parallel.hf_tensors import HfTensors, check_names
from parallel.lora.rules import is_adapter
from parallel.mesh import Mesh
from parallel.model import unwrap
from parallel.shards import join, take_shard

TRANSFORMER_ENGINE_NAMES = (
    (r"self_attention\.linear_qkv\.layer_norm_weight$", "input_layernorm.weight"),
    (r"linear_(q|kv)_up_proj\.layer_norm_weight$", r"\1_layernorm.weight"),
    (r"mlp\.linear_fc1\.layer_norm_weight$", "pre_mlp_layernorm.weight"),
    (r"experts\.(linear_fc[12])\.weight(\d+)$", r"experts.local_experts.\2.\1.weight"),
)
"""Pairs of (pattern of a tensor's name in TransformerEngine's fused layers, name of the same tensor
in the rule tables)."""


def canonical_name(name: str) -> str:
    """Return a Megatron parameter's name as in the rule tables. TransformerEngine's layers use other
    names."""
    for engine_name, local_name in TRANSFORMER_ENGINE_NAMES:
        name = re.sub(engine_name, local_name, name)
    return name


@dataclass(frozen=True)
class Entry:
    """One parameter of this rank, with its rule and its position in the whole model."""

    parameter: torch.Tensor
    """The parameter; a buffer if `rule.is_buffer` or `rule.is_frozen`."""
    rule: Rule
    layer: int
    """0-based index of the layer in the whole model; -1 for a parameter outside the layers."""
    expert: int
    """0-based index of the expert over all ranks; -1 for a parameter that is not an expert's."""
    update: Any = None
    """The `parallel.lora.layers.Update` (adapter) of the layer whose weight this is; None if the
    layer has no update, or if the parameter is not the layer's weight."""

    def hf_names(self, expert: int | None = None) -> list[str]:
        number = self.expert if expert is None else expert
        return [name.format(layer=self.layer, expert=number) for name in self.rule.hf]


class WeightMap:
    """The parameters of this rank's chunks, each with its rule.

    The constructor raises ValueError for a parameter without a rule.
    """

    def __init__(self, model: HfModel, mesh: Mesh, chunks: Iterable[torch.nn.Module]) -> None:
        self.model = model
        self.mesh = mesh
        self.num_groups = model.sizes.num_query_groups
        self.num_local_experts = model.sizes.num_experts // mesh.dims.ep
        patterns = [(rule_pattern(rule), rule) for rule in self.rules]
        tensors = [
            (unwrap(chunk), name, tensor)
            for chunk in chunks
            for name, tensor in _tensors(unwrap(chunk), patterns)
            if self.owns(name)
        ]
        tied = model.tied_embeddings
        self.entries = [
            self._entry(patterns, chunk, name, tensor)
            for chunk, name, tensor in tensors
            if not (tied and name == "output_layer.weight")
        ]
        self._tied_outputs = [
            tensor for _, name, tensor in tensors if tied and name == "output_layer.weight"
        ]

    @property
    def rules(self) -> list[Rule]:
        """The rules of the model's architecture. Each parameter must match one of them by name."""
        return self.model.architecture.rules(self.model.config)

    def owns(self, name: str) -> bool:
        """Return whether this map includes the Megatron parameter `name`. It includes all parameters
        except those of an adapter, and of MTP layers that `model` does not train."""
        trains_mtp = self.model.architecture.num_trained_mtp > 0
        return not is_adapter(name) and (trains_mtp or not name.startswith(MTP))

    def without_mtp(self) -> Self:
        """Return a map of the same parameters except those of MTP layers."""
        found = copy.copy(self)
        found.entries = [e for e in self.entries if not e.rule.megatron.startswith(MTP)]
        return found

    def _entry(
        self, patterns: list[tuple[re.Pattern[str], Rule]], chunk: Any, name: str, parameter: Any
    ) -> Entry:
        canonical = canonical_name(name)
        for pattern, rule in patterns:
            if found := pattern.fullmatch(canonical):
                place = {k: int(v) for k, v in found.groupdict().items()}
                layer = expert = -1
                if "layer" in place:
                    block = chunk.mtp if name.startswith(MTP) else chunk.decoder
                    layer = block.layers[place["layer"]].layer_number - 1
                if "expert" in place:
                    expert = place["expert"] + self.mesh.ep_rank * self.num_local_experts
                module, _, own_name = name.rpartition(".")
                has_update = own_name == "weight"  # and not a bias of the same layer
                update = getattr(chunk.get_submodule(module), "lora", None) if has_update else None
                return Entry(parameter, rule, layer, expert, update)
        raise ValueError(
            f"{self.model.architecture.model_type} has no rule for Megatron parameter {name}"
        )

    @property
    def tied_entries(self) -> list[Entry]:
        """A list with the entry of the tied embedding's copy on the last pipeline stage. Empty if this
        rank has no such copy."""
        return [
            Entry(output, rule, -1, -1)
            for output in self._tied_outputs
            for rule in self.rules
            if rule.megatron == "embedding.word_embeddings.weight"
        ]

    @property
    def heads_per_group(self) -> int:
        return self.model.sizes.num_attention_heads // self.num_groups

    def tp_place(self, entry: Entry) -> tuple[int, int]:
        """Return (this rank's index, number of ranks) in the group that splits a parameter; (0, 1)
        if it is not split.

        The group is the expert-tensor-parallel group for experts, and otherwise the tensor-parallel
        group.
        """
        if entry.rule.split == "none":
            return 0, 1
        if entry.expert >= 0:
            return self.mesh.etp_rank, self.mesh.dims.etp
        return self.mesh.tp_rank, self.mesh.dims.tp

    @torch.no_grad()
    def load(self, may_lack: Collection[str] = ()) -> None:
        """Read this rank's shards from the model folder.

        Parameters whose HF names are in `may_lack` stay as they are if the folder lacks these
        names. Raises InputError for any other missing name, a name without a rule, or a wrong
        shape.
        """
        with HfTensors(self.model) as tensors:
            check_names(self.model, tensors.names)
            for entry in self.entries:
                if any(name in may_lack and name not in tensors for name in entry.hf_names()):
                    continue
                rank, size = self.tp_place(entry)
                full = join(
                    [tensors[n] for n in entry.hf_names()], entry.rule.split, self.num_groups
                )
                shard = take_shard(full, entry.rule.split, rank, size)
                if shard.shape != entry.parameter.shape:
                    raise InputError(
                        f"{self.model.path}: {' + '.join(entry.hf_names())} gives a shard of "
                        f"{tuple(shard.shape)}, config.json means {tuple(entry.parameter.shape)}"
                    )
                entry.parameter.copy_(shard)
            for output in self._tied_outputs:
                rows = tensors["model.embed_tokens.weight"]
                output.copy_(take_shard(rows, "rows", self.mesh.tp_rank, self.mesh.dims.tp))


def _tensors(
    chunk: torch.nn.Module, patterns: list[tuple[re.Pattern[str], Rule]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and tensor of all parameters, and of the buffers that the rules name."""
    yield from chunk.named_parameters()
    buffers = [pattern for pattern, rule in patterns if rule.is_buffer or rule.is_frozen]
    for name, buffer in chunk.named_buffers():
        if any(pattern.fullmatch(name) for pattern in buffers):
            yield name, buffer
