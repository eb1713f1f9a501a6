"""This module holds the parts of run.py that drive an engine."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.gpu_lane.children import run_child
from benchmarks.gpu_lane.parts import RECIPE, gpu_args, model_folder, note, train_overrides
from mrl.config import ModelConfig, RolloutConfig
from mrl.engines.base import CUDA_GRAPH, KV_CACHE, WEIGHTS, EngineConfig, Request, SamplingParams
from mrl.engines.sglang.engine import Engine
from mrl.system.memory_watch import ProcessTree, leak_slope
from mrl.types import WeightBucket

NUM_CYCLES = {"cuda": 50, "cpu": 10}
BUCKET_BYTES = 256 << 20
START_SHARE = 0.8
"""The share of a part's time in which its engine must have started: the error of an engine that does
not start has to be on file before the part is killed."""
MEASURED = ("memory/", "time/", "mismatch/", "decompose/", "routing/", "tokens/", "grad_norm",
            "rollout/canary", "throughput/")  # fmt: skip
"""How the names of the metrics begin that `train` keeps."""
LEAK_BOUND_BYTES = 1 << 20
"""A cycle; more fails the part."""
AWAKE_SHARE = 0.5
"""Asleep, the engine must have given back at least this share of what waking took."""


class Bench:
    """One engine on one device, and the weights of its checkpoint, as a trainer has them there."""

    def __init__(
        self,
        part: str,
        folder: Path,
        device: str,
        *,
        routes: bool,
        keep: bool = False,
        quantization: Literal["none", "fp8_block"] = "none",
    ) -> None:
        """Nothing is started yet, and nothing is on the device."""
        self.model = model = model_folder(folder, device)
        self.device = torch.device(device)
        on_gpu, fp8 = device == "cuda", quantization != "none"
        self.config = EngineConfig(
            model=ModelConfig(path=str(model)),
            rollout=RolloutConfig(
                max_response_len=128,
                # Routes are kept in pinned memory, by KV slot.
                max_total_tokens=262_144 if on_gpu else None,
                mem_fraction_static=0.3,
                server_args=gpu_args(fp8=fp8) if on_gpu else {},
                start_timeout_s=START_SHARE * limit_of(part, folder),
                quantization=quantization,
            ),
            log_path=folder / f"engine_{'routes' if routes else 'plain'}.log",
            return_routes=routes,
            gpu_ids=("0",) if on_gpu else (),
            keep_weights_on_host=keep,
        )
        self.engine = Engine(self.config)
        self.weights: list[tuple[str, Tensor]] = []
        self.version = 0

    def __enter__(self) -> Bench:
        self.engine.start()
        try:
            self.load_weights()
        except BaseException:
            self.engine.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()

    def load_weights(self) -> None:
        """Read the checkpoint's weights onto the device."""
        from safetensors.torch import load_file

        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        weights = sorted(load_file(self.model / "model.safetensors").items())
        self.weights = [(name, weight.to(self.device, dtype)) for name, weight in weights]

    def update(self) -> float:
        """Send all weights under the next version; seconds."""
        self.version += 1
        start = time.perf_counter()
        self.engine.endpoint.update_weights(buckets(self.weights, self.version), self.version)
        return time.perf_counter() - start

    def generate(self, num: int, new_tokens: int) -> float:
        """Return the tokens per second of `num` requests of one exact length."""
        sampling = SamplingParams(max_new_tokens=new_tokens, min_new_tokens=new_tokens)
        start = time.perf_counter()
        done = sum(
            len(completion.output_ids)
            for completion in self.engine.endpoint.generate(make_requests(num, sampling))
        )
        assert done == num * new_tokens, f"got {done} tokens, expected {num * new_tokens}"
        return done / (time.perf_counter() - start)

    def memory(self, tree: ProcessTree) -> float:
        """Return the bytes in use: of the whole device, or of the engine's processes on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            return float(total - free)
        return tree.rss(self.engine.connection.process.pid)


def limit_of(part: str, folder: Path) -> float:
    """Return the seconds that the running part may take, as the driver wrote them down."""
    return json.loads((folder / "state.json").read_text())[part]["limit_s"]


def buckets(weights: list[tuple[str, Tensor]], version: int) -> Iterator[WeightBucket]:
    part: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        if part and num_bytes + size > BUCKET_BYTES:
            yield WeightBucket(part, version)
            part, num_bytes = [], 0
        part.append((name, tensor))
        num_bytes += size
    yield WeightBucket(part, version, is_last=True)


def make_requests(num: int, sampling: SamplingParams) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 96, (num, 64), generator=generator)
    return [Request(f"r{i}", row.clone(), i, sampling) for i, row in enumerate(ids)]


def engine(folder: Path, device: str) -> dict[str, Any]:
    """Go through the life of a colocated engine up to its second rollout, with figures after each step.

    It sleeps as soon as `start` returns, as mrl.engine_pool.local does: SGLang's own warm-up request
    must not be running then.
    """
    took: dict[str, float] = {}
    held: dict[str, float] = {}
    tree = ProcessTree()
    bench = Bench("engine", folder, device, routes=True)

    def step(name: str, act: Callable[[], object]) -> None:
        begin = time.perf_counter()
        act()
        took[name] = round(time.perf_counter() - begin, 3)
        held[name] = bench.memory(tree)
        note(seconds=took, bytes_after=held)

    try:
        step("start", bench.engine.start)
        step("sleep", bench.engine.sleep)
        step("load", bench.load_weights)
        for cycle in ("first", "second"):
            step(f"{cycle} wake weights", lambda: bench.engine.wake((WEIGHTS,)))
            step(f"{cycle} update", bench.update)
            step(f"{cycle} wake cache", lambda: bench.engine.wake((KV_CACHE, CUDA_GRAPH)))
            step(f"{cycle} generate", lambda: bench.generate(8, 16))
            step(f"{cycle} sleep", bench.engine.sleep)
    finally:
        bench.engine.stop()
    freed = held["first generate"] - held["first sleep"]
    return {
        "says": f"start {took['start']:.1f} s, update {took['second update']:.2f} s, "
        f"sleep gave back {freed / 2**30:.2f} GiB",
    }


def engine_settings(folder: Path, device: str) -> dict[str, Any]:
    """An environment that torch_memory_saver refuses must not reach the engine's child process."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    start = time.perf_counter()
    with Bench("engine_settings", folder, device, routes=False) as bench:
        rate = bench.generate(4, 8)
    return {"says": f"started and generated, {time.perf_counter() - start:.1f} s", "rate": rate}


