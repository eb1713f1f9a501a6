"""Weights between Hugging Face names and this rank's Megatron shards, both ways, from one table.

Tensors are handled one parameter at a time: no rank ever holds more than its own shard, one full
parameter and one bucket.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from mrl.errors import InputError
from mrl.types import WeightBucket
from parallel.architectures.base import Rule, Split
from parallel.groups import Groups
from parallel.hf_config import HfModel
from parallel.model import unwrap

TRANSFORMER_ENGINE_NAMES = (
    (r"self_attention\.linear_qkv\.layer_norm_weight$", "input_layernorm.weight"),
    (r"mlp\.linear_fc1\.layer_norm_weight$", "pre_mlp_layernorm.weight"),
    (r"experts\.(linear_fc[12])\.weight(\d+)$", r"experts.local_experts.\2.\1.weight"),
)
"""TransformerEngine's fused layers keep the same tensors under other names."""


@dataclass(frozen=True)
class Entry:
    """One parameter of this rank, and what it is in the whole model."""

    parameter: torch.nn.Parameter
    rule: Rule
    layer: int
    expert: int
    """Global expert of this rank's parameter; -1 for everything that is not an expert."""

    def hf_names(self, expert: int | None = None) -> list[str]:
        number = self.expert if expert is None else expert
        return [name.format(layer=self.layer, expert=number) for name in self.rule.hf]


class WeightMap:
    """The parameters of this rank's chunks, each with its rule. Raises on a parameter without one."""

    def __init__(self, model: HfModel, groups: Groups, chunks: Iterable[torch.nn.Module]) -> None:
        self.model = model
        self.groups = groups
        config = model.config
        self.num_groups = config["num_key_value_heads"]
        self.num_local_experts = model.sizes.num_experts // groups.dims.ep
        patterns = [(_pattern(rule.megatron), rule) for rule in model.architecture.rules(config)]
        self.entries = [
            self._entry(patterns, unwrap(chunk), name, parameter)
            for chunk in chunks
            for name, parameter in unwrap(chunk).named_parameters()
            if not (model.tied_embeddings and name == "output_layer.weight")
        ]
        self._tied_outputs = [
            parameter
            for chunk in chunks
            for name, parameter in unwrap(chunk).named_parameters()
            if model.tied_embeddings and name == "output_layer.weight"
        ]

    def _entry(
        self, patterns: list[tuple[re.Pattern[str], Rule]], chunk: Any, name: str, parameter: Any
    ) -> Entry:
        canonical = name
        for te_name, local_name in TRANSFORMER_ENGINE_NAMES:
            canonical = re.sub(te_name, local_name, canonical)
        for pattern, rule in patterns:
            if found := pattern.fullmatch(canonical):
                place = {k: int(v) for k, v in found.groupdict().items()}
                layer = expert = -1
                if "layer" in place:
                    layer = chunk.decoder.layers[place["layer"]].layer_number - 1
                if "expert" in place:
                    expert = place["expert"] + self.groups.ep_rank * self.num_local_experts
                return Entry(parameter, rule, layer, expert)
        raise ValueError(
            f"{self.model.architecture.model_type} has no rule for Megatron parameter {name}"
        )

    def _tp(self, entry: Entry) -> tuple[int, int]:
        """(rank, size) that share out this parameter; experts are whole (expert-tensor size 1)."""
        if entry.expert >= 0 or entry.rule.split == "none":
            return 0, 1
        return self.groups.tp_rank, self.groups.dims.tp

    @torch.no_grad()
    def load(self) -> None:
        """Read this rank's shards from the model folder. Raises InputError on a name or shape."""
        with HfTensors(self.model) as tensors:
            for entry in self.entries:
                rank, size = self._tp(entry)
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
                output.copy_(take_shard(rows, "rows", self.groups.tp_rank, self.groups.dims.tp))

    @torch.no_grad()
    def export(self, version: int, max_bytes: int) -> Iterator[WeightBucket]:
        """The whole model under HF names, in buckets of about `max_bytes`, on every rank.

        A collective: every rank must drain the iterator. Stage after stage in pipeline order, and
        each HF tensor exactly once.
        """
        for stage in range(self.groups.dims.pp):
            mine = stage == self.groups.pp_rank
            buckets = _buckets(self._stage_tensors(), max_bytes) if mine else None
            while True:
                tensors = next(buckets, []) if buckets is not None else []
                tensors = self._broadcast(tensors, stage)
                if not tensors:
                    break
                yield WeightBucket(tensors, version)

    def _stage_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """This pipeline stage's parameters, gathered over tensor and expert parallel ranks."""
        for entry in self.entries:
            _, size = self._tp(entry)
            local = entry.parameter.detach()
            shards = _all_gather(local, self.groups.tp) if size > 1 else [local]
            full = join_shards(shards, entry.rule.split)
            if entry.expert < 0:
                yield from zip(entry.hf_names(), self._split_hf(entry, full), strict=True)
                continue
            # Peers hold the same place in their own block of experts.
            for peer, weights in enumerate(_all_gather(full, self.groups.ep)):
                expert = entry.expert + (peer - self.groups.ep_rank) * self.num_local_experts
                yield from zip(entry.hf_names(expert), self._split_hf(entry, weights), strict=True)

    def _split_hf(self, entry: Entry, full: Tensor) -> list[Tensor]:
        return split(full, entry.rule.split, self.num_groups, self._heads_per_group)

    @property
    def _heads_per_group(self) -> int:
        return self.model.config["num_attention_heads"] // self.num_groups

    def _broadcast(self, tensors: list[tuple[str, Tensor]], stage: int) -> list[tuple[str, Tensor]]:
        """One bucket from a pipeline stage to all: names and shapes, then one flat tensor."""
        group = self.groups.pp
        if group.size() == 1:
            return tensors
        source = dist.get_global_rank(group, stage)
        header = [[(name, tuple(t.shape), t.dtype) for name, t in tensors]]
        dist.broadcast_object_list(header, src=source, group=group)
        if not header[0]:
            return []
        counts = [torch.Size(shape).numel() for _, shape, _ in header[0]]
        dtype = header[0][0][2]
        if tensors:
            flat = torch.cat([t.reshape(-1) for _, t in tensors])
        else:
            flat = torch.empty(sum(counts), dtype=dtype, device=self.groups.device)
        dist.broadcast(flat, src=source, group=group)
        parts = flat.split(counts)
        return [(n, p.view(s)) for (n, s, _), p in zip(header[0], parts, strict=True)]


