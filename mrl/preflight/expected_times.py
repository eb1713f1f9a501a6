"""This module estimates the seconds of either role of a disaggregated run on GPUs.

They come from `parallel.scaling.cost`; nothing of it has been measured on GPUs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mrl.preflight.placement import StepTimes
from parallel.dims import ParallelDims
from parallel.scaling.cost import Efficiency, Hardware, StepCost, step_cost, token_seconds
from parallel.scaling.rows import ASSUMPTION
from parallel.scaling.shape import ModelShape
from parallel.scaling.workload import Workload

COST = "parallel.scaling.cost"
LOAD = "engine: load weights"
SYNC = "weight sync"
OFFLOAD = "offload and onload"
"""Keys of `StepCost.seconds`, or what they begin with."""


@dataclass(frozen=True)
class Part:
    """A part is what one role does in a step, with its seconds."""

    role: str
    name: str
    seconds: float
    formula: str
    source: str
    """A function of this project, or `assumption` with its reason."""


@dataclass(frozen=True)
class Expected:
    """What a step takes in one placement, each part alone on the devices that it has there."""

    times: StepTimes
    spread: float
    """The seconds of a step's batch over those in engines that are always full."""
    parts: tuple[Part, ...]


def expected_times(
    shape: ModelShape, dims: ParallelDims, work: Workload, gpu: Hardware, mean_response_len: int
) -> Expected:
    """Estimate a step of responses that are `mean_response_len` tokens long on average, the longest
    `work.response_len`. `dims` are the ranks that train; colocated, those that generate, too."""
    share = Efficiency()
    mean = dataclasses.replace(work, response_len=mean_response_len)
    cost = step_cost(shape, dims, mean, gpu, share)
    parts = _parts(cost, mean, dims, gpu, share)
    tail = (work.response_len - mean_response_len) * token_seconds(
        shape, mean, gpu, share, cost.decode_batch
    )
    parts.append(
        Part("rollout", "the longest response", tail,
             f"{work.response_len} - {mean_response_len} tokens at the same pace",
             f"{ASSUMPTION}: an engine that empties decodes no faster")
    )  # fmt: skip
    sums = {role: sum(p.seconds for p in parts if p.role == role) for role in
            ("trainer", "rollout", "sync", "load")}  # fmt: skip
    full = sums["rollout"] - tail
    times = StepTimes(sums["rollout"], sums["trainer"], sums["sync"], sums["load"])
    return Expected(times, sums["rollout"] / full if full else 1.0, tuple(parts))


def _parts(
    cost: StepCost, work: Workload, dims: ParallelDims, gpu: Hardware, share: Efficiency
) -> list[Part]:
    flops = f"{gpu.flops / 1e12:.0f} TFLOP/s x {share.flops:g}"
    ranks, engines = work.num_engine_ranks(dims), work.num_engines(dims)
    texts = {
        "prefill": (f"FLOPs of {work.prompts} x {work.prompt_len} tokens / ({ranks} x {flops})",
                    f"{COST}.rollout_seconds"),
        "decode": (f"{work.response_len} tokens x bytes of the weights and KV cache read for "
                   f"{cost.decode_batch} sequences / ({gpu.hbm / 1e9:.0f} GB/s x {share.hbm:g}), until "
                   f"{-(-work.num_sequences // engines)} sequences an engine are done",
                   f"{COST}.token_seconds"),
        "train compute": (f"FLOPs of {3 + work.recompute} passes over {work.num_tokens} tokens"
                          f"{', less the gradients of frozen weights,' * bool(work.lora)} / "
                          f"({dims.world} x {flops})", f"{COST}.step_cost"),
        LOAD: (f"bytes of the weights / ({gpu.host / 1e9:.0f} GB/s x {share.host:g}), and "
               f"{share.bucket_s:g} s a bucket and {1e3 * share.tensor_s:g} ms a tensor",
               f"{COST}.sync_seconds"),
    }  # fmt: skip
    found = []
    for name, seconds in cost.seconds.items():
        formula, source = texts.get(name, (_formula(name, gpu, share), _source(name)))
        source += f"; {ASSUMPTION}: the shares of the data sheet, and no latencies"
        found.append(Part(_role(name), name, seconds, formula, source))
    return found


def _role(name: str) -> str:
    if name in ("prefill", "decode"):
        return "rollout"
    if name == LOAD:
        return "load"
    return "sync" if name.startswith(SYNC) or name == OFFLOAD else "trainer"


def _formula(name: str, gpu: Hardware, share: Efficiency) -> str:
    host = f"({gpu.host / 1e9:.0f} GB/s x {share.host:g})"
    if name.startswith(SYNC) and name.endswith("base"):
        return f"bytes of the engine's weights / {host}"
    if name.startswith(SYNC) or name.endswith("communication"):
        links = f"NVLink {gpu.nvlink / 1e9:.0f} or network {gpu.network / 1e9:.0f} GB/s"
        sent = f"bytes sent / ({links}, x {share.links:g})"
        sent += f", and bytes of the weights / {host}" if "workers" in name else ""
        return f"{share.bucket_s:g} s a bucket" if "bucket" in name else sent
    if name == OFFLOAD:
        return f"bytes / {host}"
    if name == "update":
        return (
            f"bytes of optimizer, gradients, weights / ({gpu.hbm / 1e9:.0f} GB/s x {share.hbm:g})"
        )
    if name == "train bubble":
        return "(pp - 1) / (vpp m) of the compute"
    return "one forward pass, with its communication"


def _source(name: str) -> str:
    if name.startswith(SYNC) or name == OFFLOAD:
        return f"{COST}.sync_seconds"
    return f"{COST}.update_seconds" if name == "update" else f"{COST}.step_cost"
