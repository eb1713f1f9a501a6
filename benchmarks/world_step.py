"""This module plays one rank's part in a step of 64 and 256 ranks:
`python -m benchmarks.world_step [CASE ...]`.

The functions that a run calls (of `mrl.collect.task`, `mrl.exchange.rollouts`, packing, a rollout's
lines, the plan of a checkpoint) on synthetic samples of Qwen3-30B-A3B and of a 671B's shape, for
the share of one engine leader, one reader and rank 0. The wire is left out: bytes are
counted, no other rank runs. `before` is
what the code of commit e517742 would have done: every rank gets all tokens in parts padded to the
largest, rank 0 decodes all texts and plans for all. Its bytes are counted from what `encode_groups`
makes, its seconds are measured on one leader's part and multiplied. So are the seconds of routes,
measured on SLICE samples. Seconds are of one thread's CPU; the tokenizer is the toy one: a letter a
token.

Passes where the bytes are those of `mrl.planner.rollouts` (`mrl check --plan`) within a tenth, and
what a rank holds of other ranks' samples is at most a tenth of before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence.cases import run_cases
from benchmarks.scaling import read_model
from benchmarks.shard_layout import lay_out_checkpoint
from mrl.data.completions import completions
from mrl.exchange.rollouts import RoutePayload, TokenPayload
from mrl.exchange.transfers import TOKENS, Payload, Selection, Transfer, compute_transfers
from mrl.planner.rollouts import NODE, moe_layers_by_stage, rollout_bytes
from mrl.planner.shape import ModelShape
from mrl.planner.workload import Workload
from mrl.run.folder import RunFolder, rollout_lines
from mrl.run.rollouts import decode_groups, encode_groups
from mrl.toy_model import build_tokenizer
from mrl.types import Prompt, RoutingTrace, Sample, SampleGroup, VersionSpan
from parallel.dims import ParallelDims
from parallel.packing import assign_micro_batches

SLICE = 16


@dataclass(frozen=True)
class Case:
    model: str
    dims: ParallelDims
    work: Workload


def layout(world: int, tp: int, pp: int, ep: int, last: int | None = None) -> ParallelDims:
    return ParallelDims(world=world, tp=tp, pp=pp, vpp=1, cp=1, ep=ep, etp=1, last_layers=last)


def work(prompts: int, samples: int, engine_tp: int) -> Workload:
    """Describe a workload with two whole sequences a micro-batch and R3."""
    return Workload(
        prompts=prompts,
        samples=samples,
        prompt_len=512,
        response_len=4096,
        micro_batch_tokens=9216,
        engine_tp=engine_tp,
    )


CASES = {
    "30B on 64 ranks": Case("qwen3_30b_a3b", layout(64, 4, 1, 8), work(256, 8, 4)),
    "671B on 256 ranks": Case("deepseek_v3", layout(256, 2, 8, 8, last=5), work(512, 16, 32)),
}


def make_groups(case: Case, shape: ModelShape, engine: int) -> list[SampleGroup]:
    """Make what one engine rolled out; routes are on the meta device."""
    num_engines = case.dims.world // case.work.engine_tp
    generator = torch.Generator().manual_seed(engine)
    return [
        SampleGroup(
            Prompt(
                str(i),
                torch.arange(case.work.prompt_len),
                "text" * case.work.prompt_len,
                {"answer": "7"},
                "f:1",
            ),
            [make_sample(case, shape, i, generator) for _ in range(case.work.samples)],
            rewards=torch.zeros(case.work.samples),
        )
        for i in range(engine, case.work.prompts, num_engines)
    ]


def make_sample(case: Case, shape: ModelShape, group_id: int, generator: torch.Generator) -> Sample:
    shorter = int(torch.randint(0, 64, (), generator=generator))
    length, start = case.work.sequence_len - shorter, case.work.prompt_len
    return Sample(
        group_id=group_id,
        token_ids=torch.randint(0, 96, (length,), generator=generator),
        prompt_len=start,
        loss_mask=torch.arange(length) >= start,
        rollout_logprobs=-torch.rand(length, generator=generator),
        weight_versions=(VersionSpan(3, start, length),),
        finish_reason="stop",
        routing=make_trace(shape, length - 1, device="meta"),
    )


def make_trace(shape: ModelShape, num_rows: int, device: str = "cpu") -> RoutingTrace:
    numbers = tuple(layer + 1 for layer in shape.moe_layers)
    size = (num_rows, len(numbers), shape.topk)
    ids = torch.empty(size, dtype=torch.uint8, device=device)
    if device == "cpu":
        first = torch.randint(0, shape.num_experts, size[:2]).unsqueeze(2)
        ids = ((first + 3 * torch.arange(shape.topk)) % shape.num_experts).to(torch.uint8)
    return RoutingTrace(ids, numbers, shape.num_experts, (VersionSpan(3, 0, num_rows),), 0)


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    result = function()
    return result, time.process_time() - start


def held(function: Callable[[], Any]) -> tuple[Any, int]:
    """Return the function's result, and how many bytes of tensors on the CPU are in it."""
    result = function()
    return result, sum(
        t.numel() * t.element_size()
        for group in result
        for s in group.samples
        for t in (s.token_ids, s.loss_mask, s.rollout_logprobs)
        if not t.is_meta
    )


