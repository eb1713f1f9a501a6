"""This module measures deltas of the weights beside whole versions:
`python -m benchmarks.delta_sync`.

Part `ways`: a trainer rank takes Adam steps at the learning rate of real runs, and sends its weights
after each step to two worker processes on this machine, to one whole and to the other as deltas, in
turn and in one run. Models: the demo's, and SmolLM2-135M-Instruct (`make smollm` makes its folder).
Part `runs` (`benchmarks.delta_runs`): both models train in bfloat16 for 50 steps with an engine on a
rank of its own, in bfloat16 and in fp8_block, with whole versions and with deltas. Runs that are done
are on file in --work, and the same command continues after an interruption. docs/rollout-weights.md
gets the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.delta_runs import FORMATS, MODELS, SMOLLM, compare, is_good, table
from benchmarks.evidence.digest import ROOT
from benchmarks.evidence.result import between_markers, finish, summary, write_result
from mrl.config import ModelConfig, OptimizerConfig
from mrl.engine_pool.remote.rendezvous import open_store
from mrl.toy_model import write_toy_model
from mrl.weight_sync.delta import LastVersion
from mrl.weight_sync.load import Canaries
from mrl.weight_sync.rank_pair import PairReceiver, PairSender
from mrl.weight_sync.staging import Staging
from parallel.hf_config import HfModel
from parallel.policy import Policy
from tests.parallel.conftest import make_samples
from tests.parallel.layouts import join_mesh, loss, ready_batch, replay_of
from tests.ranks import run_ranks, start_fork

CPU = torch.device("cpu")
LR = 1e-6
DTYPES = ("bfloat16", "float32")
WAYS = {"full": 0, "delta": 10**6}
"""`max_deltas` of each way's sender."""
TIMEOUT_S = 300.0
NUM_STEPS = 50
DOCUMENT = ROOT / "docs/rollout-weights.md"


def serve(pipe: Connection, name: str, num_versions: int) -> None:
    """Receive versions, and send the seconds that deltas took to apply and to prove; a process."""
    clock = Stopwatch()
    receiver, staging = PairReceiver(pipe.recv(), name, TIMEOUT_S, CPU), Staging()
    with clock.timing(Staging, "patch"):
        for version in range(num_versions):
            receiver.receive(staging, version)
            pipe.send(clock.take())


