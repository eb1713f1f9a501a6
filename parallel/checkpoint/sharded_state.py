"""A model's weights and optimizer state, as the rectangles of whole tensors that a checkpoint stores.

The key of a tensor is its kind (`model`, `main`, `exp_avg` and `exp_avg_sq` of Adam, or
`momentum_buffer` of Muon) and the Megatron name of the parameter in the whole model
(`decoder.layers.7.mlp.experts.local_experts.5.linear_fc1.weight`), so that nothing on disk depends on
the layout, the optimizer's class or the implementation of the layers. A critic's kinds have a prefix
(`critic_model`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from parallel.optimizer.state import OptimizerShard
from parallel.shards import boxes, whole_shape
from parallel.weights import Entry, WeightMap

Replica = tuple[int, ...]
"""The indices that identify a rank's copy of a tensor among all copies. Only the copy whose indices
are all 0 is written."""
KeyOf = Callable[[str, str, torch.dtype], str]
"""Returns the key of a tensor in the checkpoint, given (kind, parameter name, dtype of this rank's
tensor)."""


def own_key(prefix: str = "") -> KeyOf:
    return lambda kind, name, dtype: f"{prefix}{kind}.{name}"


def state_shards(
    weights: WeightMap, state: Mapping[int, OptimizerShard], key_of: KeyOf | None = None
) -> list[ShardedTensor]:
    """Return all tensors of this rank as shards of whole tensors, including the optimizer's `state`
    (from `optimizer_shards`).

    The data of the shards are views of the model's tensors. So the model is loaded by loading into
    the shards and then calling `write_back` of `parallel.optimizer.state`. A tied output layer
    counts as one more copy of the embedding.
    """
    both = [(e, 0) for e in weights.entries] + [(e, 1) for e in weights.tied_entries]
    return [
        shard
        for entry, copy in both
        for shard in _entry_shards(weights, entry, copy, state, key_of or own_key())
    ]


def _entry_shards(
    weights: WeightMap, entry: Entry, copy: int, state: Mapping[int, OptimizerShard], key_of: KeyOf
) -> Iterator[ShardedTensor]:
    name = entry.rule.megatron.format(layer=entry.layer, expert=entry.expert)
    parameter = entry.parameter
    tensor_rank, data_rank = _copies(weights, entry)

    def cut(kind: str, tensor: Tensor, start: int, replica: Replica) -> Iterator[ShardedTensor]:
        key = key_of(kind, name, tensor.dtype)
        shape, place = tuple(parameter.shape), weights.tp_place(entry)
        yield from _rectangles(key, tensor, shape, entry.rule.split, place, start, replica)

    yield from cut("model", parameter, 0, (copy, tensor_rank, data_rank))
    if owned := state.get(id(parameter)):
        replica = (copy, tensor_rank, 0 if owned.sharded else data_rank)
        for kind, tensor in owned.tensors.items():
            yield from cut(kind, tensor, owned.start, replica)


def _rectangles(
    key: str, tensor: Tensor, shape: tuple[int, ...], split: Any, place: tuple[int, int],
    start: int, replica: Replica,
) -> Iterator[ShardedTensor]:  # fmt: skip
    flat = tensor.detach().view(-1)
    whole = whole_shape(split, shape, place[1])
    for box in boxes(split, shape, *place, start, start + flat.numel()):
        data = flat.narrow(0, box.start - start, math.prod(box.shape)).view(box.shape)
        # Without a regular grid Megatron lets torch check that everything is covered once.
        yield ShardedTensor(key, data, data.dtype, box.shape, whole, box.offset, None, replica)


def _copies(weights: WeightMap, entry: Entry) -> tuple[int, int]:
    """Return two indices of this rank's copy of a parameter: its index among the copies on
    tensor-parallel ranks (0 if the parameter is split over them), and its index among the copies on
    data- and context-parallel ranks."""
    state: Any = parallel_state
    split = weights.tp_place(entry)[1] > 1
    if entry.expert >= 0:
        tensor = 0 if split else state.get_expert_tensor_parallel_rank()
        return tensor, state.get_expert_data_parallel_rank()
    tensor = 0 if split else state.get_tensor_model_parallel_rank()
    return tensor, state.get_data_parallel_rank(with_context_parallel=True)


def saved_key(saved: Metadata, prefix: str = "") -> KeyOf:
    """Return a function that gives the key in the checkpoint under which a tensor is read. The keys
    of the model begin with `prefix`.

    The model's dtype may have changed since the save. If a bf16 checkpoint is loaded into an fp32
    model, the weights are read from the fp32 main parameters. If an fp32 checkpoint is loaded into
    a bf16 model, the main parameters are read from the weights.
    """

    def key(kind: str, name: str, dtype: torch.dtype) -> str:
        has_main = f"{prefix}main.{name}" in saved.state_dict_metadata
        if kind == "model" and dtype == torch.float32 and has_main:
            kind = "main"
        elif kind == "main" and not has_main:
            kind = "model"
        return f"{prefix}{kind}.{name}"

    return key


def parameter_names(saved: Metadata, prefix: str = "") -> list[str]:
    """Return the sorted names of the parameters that one model has in a checkpoint: the model whose
    keys begin with `prefix`."""
    kinds = (key.partition(".") for key in saved.state_dict_metadata)
    return sorted(name for kind, _, name in kinds if kind == f"{prefix}model")


def misfit(shards: list[ShardedTensor], saved: Metadata) -> str | None:
    """Return a message that says why the tensors `shards` cannot be read from a checkpoint; None if
    they can be read."""
    for shard in shards:
        found = saved.state_dict_metadata.get(shard.key)
        if not isinstance(found, TensorStorageMetadata):
            return f"it has no tensor {shard.key}"
        if tuple(found.size) != tuple(shard.global_shape):
            return f"{shard.key} is {tuple(found.size)} there, {tuple(shard.global_shape)} here"
    return None
