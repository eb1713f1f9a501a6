"""Estimate the seconds that trainer and engines take for a step on GPUs.

The numbers come from `mrl.planner.cost`. None of them has been measured on GPUs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mrl.planner.cost import StepCost, step_cost, token_seconds
from mrl.planner.hardware import EFFICIENCY, Hardware
from mrl.planner.placement import StepTimes
from mrl.planner.rows import ASSUMPTION
from mrl.planner.shape import ModelShape
from mrl.planner.workload import Workload
from parallel.dims import ParallelDims

COST = "mrl.planner.cost"
LOAD = "engine: load weights"
SYNC = "weight sync"
OFFLOAD = "offload and onload"
"""Names of parts of a step in the dict `StepCost.seconds`. LOAD and OFFLOAD are keys of this dict.
SYNC is the prefix of several keys, one for each part of a weight sync."""


@dataclass(frozen=True)
class Part:
    """The time of one part of a step, attributed to one role."""

    role: str
    """Who or what needs the time: `trainer`, `rollout` (the engines), `sync` (the trainer's part of
    a weight sync) or `load` (the engine's part of a weight sync)."""
    name: str
    seconds: float
    formula: str
    source: str
    """Where the seconds come from: a function of this project, or `assumption` with its reason."""


@dataclass(frozen=True)
class Expected:
    """The estimated times of a step in one placement."""

    times: StepTimes
    spread: float
    """The time to generate a step's batch, divided by the time that engines would need if they were
    always full. The quotient is at least 1."""
    parts: tuple[Part, ...]


def expected_times(
    shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware, mean_response_len: int
) -> Expected:
    """Estimate the times of a step whose responses have `mean_response_len` tokens on average.

    The longest response has `work.response_len` tokens. `dims` is the layout of the ranks that
    train; in a colocated run the same ranks also generate.
    """
    mean = dataclasses.replace(work, response_len=mean_response_len)
    cost = step_cost(shape, dims, mean, gpu)
    parts = _parts(cost, mean, dims, gpu)
    tail = (work.response_len - mean_response_len) * token_seconds(
        shape, mean, gpu, cost.decode_batch
    )
    parts.append(
        Part("rollout", "the longest response", tail,
             f"{work.response_len} - {mean_response_len} tokens at the same pace",
             f"{ASSUMPTION}: an engine with fewer requests decodes no faster")
    )  # fmt: skip
    sums = {role: sum(p.seconds for p in parts if p.role == role) for role in
            ("trainer", "rollout", "sync", "load")}  # fmt: skip
    full = sums["rollout"] - tail
    times = StepTimes(sums["rollout"], sums["trainer"], sums["sync"], sums["load"])
    return Expected(times, sums["rollout"] / full if full else 1.0, tuple(parts))


def _parts(cost: StepCost, work: Workload, dims: ParallelDims, gpu: Hardware) -> list[Part]:
    flops = f"{gpu.flops / 1e12:.0f} TFLOP/s x {EFFICIENCY.flops:g}"
    hbm = f"{gpu.hbm / 1e9:.0f} GB/s x {EFFICIENCY.hbm:g}"
    ranks, engines = work.num_engine_ranks(dims), work.num_engines(dims)
    texts = {
        "prefill": (f"FLOPs of {work.prompts} x {work.prompt_len} tokens / ({ranks} x {flops})",
                    f"{COST}.rollout_seconds"),
        "decode": (f"{work.response_len} tokens x bytes of the weights and KV cache read for "
                   f"{cost.decode_batch} sequences / ({hbm}), until "
                   f"{-(-work.num_sequences // engines)} sequences per engine are done",
                   f"{COST}.token_seconds"),
        "train compute": (f"FLOPs of {3 + work.recompute} passes over {work.num_tokens} tokens"
                          f"{', less the gradients of frozen weights,' * bool(work.lora)} / "
                          f"({dims.world} x {flops})", f"{COST}.step_cost"),
        LOAD: (f"bytes of the weights / ({gpu.host / 1e9:.0f} GB/s x {EFFICIENCY.host:g}), and "
               f"{EFFICIENCY.bucket_s:g} s per bucket and {1e3 * EFFICIENCY.tensor_s:g} ms per tensor",
               f"{COST}.sync_seconds"),
    }  # fmt: skip
    found = []
    for name, seconds in cost.seconds.items():
        formula, source = texts.get(name, (_formula(name, gpu), _source(name)))
        source += f"; {ASSUMPTION}: the shares of the data sheet's speeds, and no latencies"
        found.append(Part(_role(name), name, seconds, formula, source))
    return found


def _role(name: str) -> str:
    if name in ("prefill", "decode"):
        return "rollout"
    if name == LOAD:
        return "load"
    return "sync" if name.startswith(SYNC) or name == OFFLOAD else "trainer"


def _formula(name: str, gpu: Hardware) -> str:
    host = f"({gpu.host / 1e9:.0f} GB/s x {EFFICIENCY.host:g})"
    if name.startswith(SYNC) and name.endswith("base"):
        return f"bytes of the engine's weights / {host}"
    if name.startswith(SYNC) or name.endswith("communication"):
        links = f"NVLink {gpu.nvlink / 1e9:.0f} or network {gpu.network / 1e9:.0f} GB/s"
        sent = f"bytes sent / ({links}, x {EFFICIENCY.links:g})"
        sent += f", and bytes of the weights / {host}" if "workers" in name else ""
        return f"{EFFICIENCY.bucket_s:g} s per bucket" if "bucket" in name else sent
    if name == OFFLOAD:
        return f"bytes / {host}"
    if name == "update":
        hbm = f"({gpu.hbm / 1e9:.0f} GB/s x {EFFICIENCY.hbm:g})"
        return f"bytes of optimizer, gradients, weights / {hbm}"
    if name == "train bubble":
        return "(pp - 1) / (vpp m) of the compute"
    return "one forward pass, with its communication"


def _source(name: str) -> str:
    if name.startswith(SYNC) or name == OFFLOAD:
        return f"{COST}.sync_seconds"
    return f"{COST}.update_seconds" if name == "update" else f"{COST}.step_cost"
