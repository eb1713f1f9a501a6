"""This module measures deltas of the weights beside whole versions:
`python -m benchmarks.delta_sync`.

Part `ways`: a trainer rank takes Adam steps at the learning rate of real runs, and sends its weights
after each step to two worker processes on this machine, to one whole and to the other as deltas, in
turn and in one run. Models: the demo's, and SmolLM2-135M-Instruct (`make smollm` makes its folder).
Part `runs`: the demo in bfloat16 with an engine on a rank of its own, for 50 steps, with whole versions
and with deltas. Its checkpoints must have the same bits, and every sync compares the digests of trainer
and engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
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

from benchmarks.evidence.digest import ROOT
from benchmarks.evidence.result import finish, summary, write_result
from mrl.config import ModelConfig, OptimizerConfig
from mrl.engine_pool.remote.rendezvous import open_store
from mrl.run.folder import RunFolder
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

SMOLLM = ROOT / "runs" / "smollm" / "dense"
CPU = torch.device("cpu")
LR = 1e-6
DTYPES = ("bfloat16", "float32")
WAYS = {"full": 0, "delta": 10**6}
"""`max_deltas` of each way's sender."""
TIMEOUT_S = 300.0
RECIPE = "launch/recipes/toy_moe.yaml"
APART = ("rollout.placement=disaggregated", "rollout.num_ranks=1")
SMALL = (
    *("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "checkpoint.keep=1"),
    *("rollout.max_response_len=12", "rollout.min_response_len=0"),
)
RUN_LR = 1e-5
LIMIT_S = 1800


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


def run_demo(model: Path, output: Path, steps: int, *keys: str) -> list[dict[str, Any]]:
    """Train the demo in bfloat16 with an engine on a rank of its own; return its metrics."""
    launcher = (sys.executable, "-m", "mrl.launch", "--standalone", "--nproc-per-node=2")
    words = (f"model.path={model}", f"output_dir={output}", f"train.num_steps={steps}")
    dtype = ("model.dtype=bfloat16", f"optimizer.lr={RUN_LR}")
    command = [*launcher, "-m", "mrl", "train", RECIPE, *APART, *SMALL, *dtype, *words, *keys]
    with output.with_suffix(".log").open("w") as log:
        subprocess.run(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=True
        )
    return RunFolder(output).read_metrics()


def checkpoint_bits(output: Path, step: int) -> dict[str, bytes]:
    folder = output / "checkpoints" / f"iter_{step:07d}"
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.distcp"))}


def compare_runs(scratch: Path, steps: int) -> dict[str, Any]:
    """Train with whole versions and with deltas."""
    model = scratch / "model"
    write_toy_model(model)
    full, delta = scratch / "full", scratch / "delta"
    run_demo(model, full, steps)
    rows = run_demo(model, delta, steps, "rollout.weight_encoding=delta")
    bits = checkpoint_bits(delta, steps)
    deltas = [row for row in rows if not row["rollout/sync_full_workers"]]
    sent = [row["rollout/sync_sent_bytes"] for row in rows]
    whole = [row["rollout/sync_sent_bytes"] / row["rollout/sync_sent_share"] for row in rows]
    return {
        "lr": RUN_LR,
        "syncs": len(rows),
        "whole_versions": len(rows) - len(deltas),
        "resent_buckets": sum(row["rollout/sync_resent_buckets"] for row in rows),
        "sent_share": round(sum(sent) / sum(whole), 4),
        "sent_share_of_deltas": _median_of(deltas, "rollout/sync_sent_share"),
        "changed": _median_of(deltas, "rollout/sync_changed_share"),
        "same_bits_as_full": bool(bits) and bits == checkpoint_bits(full, steps),
    }


def _median_of(rows: list[dict[str, Any]], key: str) -> float:
    return round(statistics.median(row[key] for row in rows), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--part", choices=("ways", "runs"), help="only this, which is not written")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    if not SMOLLM.exists():
        parser.error(f"there is no {SMOLLM.relative_to(ROOT)}; make it with `make smollm` first")
    content: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if options.part != "runs":
            write_toy_model(scratch / "toy")
            content["ways"] = []
            for name, model in (("toy", scratch / "toy"), ("SmolLM2-135M", SMOLLM)):
                for dtype in DTYPES:
                    out = scratch / f"{name}_{dtype}"
                    row = run_ranks(1, measure, model, dtype, options.rounds, folder=out)[0]
                    content["ways"].append({"model": name} | row)
        if options.part != "ways":
            content["runs"] = [compare_runs(scratch, options.steps)]
    good = []
    for row in (row for rows in content.values() for row in rows):
        print(json.dumps(row), flush=True)
        good.append(row["resent_buckets"] == 0 and row.get("same_bits_as_full", True))
    if not options.part:
        write_result(
            "delta_sync", content, passed=sum(good), failed=len(good) - sum(good),
            packages=("torch", "megatron-core", "sglang"),
        )  # fmt: skip
    finish(sum(good), len(good) - sum(good))


if __name__ == "__main__":
    main()