class HfTensors:
    """Lazy access to the tensors of a model folder by name."""

    def __init__(self, model: HfModel) -> None:
        self.path = model.path
        self._files = [
            safe_open(str(file), framework="pt")
            for file in sorted(model.path.glob("*.safetensors"))
        ]
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118

    def __enter__(self) -> HfTensors:
        return self

    def __exit__(self, *exc: object) -> None:
        self._where.clear()
        self._files.clear()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._where:
            raise InputError(
                f"{self.path}: no weight {name!r} in {len(self._files)} safetensors file(s); the "
                "folder does not match its config.json"
            )
        return self._where[name].get_tensor(name)


def _pattern(megatron: str) -> re.Pattern[str]:
    escaped = re.escape(megatron)
    for field in ("layer", "expert"):
        escaped = escaped.replace(re.escape("{" + field + "}"), rf"(?P<{field}>\d+)")
    return re.compile(escaped)


def join(parts: list[Tensor], kind: Split, num_groups: int) -> Tensor:
    """HF tensors of one parameter -> the whole Megatron tensor."""
    if kind == "qkv":
        grouped = [p.reshape(num_groups, -1, p.shape[-1]) for p in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def split(full: Tensor, kind: Split, num_groups: int, heads_per_group: int) -> list[Tensor]:
    """The whole Megatron tensor -> its HF tensors: the inverse of `join`."""
    if kind == "gated":
        return list(full.chunk(2))
    if kind != "qkv":
        return [full]
    grouped = full.reshape(num_groups, heads_per_group + 2, -1, full.shape[-1])
    parts = grouped.split([heads_per_group, 1, 1], dim=1)
    return [p.reshape(-1, full.shape[-1]).contiguous() for p in parts]


def take_shard(full: Tensor, kind: Split, rank: int, size: int) -> Tensor:
    """The part of a whole Megatron tensor that tensor-parallel `rank` of `size` holds."""
    if size == 1 or kind == "none":
        return full
    if kind == "gated":
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    return full.chunk(size, dim=1 if kind == "columns" else 0)[rank]


def join_shards(shards: list[Tensor], kind: Split) -> Tensor:
    """All tensor-parallel shards, in rank order -> the whole tensor: the inverse of `take_shard`."""
    if len(shards) == 1:
        return shards[0]
    if kind == "gated":
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([h[0] for h in halves] + [h[1] for h in halves])
    return torch.cat(shards, dim=1 if kind == "columns" else 0)


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def _buckets(
    tensors: Iterator[tuple[str, Tensor]], max_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive tensors of one dtype, up to `max_bytes` together (a larger one goes alone)."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and (size + num_bytes > max_bytes or tensor.dtype != bucket[0][1].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += num_bytes
    if bucket:
        yield bucket