def share_groups(case: Case, shape: ModelShape) -> tuple[dict[str, Any], list[SampleGroup]]:
    """Share everybody's groups with one rank, now and as before; return figures and all groups."""
    num_engines, world = case.dims.world // case.work.engine_tp, case.dims.world
    own = make_groups(case, shape, 0)
    blob, encode_s = timed(lambda: encode_groups(own, with_routes=False, with_tokens=False))
    whole, whole_encode_s = timed(lambda: encode_groups(own, with_routes=False))
    parts = [blob]
    for engine in range(1, num_engines):
        other = make_groups(case, shape, engine)
        parts.append(encode_groups(other, with_routes=False, with_tokens=False))
    start = time.process_time()
    everything, num_held = held(lambda: [g for part in parts[1:] for g in decode_groups(part)])
    decode_s = time.process_time() - start
    (_, one_held), whole_decode_s = timed(lambda: held(lambda: decode_groups(whole)))
    received = sum(map(len, parts))
    return {
        "now": {
            "leader_sends": len(blob),
            "rank_receives": received,
            "buffers": received,
            "held_of_others": num_held,
            "encode_s": encode_s,
            "decode_s": decode_s,
        },
        "before": {
            "leader_sends": len(whole),
            "rank_receives": len(whole) * num_engines,
            "buffers": len(whole) * world,  # all_gather_object pads to the largest
            "held_of_others": one_held * (num_engines - 1),
            "encode_s": whole_encode_s,
            "decode_s": whole_decode_s * (num_engines - 1),
        },
    }, sorted([*own, *everything], key=lambda group: group.samples[0].group_id)


