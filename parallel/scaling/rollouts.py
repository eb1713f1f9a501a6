"""The bytes of a step's rollouts are counted on their way outside the GPUs.

What `mrl.collect.task`, `mrl.exchange.rollouts` and the engine's route memory move, from formulas;
`benchmarks/world_step.py` holds them to what these functions send. Leaders are the first ranks of the
engines' groups; all engines have the same share, and nodes have NODE ranks.

Dimensions: T tokens of a sample, H hidden layers, L MoE layers of a stage, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrl.kernels.routes import route_row_bytes
from parallel.dims import ParallelDims
from parallel.scaling.shape import ModelShape
from parallel.scaling.stages import stages
from parallel.scaling.workload import Workload

NODE = 8
TOKEN_BYTES = 8
"""i32 id and f32 log-prob (`mrl.exchange.rollouts.TokenCargo`)."""
OUTLINE_BYTES = 350
"""Bytes of a sample in JSON: lengths, versions, the finish reason, the shape of its routes."""
PROMPT_BYTES = 12
"""Bytes of a token of a prompt: its i64 id, and an assumption of 4 bytes of text."""
TEXT_BYTES = 4.5
"""Bytes of a token in `rollouts/*.jsonl`: an assumption, for English text."""


@dataclass(frozen=True)
class RolloutBytes:
    """This is one kind of traffic in one step."""

    name: str
    leader: float
    """That each leader of an engine sends."""
    rank: float
    """That each rank receives, of the stage that receives most."""
    first: float
    """That rank 0 receives beside that."""


def rollout_bytes(shape: ModelShape, dims: ParallelDims, work: Workload) -> list[RolloutBytes]:
    """All kinds, the largest share where ranks differ. A single rank shares nothing with others."""
    num_engines = work.num_engines(dims)
    own = work.num_tokens / num_engines
    found = [_from_engine(shape, work, own)]
    if work.rollout_ranks:
        return [*found, _to_first_rank(shape, work, own)]
    if dims.world == 1:
        return found
    outlines = work.num_sequences * OUTLINE_BYTES + work.prompts * PROMPT_BYTES * work.prompt_len
    share = work.num_tokens / dims.dp
    copies = node_copies(dims)
    found += [
        RolloutBytes("outlines of all groups", outlines / num_engines, outlines, 0.0),
        RolloutBytes("tokens and log-probs", TOKEN_BYTES * own * copies,
                     TOKEN_BYTES * share, 0.0),
    ]  # fmt: skip
    if work.routing_replay == "r3":
        widths = [
            len(stage_layers) * route_row_bytes(shape.num_experts, shape.topk)
            for stage_layers in moe_layers_by_stage(shape, dims)
            if stage_layers
        ]
        per_stage = copies / dims.pp
        found.append(
            RolloutBytes("routes of the layers that a rank trains", own * per_stage * sum(widths),
                         share * max(widths), 0.0)
        )  # fmt: skip
    texts = TEXT_BYTES * (work.num_tokens - work.num_sequences * work.prompt_len)
    return [*found, RolloutBytes("lines of rollouts/*.jsonl", texts / num_engines, 0.0, texts)]


def _to_first_rank(shape: ModelShape, work: Workload, own: float) -> RolloutBytes:
    """Count what workers send to the server on the first trainer rank, texts left out; that rank gives
    them to the others."""
    is_replayed = work.routing_replay == "r3"
    row = route_row_bytes(shape.num_experts, shape.topk) if is_replayed else 0
    each = TOKEN_BYTES + row * len(shape.moe_layers)
    return RolloutBytes("groups to the first trainer rank", own * each, 0.0, work.num_tokens * each)


def _from_engine(shape: ModelShape, work: Workload, num_tokens: float) -> RolloutBytes:
    """Count what goes from SGLang's scheduler to the leader, in memory that both map."""
    if work.routing_replay != "r3":
        return RolloutBytes("routes from the engine", 0.0, 0.0, 0.0)
    each = 1 if shape.num_experts <= 256 else 2
    num_bytes = num_tokens * shape.num_layers * shape.topk * each
    return RolloutBytes("routes from the engine to its leader (in memory)", num_bytes, 0.0, 0.0)


def moe_layers_by_stage(shape: ModelShape, dims: ParallelDims) -> list[tuple[int, ...]]:
    """Return 0-based layer numbers by stage."""
    moe = set(shape.moe_layers)
    return [tuple(n for n in stage.layers if n in moe) for stage in stages(shape, dims)]


def node_copies(dims: ParallelDims) -> float:
    """How often a sample leaves its leader's node: once for each other node with ranks that train it,
    mean over samples. Megatron numbers ranks tensor-parallel first, then context-, then data-, then
    pipeline-parallel."""
    inner = dims.tp * dims.cp
    pairs = {(rank // NODE, rank // inner % dims.dp) for rank in range(dims.world)}
    num_nodes = -(-dims.world // NODE)
    return len(pairs) / dims.dp * (1 - 1 / num_nodes)