class Stopwatch:
    """Adds up the seconds of a method's calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def take(self) -> float:
        """Return the seconds since the last call."""
        taken, self.seconds = self.seconds, 0.0
        return taken

    @contextmanager
    def timing(self, owner: type, method: str) -> Iterator[None]:
        """Time `owner.method` during the block."""
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - start

        with patch.object(owner, method, timed):
            yield


def measure(model: Path, dtype: str, rounds: int) -> dict[str, Any]:
    """Return the row of a dtype; runs on the one rank of the trainer."""
    pipes, workers = {}, []
    for name in WAYS:  # fork before this process has threads
        pipes[name], there = Pipe()
        workers.append(start_fork(serve, there, name, rounds + 1))
    mesh = join_mesh(model, {})
    hf = HfModel.read(model)
    policy = Policy(
        hf,
        mesh,
        ModelConfig(path=str(model), dtype="float32"),
        OptimizerConfig(lr=LR),
        recompute=False,
        temperature=1.0,
    )
    samples = [dataclasses.replace(sample, routing=None) for sample in make_samples()]
    batch, _ = ready_batch(policy, mesh, samples)
    store, address = open_store("127.0.0.1")
    senders = {name: PairSender(address, TIMEOUT_S, CPU, most) for name, most in WAYS.items()}
    for pipe in pipes.values():
        pipe.send(address)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    encoding = Stopwatch()
    with encoding.timing(LastVersion, "replace"):
        for version in range(rounds + 1):
            for name in WAYS if version % 2 else reversed(WAYS):
                row = _send(policy, senders[name], name, dtype, version)
                found[name].append(
                    row | {"encode_s": encoding.take(), "apply_s": pipes[name].recv()}
                )
            policy.train_step(batch, loss, replay_of(samples))
    for worker in workers:
        worker.join()
    del store
    return _summary(dtype, *(found[name][1:] for name in WAYS))  # the first are whole


def _send(
    policy: Policy, sender: PairSender, name: str, dtype_name: str, version: int
) -> dict[str, float]:
    dtype = getattr(torch, dtype_name)
    buckets = policy.export(version, max(1 << 20, policy.export_bytes(dtype) // 4), dtype)
    start = time.perf_counter()
    failed = sender.send(buckets, version, [name], Canaries([], []))
    seconds = time.perf_counter() - start
    assert failed == []
    traffic = sender.traffic
    return {
        "send_s": seconds,
        "bytes": traffic.num_bytes,
        "resent": traffic.num_resent,
        "changed": traffic.num_changed / max(1, traffic.num_compared),
    }


def _copy_s(num_bytes: int) -> float:
    """Return the seconds of one copy of as many bytes between two buffers."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.empty_like(source).copy_(source)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _summary(
    dtype: str, full: list[dict[str, float]], delta: list[dict[str, float]]
) -> dict[str, Any]:
    def median(rows: list[dict[str, float]], key: str) -> float:
        return statistics.median(row[key] for row in rows)

    whole, sent = median(full, "bytes"), median(delta, "bytes")
    work_s = median(delta, "encode_s") + median(delta, "apply_s")
    return {
        "dtype": dtype,
        "mb": round(whole / 1e6, 2),
        "changed": round(median(delta, "changed"), 5),
        "sent_share": round(sent / whole, 5),
        "resent_buckets": sum(row["resent"] for row in delta),
        "full_s": round(median(full, "send_s"), 4),
        "full_s_of_rounds": sorted(round(row["send_s"], 4) for row in full),
        "delta_s": round(median(delta, "send_s"), 4),
        "delta_s_of_rounds": sorted(round(row["send_s"], 4) for row in delta),
        "copy_s": round(_copy_s(int(whole)), 4),
        "encode_s": round(median(delta, "encode_s"), 4),
        "apply_s": round(median(delta, "apply_s"), 4),
        # A slower link than this needs longer for the bytes that a delta saves than the delta takes.
        "break_even_mb_per_s": round((whole - sent) / work_s / 1e6) if sent < whole else 0,
    }


def measure_ways(rounds: int) -> list[dict[str, Any]]:
    """Return a row for each model and dtype."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        write_toy_model(scratch / "toy")
        for name, model in (("toy", scratch / "toy"), ("SmolLM2-135M", SMOLLM)):
            for dtype in DTYPES:
                out = scratch / f"{name}_{dtype}"
                row = run_ranks(1, measure, model, dtype, rounds, folder=out)[0]
                rows.append({"model": name} | row)
    return rows


def pages(name: str, result: dict[str, Any]) -> dict[Path, str]:
    """Return the page with the table of delta_sync.json."""
    return {DOCUMENT: between_markers(DOCUMENT.read_text(), "runs", table(result["runs"]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--part", choices=("ways", "runs"), help="only this, which is not written")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="steps of each run")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--work", type=Path, default=ROOT / "runs/delta_sync")
    parser.add_argument("--fresh", action="store_true", help="forget the runs that are on file")
    options = parser.parse_args()
    if not SMOLLM.exists():
        parser.error(f"there is no {SMOLLM.relative_to(ROOT)}; make it with `make smollm` first")
    work = options.work.absolute()
    if options.fresh:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    # Ends the runs, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    content: dict[str, list[dict[str, Any]]] = {}
    if options.part != "runs":
        content["ways"] = measure_ways(options.rounds)
    for row in content.get("ways", ()):
        print(json.dumps(row), flush=True)
    if options.part != "ways":
        content["runs"] = []
        for name in options.models:
            for quantization in options.formats:
                content["runs"].append(compare(name, quantization, options.steps, work))
                print(json.dumps(content["runs"][-1]), flush=True)
        print(f"\n{table(content['runs'])}\n")
    good = [row["resent_buckets"] == 0 for row in content.get("ways", ())]
    good += [is_good(row) for row in content.get("runs", ())]
    all_runs = (NUM_STEPS, list(MODELS), list(FORMATS))
    if not options.part and (options.steps, options.models, options.formats) == all_runs:
        write_result(
            "delta_sync", content, passed=sum(good), failed=len(good) - sum(good),
            packages=("torch", "megatron-core", "sglang"),
        )  # fmt: skip
    finish(sum(good), len(good) - sum(good))


if __name__ == "__main__":
    main()
