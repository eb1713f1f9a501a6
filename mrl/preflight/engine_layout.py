"""Finds the ranks and nodes of an engine, and checks that SGLang can divide the model among them.

R ranks of an engine (SGLang's tp_size), E expert-parallel ranks and D attention replicas among them:
attention is split R / D ways and the experts' columns R / E ways.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from mrl.config import RolloutConfig
from mrl.errors import InputError
from parallel.dims import ModelSizes

RANKS = "rollout.tensor_parallel_size"
EXPERTS = "rollout.expert_parallel_size"
REPLICAS = "rollout.data_parallel_attention_size"


@dataclass(frozen=True)
class EngineLayout:
    """Says which ranks the engines of a run span: each one spans neighbouring ranks."""

    num_engines: int
    ranks: int
    """The number of ranks of one engine."""
    ranks_per_node: int
    """The number of ranks of one engine on each node that it spans."""

    @property
    def num_nodes(self) -> int:
        """The number of nodes that one engine spans."""
        return self.ranks // self.ranks_per_node

    def node_of(self, rank: int) -> int:
        """Return the node of a trainer's rank, within its engine."""
        return rank % self.ranks // self.ranks_per_node

    def leads_node(self, rank: int) -> bool:
        """Return whether this rank runs a process of its engine; rank 0 of an engine leads all of
        it."""
        return rank % self.ranks_per_node == 0

    def describe(self) -> str:
        nodes = "" if self.num_nodes == 1 else f" on {self.num_nodes} nodes"
        return f"{self.num_engines} engine(s) of {self.ranks} rank(s){nodes}"


def engine_layout(rollout: RolloutConfig, world: int, local: int | None = None) -> EngineLayout:
    """Return the layout of `world` ranks, `local` of them on a node (by default as torchrun says).

    Raises InputError, with the arithmetic, where engines do not fill the ranks, or would start in the
    middle of a node, and for a weight sync that stays within a node.
    """
    local = local or int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    ranks = rollout.tensor_parallel_size
    _divide(RANKS, f"{world} rank(s)", world, ranks)
    if ranks > local and ranks % local:
        raise InputError(
            f"{RANKS}: an engine of {ranks} ranks spans whole nodes, and {ranks} is not divisible by "
            f"the {local} ranks of a node ({ranks} = {ranks // local} x {local} + {ranks % local})"
        )
    if ranks <= local:
        _divide(RANKS, f"{local} ranks of a node", local, ranks)
    if ranks > local and rollout.weight_sync == "distributed":
        raise InputError(
            f"rollout.weight_sync=distributed: its process group meets on loopback, and an engine of "
            f"{ranks} ranks spans {ranks // local} nodes of {local}; use tensor"
        )
    return EngineLayout(world // ranks, ranks, min(ranks, local))


def check_engine_sizes(rollout: RolloutConfig, sizes: ModelSizes) -> None:
    """Apply SGLang's own rules before it starts. Raises InputError: the first size that does not
    divide.

    The rules are those of SGLang 0.5.20: arg_groups/parallel_hook.py (tp_size by dp_size),
    models/qwen3_moe.py (heads, and key/value heads that are split or replicated),
    layers/moe/fused_moe_triton/layer.py (experts by ep_size, their columns by tp_size / ep_size).
    """
    ranks, experts = rollout.tensor_parallel_size, rollout.expert_parallel_size
    replicas = rollout.data_parallel_attention_size
    _divide(EXPERTS, f"{ranks} rank(s) of an engine", ranks, experts)
    _divide(REPLICAS, f"{ranks} rank(s) of an engine", ranks, replicas)
    if experts > 1 and not sizes.num_experts:
        raise InputError(f"{EXPERTS} is {experts}, but the model has no experts; leave it out")
    by_attention = RANKS if replicas == 1 else f"{RANKS} / {REPLICAS}"
    by_experts = RANKS if experts == 1 else f"{RANKS} / {EXPERTS}"
    attention, columns = ranks // replicas, ranks // experts
    _divide(
        by_attention, f"{sizes.num_attention_heads} heads", sizes.num_attention_heads, attention
    )
    kv_heads = sizes.num_query_groups
    if kv_heads % attention and attention % kv_heads:
        raise InputError(
            f"{by_attention}: {kv_heads} key/value heads can neither be split nor replicated over "
            f"{attention} ranks; one of the two numbers must divide the other"
        )
    _divide(EXPERTS, f"{sizes.num_experts} experts", sizes.num_experts, experts)
    _divide(by_experts, f"{sizes.moe_ffn_size} columns of an expert", sizes.moe_ffn_size, columns)
    for what, size in (
        ("columns of the dense layers", sizes.dense_ffn_size),
        ("columns of the shared experts", sizes.shared_expert_ffn_size),
    ):
        _divide(RANKS, f"{size} {what}", size, ranks)


def _divide(key: str, what: str, count: int, size: int) -> None:
    if count % size:
        raise InputError(
            f"{key}: {what} are not divisible by {size} "
            f"({count} = {count // size} x {size} + {count % size}); change it"
        )