def sleep_wake(folder: Path, device: str) -> dict[str, Any]:
    """Memory at every phase of every cycle; fails on a leak, or where nothing is freed."""
    found: dict[str, Any] = {}
    for level in (2, 1):
        series: dict[str, list[float]] = {"awake": [], "asleep": [], "weights": []}
        tree = ProcessTree()
        with Bench("sleep_wake", folder, device, routes=True, keep=level == 1) as bench:
            num_cycles = NUM_CYCLES[device]
            start = time.perf_counter()
            for _ in range(num_cycles):
                bench.engine.wake((WEIGHTS,))
                series["weights"].append(bench.memory(tree))
                if level == 2:
                    bench.update()
                bench.engine.wake((KV_CACHE, CUDA_GRAPH))
                bench.generate(8, 4)
                series["awake"].append(bench.memory(tree))
                bench.engine.sleep(level)
                series["asleep"].append(bench.memory(tree))
            seconds = time.perf_counter() - start
        slopes = {phase: leak_slope(values[2:]) for phase, values in series.items()}
        medians = {phase: statistics.median(values) for phase, values in series.items()}
        found[f"level_{level}"] = {
            "num_cycles": num_cycles,
            "seconds_per_cycle": seconds / num_cycles,
            "median_bytes": medians,
            "first_asleep_bytes": series["asleep"][0],
            "last_asleep_bytes": series["asleep"][-1],
            "leak_bytes_per_cycle": slopes,
        }
        if device == "cuda":
            trained = sum(t.numel() * t.element_size() for _, t in bench.weights)
            freed = medians["awake"] - medians["asleep"]
            assert freed > AWAKE_SHARE * (medians["awake"] - trained), (
                f"asleep freed {freed:g} bytes"
            )
            assert max(slopes.values()) < LEAK_BOUND_BYTES, f"bytes leaked a cycle: {slopes}"
    levels = [found[f"level_{level}"] for level in (2, 1)]
    leaks = [max(level["leak_bytes_per_cycle"].values()) for level in levels]
    found["says"] = f"{leaks[0]:.0f} and {leaks[1]:.0f} bytes leaked a cycle, levels 2 and 1"
    return found