def move(case: Case, shape: ModelShape, groups: list[SampleGroup]) -> dict[str, Any]:
    """Plan who trains what and the transfers of a leader and of a reader; return seconds and bytes."""
    dims, num_engines = case.dims, case.dims.world // case.work.engine_tp
    samples = [sample for group in groups for sample in group.samples]
    lengths = [len(sample.token_ids) for sample in samples]
    shares, batch_s = timed(
        lambda: assign_micro_batches(lengths, dims.dp, case.work.micro_batch_tokens)
    )
    of_dp = [tuple(sorted(i for micro in share for i in micro)) for share in shares]
    by_stage = [tuple(n + 1 for n in layers) for layers in moe_layers_by_stage(shape, dims)]
    nodes = [rank // NODE * NODE for rank in range(dims.world)]
    leaders = [n * case.work.engine_tp for n in range(num_engines)]
    at = {rank: [] for rank in range(dims.world)}
    for i, sample in enumerate(samples):
        at[leaders[sample.group_id % num_engines]].append(i)
    held_by = [at[rank] for rank in range(dims.world)]

    def needed(layers: Callable[[int], tuple[int, ...]]) -> dict[int, Selection]:
        dp = [rank // (dims.tp * dims.cp) % dims.dp for rank in range(dims.world)]
        return {rank: Selection(of_dp[dp[rank]], layers(rank)) for rank in range(dims.world)}

    stage = dims.world // dims.pp
    kinds = {
        "tokens": (TokenPayload(samples), needed(lambda rank: (TOKENS,))),
        "routes": (
            RoutePayload({i: s.routing for i, s in enumerate(samples) if s.routing is not None}),
            needed(lambda rank: by_stage[rank // stage]),
        ),
    }
    found: dict[str, Any] = {"batch_plan_s": batch_s}
    reader = dims.world - 1 - case.work.engine_tp // 2  # leads nothing
    for kind, (payload, by_rank) in kinds.items():
        leader, plan_s = timed(lambda n=by_rank: compute_transfers(0, n, held_by, nodes))
        read, reader_s = timed(lambda n=by_rank: compute_transfers(reader, n, held_by, nodes))
        arriving = num_bytes(read.arriving, payload)
        found[kind] = {
            "plan_s": max(plan_s, reader_s),
            "leader_sends": num_bytes(leader.leaving, payload),
            "rank_receives": arriving + num_bytes(read.reading, payload),
            "of_that_in_messages": arriving,
        }
    return found


def num_bytes(transfers: list[Transfer], payload: Payload) -> int:
    return sum(
        payload.num_bytes(i, t.selection.layers) for t in transfers for i in t.selection.samples
    )


def route_seconds(case: Case, shape: ModelShape) -> dict[str, float]:
    """Return the seconds of a leader's packing and a reader's unpacking, from SLICE samples."""
    layers = max(moe_layers_by_stage(shape, case.dims), key=len)
    traces = {i: make_trace(shape, case.work.sequence_len - 1) for i in range(SLICE)}
    payload, selection = (
        RoutePayload(traces),
        Selection(tuple(range(SLICE)), tuple(n + 1 for n in layers)),
    )
    wire, pack_s = timed(lambda: payload.pack(selection).flatten())
    _, unpack_s = timed(lambda: payload.unpack(selection, wire))
    num_own = case.work.num_sequences / (case.dims.world // case.work.engine_tp)
    share = len(shape.moe_layers) / len(layers)
    return {
        "pack_s": pack_s * num_own / SLICE * share,
        "unpack_s": unpack_s * case.work.num_sequences / case.dims.dp / SLICE,
    }


def texts(case: Case, groups: list[SampleGroup], folder: Path) -> dict[str, Any]:
    """Measure a leader's decoding and lines, and rank 0's writing of all lines."""
    num_engines, tokenizer = case.dims.world // case.work.engine_tp, build_tokenizer(128)
    own = [group for group in groups if group.samples[0].is_held]
    decoded, decode_s = timed(lambda: completions(own, tokenizer))
    lines, lines_s = timed(
        lambda: [rollout_lines(3, g, t) for g, t in zip(own, decoded, strict=True)]
    )
    run = RunFolder(folder)
    run.rollouts.mkdir()
    _, write_s = timed(lambda: run.write_rollouts(3, lines * num_engines))
    return {
        "now": {
            "leader_s": decode_s + lines_s,
            "rank_0_s": decode_s + lines_s + write_s,
            "rank_0_receives": sum(map(len, lines)) * (num_engines - 1),
        },
        "before": {"leader_s": 0.0, "rank_0_s": (decode_s + lines_s) * num_engines + write_s},
    }


def measure(name: str, scratch: Path) -> dict[str, Any]:
    """Return the row of one case."""
    case, folder = CASES[name], scratch / name.replace(" ", "_")
    folder.mkdir()
    shape = read_model(case.model)
    shared, groups = share_groups(case, shape)
    moved = move(case, shape, groups)
    moved["routes"] |= route_seconds(case, shape)
    planned = {row.name.split()[0]: row for row in rollout_bytes(shape, case.dims, case.work)}
    pairs = {
        "outlines": (shared["now"]["rank_receives"], planned["outlines"].rank),
        "tokens of a rank": (moved["tokens"]["rank_receives"], planned["tokens"].rank),
        "tokens of a leader": (moved["tokens"]["leader_sends"], planned["tokens"].leader),
        "routes of a leader": (moved["routes"]["leader_sends"], planned["routes"].leader),
    }
    ratios = {what: round(real / formula, 3) for what, (real, formula) in pairs.items()}
    less = shared["now"]["held_of_others"] <= 0.1 * shared["before"]["held_of_others"]
    row = {
        "case": name,
        "layout": case.dims.describe(),
        "samples": case.work.num_sequences,
        "tokens": case.work.num_tokens,
        "groups": shared,
        "moved": moved,
        "texts": texts(case, groups, folder),
        "checkpoint": lay_out_checkpoint(shape, case.dims.world, folder),
        "real_over_planned": ratios,
        "passed": less and all(abs(ratio - 1) <= 0.1 for ratio in ratios.values()),
    }
    return rounded(row)


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    """Measure the cases that the command line names."""
    run_cases("world_step", __doc__, CASES, measure, lambda row: row["passed"])


if __name__ == "__main__":
    main()
