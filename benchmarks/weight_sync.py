"""This module measures a weight sync, and shows that faults are caught:
`python -m benchmarks.weight_sync`.

A real SGLang with a 200 MB float32 Qwen3-MoE of few and large experts, on a CPU. Every sync is a whole
one: Megatron's weights exported, pushed, loaded by the engine, digests of both sides compared. Its time
is given in units of one copy of the same bytes between two buffers, measured right before it; shares
are of the sync's own time. Then 100 updates of a toy model, each with one fault (weight_faults.py), and
a good one after each ten.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.evidence.result import finish, summary, write_result
from benchmarks.weight_faults import FAULTS, is_caught, moved, shared_buckets, updater_for
from mrl.config import ModelConfig, RolloutConfig
from mrl.engines import load_engine
from mrl.engines.base import EngineConfig
from mrl.engines.sglang.weights.base import WeightPush
from mrl.engines.sglang.weights.update import WeightUpdater
from mrl.system.shared_memory import SharedMemory
from mrl.toy_model import write_toy_model
from mrl.types import WeightBucket
from parallel.policy import Policy
from tests.parallel.layouts import build, join_mesh
from tests.ranks import run_ranks

LARGE: dict[str, Any] = {"hidden_size": 1024, "num_experts": 4, "moe_intermediate_size": 896,
         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip
ONE_AT_A_TIME = "tensor, one bucket at a time"
METHODS = {"tensor": "tensor", ONE_AT_A_TIME: "tensor", "disk": "disk"}
GOAL = 4.0
"""Copies that a sync by `tensor` may take."""


def start_engine(model: Path, timeout_s: float) -> Any:
    engine = load_engine("sglang")(
        EngineConfig(
            model=ModelConfig(path=str(model)),
            rollout=RolloutConfig(max_response_len=8, start_timeout_s=timeout_s),
            log_path=model.parent / "engine.log",
        )
    )
    engine.start()
    return engine


def measure(model: Path, rounds: int, timeout_s: float) -> list[dict[str, Any]]:
    """Return one row a way; runs on the one rank of the trainer. The ways take turns in every round."""
    policy = build(model, join_mesh(model, {}))
    engine = start_engine(model, timeout_s)
    try:
        num_bytes = policy.export_bytes()
        whole = torch.ones(num_bytes, dtype=torch.uint8)
        target = torch.empty_like(whole).copy_(whole)
        syncs = {way: updater_for(engine, model, METHODS[way]) for way in METHODS}
        syncs[ONE_AT_A_TIME]._push = OneAtATime(syncs[ONE_AT_A_TIME]._push)
        rows: dict[str, list[dict[str, float]]] = {way: [] for way in METHODS}
        for version in range(rounds + 1):
            for way, sync in syncs.items():
                copy_s = min(_seconds(lambda: target.copy_(whole)) for _ in range(3))
                rows[way].append(_one_sync(policy, engine, sync, version) | {"copy_s": copy_s})
        for sync in syncs.values():
            sync.close()
    finally:
        engine.stop()
    # The first round touches new memory.
    return [_summary(way, num_bytes, rows[way][1:]) for way in METHODS]


def _one_sync(policy: Policy, engine: Any, sync: WeightUpdater, version: int) -> dict[str, float]:
    start = time.perf_counter()
    source: list[float] = []
    bucket_bytes = engine.core.config.weight_bucket_bytes(policy.export_bytes())
    report = sync.update(_noting(policy.export(version, bucket_bytes), source), version)
    seconds = time.perf_counter() - start
    return {
        "sync_s": seconds,
        "push": report.push_s / seconds,
        "engine_digest": (report.digest_s - sum(source)) / seconds,
        "source_digest": sum(source) / seconds,
    }


def _summary(way: str, num_bytes: int, rows: list[dict[str, float]]) -> dict[str, Any]:
    rows = [row | {"copies": row["sync_s"] / row["copy_s"]} for row in rows]
    medians = {key: round(statistics.median(row[key] for row in rows), 3) for key in rows[0]}
    return {
        "method": way,
        "mb": round(num_bytes / 1e6, 1),
        **medians,
        "copies_of_rounds": sorted(round(row["copies"], 2) for row in rows),
    }


class OneAtATime:
    """The next bucket is built when the engine has answered for this one: what overlap saves."""

    needs_session = True

    def __init__(self, inner: WeightPush) -> None:
        self._inner = inner
        self.finish, self.settle, self.close = inner.finish, inner.settle, inner.close

    def push(self, bucket: WeightBucket) -> None:
        self._inner.push(bucket)
        self._inner.finish()


def _noting(buckets: Iterable[WeightBucket], seconds: list[float]) -> Iterator[WeightBucket]:
    """Yield the same buckets; what the exporter spent on their digests goes into `seconds`."""
    for bucket in buckets:
        seconds.append(bucket.digest_s)
        yield bucket


def _seconds(action: Any) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def try_faults(model: Path, tries: int, seed: int, timeout_s: float) -> dict[str, Any]:
    """Try faults, each of which must end in an error; every tenth is followed by a good update."""
    weights = sorted(load_file(model / "model.safetensors").items())
    engine = start_engine(model, timeout_s)
    sync = updater_for(engine, model)
    caught = dict.fromkeys(FAULTS, 0)
    num_good = 0
    try:
        for number in range(tries):
            kind = FAULTS[number % len(FAULTS)]
            caught[kind] += is_caught(sync, weights, number, kind, seed + number) is not None
            if number % 10 == 9:
                good = shared_buckets(moved(weights, tries + number), 0, SharedMemory())
                sync.update(good, 0)
                num_good += 1
    finally:
        engine.stop()
    return {"tries": tries, "seed": seed, "caught": caught, "good_updates": num_good}


def run_cost(options: argparse.Namespace, scratch: Path) -> tuple[dict[str, Any], bool]:
    """Return what goes into the results, and whether the goal is reached."""
    model = scratch / "large"
    write_toy_model(model, **LARGE)
    arguments = (model, options.rounds, options.start_timeout_s)
    rows = run_ranks(1, measure, *arguments, folder=scratch / "out")[0]
    for row in rows:
        print(json.dumps(row), flush=True)
    return {"rows": rows}, rows[0]["copies"] <= GOAL


def run_faults(options: argparse.Namespace, scratch: Path) -> tuple[dict[str, Any], bool]:
    """What goes into the results, and whether it is good."""
    model = scratch / "small"
    write_toy_model(model)
    faults = try_faults(model, options.tries, options.seed, options.start_timeout_s)
    print(json.dumps(faults), flush=True)
    return {"faults": faults}, sum(faults["caught"].values()) == faults["tries"]


PARTS = {"cost": run_cost, "faults": run_faults}


def main() -> None:
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument(
        "--part", choices=PARTS, help="only this, which is not written to the results"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start-timeout-s", type=float, default=300.0)
    options = parser.parse_args()
    content: dict[str, Any] = {}
    reached: dict[str, bool] = {}
    for name in [options.part] if options.part else PARTS:
        with tempfile.TemporaryDirectory() as scratch:
            found, reached[name] = PARTS[name](options, Path(scratch))
        content |= found
    passed = sum(reached.values())
    missed, failed = int(not reached.get("cost", True)), int(not reached.get("faults", True))
    if not options.part:  # only a whole run is written
        packages = ("torch", "megatron-core", "sglang")
        write_result(
            "weight_sync", content, passed=passed, failed=failed, missed=missed, packages=packages
        )
    finish(passed, failed, missed)


if __name__ == "__main__":
    main()