def sync(folder: Path, device: str) -> dict[str, Any]:
    """Updates and copies of the same bytes, turn about; the ratio is update over copy, in time."""
    with Bench("sync", folder, device, routes=False) as bench:
        num_bytes = sum(t.numel() * t.element_size() for _, t in bench.weights)
        targets = [torch.empty_like(tensor) for _, tensor in bench.weights]
        bench.update()
        updates, copies = [], []
        for _ in range(9):
            updates.append(bench.update())
            start = time.perf_counter()
            for target, (_, tensor) in zip(targets, bench.weights, strict=True):
                target.copy_(tensor)
            if device == "cuda":
                torch.cuda.synchronize()
            copies.append(time.perf_counter() - start)
        bench.generate(4, 4)
    seconds, copy = statistics.median(updates), statistics.median(copies)
    return {
        "model_bytes": num_bytes,
        "bucket_bytes": BUCKET_BYTES,
        "median_s": seconds,
        "bytes_per_s": num_bytes / seconds,
        "copy_bytes_per_s": num_bytes / copy,
        "time_over_copy": seconds / copy,
        "says": f"{num_bytes / seconds / 1e9:.2f} GB/s, {seconds / copy:.1f} times a copy's time",
    }


def routes(folder: Path, device: str) -> dict[str, Any]:
    """Two engines side by side, one asked at a time, turn about; the ratio is with over without."""
    num, new_tokens, rounds = (128, 128, 7) if device == "cuda" else (8, 16, 3)
    rates: dict[bool, list[float]] = {True: [], False: []}
    with (
        Bench("routes", folder, device, routes=True) as with_routes,
        Bench("routes", folder, device, routes=False) as without,
    ):
        for bench in (with_routes, without):
            bench.generate(num, new_tokens)  # kernels are compiled
        for _ in range(rounds):
            rates[True].append(with_routes.generate(num, new_tokens))
            rates[False].append(without.generate(num, new_tokens))
    pairs = zip(rates[True], rates[False], strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    return {
        "num_requests": num,
        "new_tokens": new_tokens,
        "tokens_per_s_with": statistics.median(rates[True]),
        "tokens_per_s_without": statistics.median(rates[False]),
        "ratio_with_over_without": ratio,
        "says": f"with routes {ratio:.3f} times the tokens per second",
    }


def train(folder: Path, device: str) -> dict[str, Any]:
    """Run the command itself for three steps; return each step's figures of memory and time."""
    metrics = folder / "run" / "metrics.jsonl"
    try:
        run_child(["-m", "mrl", "train", RECIPE, *train_overrides(folder, device)])
    finally:  # a run that fails at its end has measured its steps
        text = metrics.read_text() if metrics.exists() else ""
        lines = [json.loads(line) for line in text.splitlines()]
        steps = [{k: v for k, v in line.items() if k.startswith(MEASURED)} for line in lines]
        note(steps=steps)
    assert len(lines) == 3, f"got {len(lines)} steps, expected 3"
    seconds = " ".join(f"{step['time/step_s']:.1f}" for step in steps)
    return {"says": f"steps of {seconds} s, grad_norm {steps[-1]['grad_norm']:.3g}"}
