"""Build Megatron's optimizer with Muon for the weight matrices of the layers, and Adam for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from torch import Tensor

from mrl.config import OptimizerConfig
from parallel.optimizer.layer_wise import LayerWiseOptimizer, divide, frozen
from parallel.optimizer.muon import Matrix, Muon, MuonAndAdam
from parallel.optimizer.state import main_parameters, parts_of
from parallel.owners import num_states
from parallel.weights import Entry, WeightMap


def build_muon(
    config: OptimizerConfig,
    settings: MegatronOptimizerConfig,
    chunks: list[Any],
    weights: WeightMap,
) -> Any:
    """Return Megatron's optimizer for the chunks, in which Muon updates the matrices of the layers and
    Adam everything else. `settings` are Megatron's for Adam, without its distributed optimizer."""
    matrices = matrices_of(weights, split_qkv=config.muon_split_qkv)
    optimizer: Any
    if not config.use_distributed_optimizer:
        optimizer = get_megatron_optimizer(settings, chunks)
        _insert_muon(optimizer, matrices, config, settings.params_dtype)
        return optimizer

    def cost_of(parameter: Tensor) -> int:
        has_main = parameter.dtype != torch.float32
        states = num_states(is_muons=id(parameter) in matrices, has_main=has_main)
        return parameter.numel() * states

    replicas = divide(chunks, cost_of)
    mine = {id(p) for r in replicas for p in r.owned[r.group.rank()]}
    with frozen(p for chunk in chunks for p in chunk.parameters() if id(p) not in mine):
        optimizer = get_megatron_optimizer(settings, chunks)
    _insert_muon(optimizer, matrices, config, settings.params_dtype)
    return LayerWiseOptimizer(optimizer.chained_optimizers, replicas)


def matrices_of(weights: WeightMap, *, split_qkv: bool) -> dict[int, Matrix]:
    """Return the parameters that Muon updates, by `id(parameter)`.

    These are the weight matrices of the layers: attention, dense MLPs, experts and shared experts.
    Embedding, output layer, norms, biases, routers and the gate of shared experts are Adam's.
    """
    found = {}
    sizes, mesh = weights.model.sizes, weights.mesh
    for entry in filter(is_matrix, weights.entries):
        heads = None
        if entry.rule.split in ("qkv", "gated_qkv") and split_qkv:
            each = entry.parameter.size(0) * weights.tp_place(entry)[1] // weights.num_groups
            parts = 2 if entry.rule.split == "gated_qkv" else 1  # queries, and their gates
            rows = each // (parts * sizes.num_attention_heads // sizes.num_query_groups + 2)
            heads = (*[(each - 2 * rows) // parts] * parts, rows, rows)
        group = None
        if weights.tp_place(entry)[1] > 1:
            group = mesh.tp if entry.expert < 0 else mesh.etp
        dim = 1 if entry.rule.split == "columns" else 0
        found[id(entry.parameter)] = Matrix(group, dim, heads)
    return found


def is_matrix(entry: Entry) -> bool:
    """Return whether Muon updates a parameter (see `matrices_of`)."""
    shape = entry.parameter.shape
    name = entry.rule.megatron
    is_layer = entry.layer >= 0 and not (entry.rule.is_buffer or entry.rule.is_frozen)
    return is_layer and len(shape) == 2 and not name.endswith(("router.weight", "gate_weight"))


def _insert_muon(
    optimizer: Any, matrices: Mapping[int, Matrix], config: OptimizerConfig, dtype: torch.dtype
) -> None:
    """Move the matrices of each part of Megatron's optimizer from its Adam to a Muon."""
    for part in parts_of(optimizer):
        adam = part.optimizer
        places = {
            main: matrices[id(parameter)]
            for parameter, main, _ in main_parameters(part)
            if id(parameter) in matrices
        }
        groups = []
        for group in adam.param_groups:
            kept = {key: value for key, value in group.items() if key not in adam.defaults}
            groups.append({**kept, "params": [p for p in group["params"] if p in places]})
            group["params"] = [p for p in group["params"] if p not in places]
        part.optimizer = MuonAndAdam(Muon(groups, places, config, dtype), adam)
