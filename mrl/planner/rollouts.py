"""Count the bytes of a step's rollouts that move between processes, outside the GPUs.

`mrl.collect.task`, `mrl.exchange.rollouts` and the engine's route memory move these bytes.
`benchmarks/world_step.py` compares the formulas with what these modules really send. An engine's
leader is its first rank. All engines are assumed to generate the same share of the samples, and
every node is assumed to have 8 ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe.route_rows import route_bytes
from mrl.planner.shape import ModelShape
from mrl.planner.stages import stages
from mrl.planner.workload import Workload
from parallel.dims import ParallelDims

NODE = 8
TOKEN_BYTES = 8
"""Bytes of a token: an i32 id and an f32 log-prob (`mrl.exchange.rollouts.TokenPayload`)."""
OUTLINE_BYTES = 350
"""Bytes of a sample's outline in JSON: lengths, versions, finish reason, shape of the routes."""
PROMPT_BYTES = 12
"""Bytes of a prompt token: 8 for its i64 id and, as an assumption, 4 for its text."""
TEXT_BYTES = 4.5
"""Bytes of a token in `rollouts/*.jsonl`; an assumption for English text."""


@dataclass(frozen=True)
class RolloutBytes:
    """The bytes of one kind of traffic in one step."""

    name: str
    leader: float
    """Bytes that the leader of each engine (its first rank) sends; for `routes from the engine`,
    the bytes that the engine passes to its leader."""
    rank: float
    """Bytes that each rank receives on one pipeline stage: the stage whose ranks receive the most."""
    first: float
    """Bytes that rank 0 receives in addition to the bytes in `rank`."""


def rollout_bytes(shape: ModelShape, dims: ParallelDims, work: Workload) -> list[RolloutBytes]:
    """Return the bytes of a step's rollout traffic between processes, one entry per kind of
    traffic.

    The kinds depend on the layout. With a single rank there is one kind: the routes that the engine
    passes to this rank through shared memory (0 bytes without r3 replay).
    """
    num_engines = work.num_engines(dims)
    per_engine = work.num_tokens / num_engines
    found = [_from_engine(shape, work, per_engine)]
    if work.rollout_ranks:
        return [*found, _to_first_rank(shape, work, per_engine)]
    if dims.world == 1:
        return found
    outlines = work.num_sequences * OUTLINE_BYTES + work.prompts * PROMPT_BYTES * work.prompt_len
    share = work.num_tokens / dims.dp
    copies = node_copies(dims)
    found += [
        RolloutBytes("outlines of all groups", outlines / num_engines, outlines, 0.0),
        RolloutBytes("tokens and log-probs", TOKEN_BYTES * per_engine * copies,
                     TOKEN_BYTES * share, 0.0),
    ]  # fmt: skip
    if work.routing_replay == "r3":
        widths = [
            len(stage_layers) * route_bytes(shape.num_experts, shape.topk)
            for stage_layers in moe_layers_by_stage(shape, dims)
            if stage_layers
        ]
        per_stage = copies / dims.pp
        found.append(
            RolloutBytes("routes of the layers that a rank trains",
                         per_engine * per_stage * sum(widths), share * max(widths), 0.0)
        )  # fmt: skip
    texts = TEXT_BYTES * (work.num_tokens - work.num_sequences * work.prompt_len)
    return [*found, RolloutBytes("lines of rollouts/*.jsonl", texts / num_engines, 0.0, texts)]


def _to_first_rank(shape: ModelShape, work: Workload, num_tokens: float) -> RolloutBytes:
    """Return the bytes that rollout ranks send to the first trainer rank in a disaggregated run.

    Tokens, log-probs and, with r3 replay, routes are counted. Texts are not counted.

    `num_tokens` is the number of tokens of one engine. The bytes that the first trainer rank then
    sends to the other trainer ranks are not counted.
    """
    is_replayed = work.routing_replay == "r3"
    row = route_bytes(shape.num_experts, shape.topk) if is_replayed else 0
    each = TOKEN_BYTES + row * len(shape.moe_layers)
    name = "groups to the first trainer rank"
    return RolloutBytes(name, num_tokens * each, 0.0, work.num_tokens * each)


def _from_engine(shape: ModelShape, work: Workload, num_tokens: float) -> RolloutBytes:
    """Return the bytes of routes that an engine passes to its leader through shared memory.

    `num_tokens` is the number of tokens of one engine.
    """
    if work.routing_replay != "r3":
        return RolloutBytes("routes from the engine", 0.0, 0.0, 0.0)
    num_bytes = num_tokens * shape.num_layers * route_bytes(shape.num_experts, shape.topk)
    return RolloutBytes("routes from the engine to its leader (in memory)", num_bytes, 0.0, 0.0)


def moe_layers_by_stage(shape: ModelShape, dims: ParallelDims) -> list[tuple[int, ...]]:
    """Return the 0-based indices of each stage's MoE layers."""
    moe = set(shape.moe_layers)
    return [tuple(n for n in stage.layers if n in moe) for stage in stages(shape, dims)]


def node_copies(dims: ParallelDims) -> float:
    """Return the mean number of other nodes to which a leader sends a sample.

    A sample is sent once to each node that has at least one rank that trains on the sample. In
    Megatron's numbering of ranks, the tensor-parallel index varies fastest, followed by the context-,
    data- and pipeline-parallel index.
    """
    inner = dims.tp * dims.cp
    pairs = {(rank // NODE, rank // inner % dims.dp) for rank in range(dims.world)}
    num_nodes = -(-dims.world // NODE)
    return len(pairs) / dims.dp * (1 - 1 / num_nodes)
