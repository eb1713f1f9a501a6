"""Find the ranks and nodes of an engine, and check that SGLang can divide the model among the
ranks.

An engine has R ranks (SGLang's tp_size), expert-parallel size E, and D replicas of the attention.
The engine splits each replica of the attention over R / D ranks, and the columns of each expert
over R / E ranks.
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
    """How the engines of a run are distributed over its ranks. Each engine spans consecutive ranks."""

    num_engines: int
    ranks: int
    """The number of ranks of one engine."""
    ranks_per_node: int
    """The number of ranks that one engine has on each of its nodes."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes that one engine spans."""
        return self.ranks // self.ranks_per_node

    def node_of(self, rank: int) -> int:
        """Return the 0-based index of a rank's node among the nodes of the rank's engine."""
        return rank % self.ranks // self.ranks_per_node

    def leads_node(self, rank: int) -> bool:
        """Return whether a rank is the one that starts the engine's process on the rank's node.

        If an engine spans several nodes, it has one such rank on each node.
        """
        return rank % self.ranks_per_node == 0

    def describe(self) -> str:
        nodes = "" if self.num_nodes == 1 else f" on {self.num_nodes} nodes"
        return f"{self.num_engines} engine(s) of {self.ranks} rank(s){nodes}"


def engine_layout(rollout: RolloutConfig, world: int, local: int | None = None) -> EngineLayout:
    """Return the layout of the engines on `world` ranks, with `local` ranks on each node.

    `local` defaults to torchrun's LOCAL_WORLD_SIZE or, outside torchrun, to `world`. The number of
    ranks of an engine is `rollout.tensor_parallel_size`. Raises InputError if `world` is not
    divisible by that number, or if LOCAL_WORLD_SIZE is not a positive number. InputError is also
    raised if engines do not line up with nodes: the number of ranks of an engine must divide
    `local` or be a multiple of `local`.
    """
    local = local or node_ranks(world)
    ranks = rollout.tensor_parallel_size
    _divide(RANKS, f"{world} rank(s)", world, ranks)
    if ranks > local and ranks % local:
        raise InputError(
            f"{RANKS}: an engine of {ranks} ranks spans whole nodes, and {ranks} is not divisible by "
            f"the {local} ranks of a node ({ranks} = {ranks // local} x {local} + {ranks % local})"
        )
    if ranks <= local:
        _divide(RANKS, f"{local} ranks of a node", local, ranks)
    return EngineLayout(world // ranks, ranks, min(ranks, local))


def node_ranks(world: int) -> int:
    """Return torchrun's LOCAL_WORLD_SIZE or, outside torchrun, `world`.

    Raises InputError if LOCAL_WORLD_SIZE is not a positive number.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE", str(world))
    if not (text.isdecimal() and len(text) < 10 and int(text) > 0):
        raise InputError(
            f"LOCAL_WORLD_SIZE: got {text!r:.40}, expected the number of this node's ranks, which "
            "torchrun sets"
        )
    return int(text)


def check_engine_sizes(rollout: RolloutConfig, sizes: ModelSizes) -> None:
    """Raise InputError for the first size of the model that cannot be split evenly over an engine's
    ranks.

    InputError is also raised if the number of the engine's ranks is not divisible by the
    expert-parallel size or by the number of attention replicas, or if a model without experts is
    given expert parallelism. The rules are taken from SGLang 0.5.20: arg_groups/parallel_hook.py
    (tp_size is divided by dp_size), models/qwen3_moe.py (heads are split, key/value heads are split
    or replicated), and layers/moe/fused_moe_triton/layer.py (the number of experts is divided by
    ep_size, their columns by tp_size / ep_size).
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
    key_heads = sizes.linear_key_heads
    _divide(by_attention, f"{key_heads} key heads of linear attention", key_heads, attention)
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
