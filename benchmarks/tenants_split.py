"""Measures tenants of a service whose engine is on a rank of its own, one after another and at once.

A service of two ranks, one that trains and one with the engine, stays for all variants. Tenants come
and go over its control socket, as those of users do. Each variant is timed from its first update to its
last one: nothing of a start or of a joining is in a figure.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.tenants_load import (
    LOADS,
    ROOT,
    answers_of,
    digest_of,
    recipe_tree,
    service_tree,
)
from mrl.service.client import ControlClient
from mrl.system.files import write_whole

LOAD = "long_tail"
MODES: dict[str, dict[str, Any]] = {
    "split": {},
    "ahead": {
        "async": {"max_staleness": 1, "deterministic": True},
        "algorithm": {"name": "gspo", "importance": "tis"},
    },
}
"""What each mode adds to the recipes: engines wait for the newest weights, or run a step ahead."""
SPREAD = ("steps_per_core_hour", "ratio", "occupancy")
"""Figures of a row that are lists, one number for each repeat."""
LIMIT_S = 300.0
POLL_S = 0.1


def measure(model: Path, folder: Path, mode: str, repeats: int, num_steps: int) -> dict[str, Any]:
    """Run all variants of the long-tailed load `repeats` times, each time in another order."""
    load, found = LOADS[LOAD], []
    tree = service_tree(load, model, folder)
    tree["rollout"] |= {"placement": "disaggregated", "num_ranks": 1}
    config = folder.with_suffix(".yaml")
    write_whole(config, yaml.safe_dump(tree))
    with _serving(config, folder) as client:
        _run_group(client, folder, mode, "warm", ("ann",), 2)
        variants = list(load.variants)
        for repeat in range(repeats):
            turn = repeat % len(variants)
            for variant in variants[turn:] + variants[:turn]:
                label = f"{variant}-{repeat}"
                groups = [
                    _run_group(client, folder, mode, label, group, num_steps)
                    for group in load.variants[variant]
                ]
                found.append({"variant": variant, "repeat": repeat, **_joined(groups)})
                rate = 3600 * found[-1]["num_updates"] / found[-1]["wall_s"]
                print(f"{mode} {label}: {rate:.0f} steps an hour", flush=True)
    return {"runs": found}


@contextmanager
def _serving(config: Path, folder: Path) -> Iterator[ControlClient]:
    """Run a service of two ranks for the block."""
    command = [sys.executable, "-W", "ignore", "-m", "mrl.launch", "--standalone"]
    command += ["--nproc-per-node=2", "-m", "mrl", "serve", str(config)]
    with folder.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=os.environ)
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (folder / "control.sock").exists():
            _require(process, deadline, folder)
            time.sleep(POLL_S)
        yield ControlClient(folder)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _require(process: subprocess.Popen[bytes], deadline: float, folder: Path) -> None:
    if process.poll() is not None or time.monotonic() > deadline:
        log = folder.with_suffix(".log").read_text()[-3000:]
        raise RuntimeError(f"the service in {folder} ended or takes too long:\n{log}")


def _run_group(
    client: ControlClient,
    folder: Path,
    mode: str,
    label: str,
    group: Sequence[str],
    num_steps: int,
) -> dict[str, Any]:
    """Train some tenants at once; return what the service wrote of their updates."""
    file = folder / "metrics.jsonl"
    before = len(file.read_text().splitlines()) if file.exists() else 0
    names = {f"{name}-{label}-{mode}": name for name in group}
    for own, name in names.items():
        tree = recipe_tree(LOADS[LOAD], name, num_steps, folder / "runs" / own) | MODES[mode]
        client.add(own, tree)
    deadline = time.monotonic() + LIMIT_S
    while (states := {client.tenant(own)["state"] for own in names}) != {"done"}:
        if states & {"paused", "removed"} or time.monotonic() > deadline:
            reasons = [client.tenant(own)["reason"] for own in names]
            raise RuntimeError(f"{label}: the tenants are {states}: {reasons}")
        time.sleep(POLL_S)
    rows = [json.loads(line) for line in file.read_text().splitlines()[before:]]
    runs = {name: folder / "runs" / own for own, name in names.items()}
    return {
        "rows": rows,
        "tenants": {n: {"digest": digest_of(run), **answers_of(run)} for n, run in runs.items()},
    }


def _joined(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of groups that ran one after another, as those of one."""
    wall_s = busy_s = 0.0
    num_updates = 0
    tenants: dict[str, Any] = {}
    for group in groups:
        first, *rows = group["rows"]
        wall_s += rows[-1]["time/timestamp"] - first["time/timestamp"]
        busy_s += sum(r["time/round_s"] * r.get("service/engine_occupancy", 0.0) for r in rows)
        num_updates += len(rows)
        tenants |= group["tenants"]
    figures = {"wall_s": wall_s, "num_updates": num_updates, "occupancy": busy_s / wall_s}
    return {**figures, "tenants": tenants}


def rows_of_mode(
    mode: str, runs: Sequence[Mapping[str, Any]], num_cores: int
) -> list[dict[str, Any]]:
    """Return a row for each variant: rates, and ratios against one after another in the same repeat."""
    rates = {(run["variant"], run["repeat"]): run["num_updates"] / run["wall_s"] for run in runs}
    rows = []
    for variant in LOADS[LOAD].variants:
        own = [run for run in runs if run["variant"] == variant]
        rows.append(
            {
                "mode": mode,
                "variant": variant,
                "steps_per_core_hour": [
                    3600 / num_cores * rates[variant, run["repeat"]] for run in own
                ],
                "ratio": [
                    rates[variant, run["repeat"]] / rates["one", run["repeat"]] for run in own
                ],
                "occupancy": [run["occupancy"] for run in own],
            }
        )
    return rows


if __name__ == "__main__":
    model, folder, mode, repeats, num_steps = sys.argv[1:]
    place = Path(folder)
    result = measure(Path(model), place / mode, mode, int(repeats), int(num_steps))
    write_whole(place / f"{mode}.json", json.dumps(result))
