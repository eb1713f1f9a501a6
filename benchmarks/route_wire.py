"""This module measures bytes and time of routes between ranks:
`python -m benchmarks.route_wire [SHAPE ...]`.

Two gloo ranks of a CPU, data-parallel; each trains what the other one rolled out, so every row moves.
Three ways, by turns, medians of 7:

memory    the holder writes to shared memory, the reader reads its part (ranks of one node)
messages  the holder sends (ranks of two nodes)
whole     all samples with all their routes, gathered on every rank

Bytes a token are what the system counts in the shared memory (`fstat`), what the messages hold, and
what a rank sends for the gather, over the rows. An id takes one byte, or two above 256 experts: L K
bytes or 2 L K. A shape passes if memory and messages are within 1.1 of that. Only a run of every shape
is written to the results.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.evidence.cases import run_cases
from moe.route_rows import id_dtype, row_bytes
from mrl.config import ParallelConfig
from mrl.exchange.rollouts import RolloutExchange
from mrl.run.rollouts import decode_groups, encode_groups, outline
from mrl.types import Prompt, RoutingTrace, Sample, SampleGroup, VersionSpan
from parallel.dims import ParallelDims
from parallel.mesh import init_mesh
from tests.ranks import run_ranks

SHAPES = {
    # layers, experts a token, experts; samples a rank, tokens a sample
    "toy model": (4, 2, 8, 64, 41),
    "Qwen3-30B-A3B": (48, 8, 128, 16, 1025),
    "DeepSeek-V3": (58, 8, 256, 16, 1025),
    "Qwen1.5-MoE-A2.7B": (24, 4, 60, 16, 1025),
}
REPEATS = 7
LIMIT = 1.1


def make_group(number: int, shape: tuple[int, ...]) -> SampleGroup:
    """Make the samples of one rank."""
    layers, topk, experts, num_samples, length = shape
    generator = torch.Generator().manual_seed(number)
    samples = []
    for _ in range(num_samples):
        weights = torch.rand(length - 1, layers, experts, generator=generator)
        ids = weights.topk(topk).indices.to(id_dtype(experts))
        numbers = tuple(range(1, layers + 1))
        trace = RoutingTrace(ids, numbers, experts, (VersionSpan(0, 0, length - 1),), 0)
        samples.append(
            Sample(
                group_id=number,
                token_ids=torch.arange(length),
                prompt_len=1,
                loss_mask=torch.arange(length) > 0,
                rollout_logprobs=torch.zeros(length),
                weight_versions=(VersionSpan(0, 1, length),),
                finish_reason="stop",
                routing=trace,
            )
        )
    return SampleGroup(Prompt(str(number), torch.arange(1), "x", {}, "f:1"), samples)


def exchange(shape: tuple[int, ...]) -> dict[str, Any]:
    """Return, by way, the bytes that this rank gave and the median of the slowest rank's seconds."""
    mesh = init_mesh(ParallelDims.create(ParallelConfig(), 2), 0)
    layers, num_samples = shape[0], shape[3]
    own = make_group(mesh.rank, shape)
    both = [own, own]
    both[1 - mesh.rank] = outline(make_group(1 - mesh.rank, shape))
    samples = [sample for group in both for sample in group.samples]
    shares = [set(range(num_samples, 2 * num_samples)), set(range(num_samples))]
    wires = {
        name: RolloutExchange(mesh, range(1, layers + 1), share_memory=name == "memory")
        for name in ("memory", "messages")
    }

    def whole() -> None:
        parts: list[bytes] = [b""] * 2
        encoded = encode_groups([own])
        sizes["whole"] = len(encoded) - len(encode_groups([own], with_routes=False))
        dist.all_gather_object(parts, encoded)
        for part in parts:
            decode_groups(part)

    sizes: dict[str, int] = {}
    ways: dict[str, Callable[[], Any]] = {
        name: lambda wire=wire: wire.deliver(samples, shares) for name, wire in wires.items()
    }
    ways["whole"] = whole
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS + 1):
        for name, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            way()
            slowest = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            seconds[name].append(float(slowest))
    sizes["memory"] = wires["memory"].transport.num_bytes_shared
    sizes["messages"] = wires["messages"].transport.num_bytes_sent
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return {"bytes": sizes, "seconds": medians, "claimed": wires["memory"].bytes_per_token}


def measure(name: str, scratch: Path) -> dict[str, Any]:
    shape = SHAPES[name]
    layers, topk, experts, num_samples, length = shape
    ranks = run_ranks(2, exchange, shape, folder=scratch)
    rows = num_samples * (length - 1)
    ids = row_bytes(layers, experts, topk)
    size = {way: max(rank["bytes"][way] for rank in ranks) / rows for way in ranks[0]["bytes"]}
    seconds = ranks[0]["seconds"]
    return {
        "shape": name,
        "layers_topk_experts": [layers, topk, experts],
        "rows": rows,
        "id_bytes_per_token": ids,
        "bytes_per_token": {way: round(value, 3) for way, value in size.items()},
        "metric_bytes_per_token": round(ranks[0]["claimed"], 3),
        "over_ids": {way: round(value / ids, 3) for way, value in size.items()},
        "us_per_token": {way: round(1e6 * value / rows, 2) for way, value in seconds.items()},
        "time_of_whole_over": {
            way: round(seconds["whole"] / seconds[way], 2) for way in ("memory", "messages")
        },
    }


def is_good(row: Mapping[str, Any]) -> bool:
    """Return whether memory and messages take no more than LIMIT times the ids' own bytes."""
    return max(row["over_ids"][way] for way in ("memory", "messages")) <= LIMIT


def main() -> None:
    """Measure the shapes that the command line names."""
    run_cases("route_wire", __doc__, SHAPES, measure, is_good, more={"limit": LIMIT})


if __name__ == "__main__":
    main()
