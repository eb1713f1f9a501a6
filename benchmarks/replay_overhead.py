"""This module measures what routing replay costs a step:
`python -m benchmarks.replay_overhead [MODEL ...]`.

The real loop (launch/recipes/toy_moe.yaml: Megatron-core and SGLang on a CPU) with `moe.routing_replay`
r3 against off, both in one process, taking steps by turns (r3 off, off r3, ...), so that what else the
machine does meets both. Two comparisons a model:

live    each with an engine of its own, with and without the capture of routes: the whole step
saved   the same rollouts from files (`debug.load_rollouts`): what replay costs the trainer alone

Figures are medians over steps: wall-clock seconds, and CPU seconds of the trainer and of its engine's
processes, which other programs on the machine disturb less. The goal is that the live step with
replay takes at most 1.03 of the CPU seconds of the step without, by the ratio of the medians. The
larger model takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.evidence.result import finish, summary, write_result
from mrl.config import load_recipe
from mrl.preflight import check
from mrl.run.folder import RunFolder, saved_step
from mrl.run.rollouts import save_groups
from mrl.toy_model import write_toy_model
from parallel import prepare
from parallel.mesh import Mesh, destroy_mesh, init_mesh

RECIPE = Path(__file__).parents[1] / "launch" / "recipes" / "toy_moe.yaml"
LARGER = {
    "num_layers": 8, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"toy": {}, "larger": LARGER}
ARMS = ("r3", "off")
GOAL = 1.03
NUM_SAVED = 4
"""Steps whose rollouts are saved."""


def make_trainer(model: Path, folder: Path, mesh: Mesh | None, *more: str) -> Any:
    from mrl.trainer import Trainer

    recipe = load_recipe(
        RECIPE,
        [f"model.path={model}", f"output_dir={folder}", f"train.num_steps={NUM_SAVED}", *more],
    )
    plan = check(recipe, 1)
    run = RunFolder(recipe.output_dir)
    run.open(recipe)
    return Trainer(plan, mesh or init_mesh(plan.dims, recipe.seed), run)


def compare(
    trainers: dict[str, Any],
    num_steps: int,
    num_files: int | None,
    engines: dict[str, list[psutil.Process]],
) -> dict[str, Any]:
    """Take steps by turns; the first of each is not counted."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
    for i in range(num_steps + 1):
        for name in sorted(trainers, reverse=bool(i % 2)):
            if num_files:
                trainers[name].step = i % num_files
            before = cpu_seconds(engines.get(name, []))
            metrics = trainers[name].run_step()
            after = cpu_seconds(engines.get(name, []))
            cpu = {f"cpu/{part}_s": after[part] - before[part] for part in after}
            rows[name].append({**metrics, **cpu, "cpu/step_s": math.fsum(cpu.values())})
    rows = {name: steps[1:] for name, steps in rows.items()}
    keys = [k for k in rows["r3"][0] if k.startswith(("time/", "cpu/"))]
    seconds = {
        name: {k: statistics.median(r[k] for r in steps) for k in keys}
        for name, steps in rows.items()
    }
    ratios = {
        kind: [a[kind] / b[kind] for a, b in zip(rows["r3"], rows["off"], strict=True)]
        for kind in ("time/step_s", "cpu/step_s")
    }
    return {
        "pairs": num_steps,
        "tokens": int(rows["r3"][0]["tokens/train"]),
        "seconds": {n: {k: round(v, 4) for k, v in s.items()} for n, s in seconds.items()},
        "ratio_of_medians": {k: round(seconds["r3"][k] / seconds["off"][k], 4) for k in ratios},
        "quartiles_of_pairs": {
            k: [round(q, 3) for q in statistics.quantiles(v, n=4)] for k, v in ratios.items()
        },
    }


def cpu_seconds(engine: list[psutil.Process]) -> dict[str, float]:
    """Return the CPU seconds used so far by this process and by the processes of its engine."""
    times = [process.cpu_times() for process in engine]
    return {
        "trainer": time.process_time(),
        "engine": math.fsum(t.user + t.system for t in times),
    }


def measure(name: str, scratch: Path, num_steps: int) -> dict[str, Any]:
    """Make both comparisons of a model in this process; the engines are its children."""
    model = scratch / name
    write_toy_model(model, **MODELS[name])
    mesh: Mesh | None = None
    live: dict[str, Any] = {}
    engines: dict[str, list[psutil.Process]] = {}
    try:
        for arm in ARMS:
            folder = scratch / f"{name}_live_{arm}"
            live[arm] = make_trainer(model, folder, mesh, f"moe.routing_replay={arm}")
            mesh = live[arm].mesh
            known = {process.pid for process in psutil.Process().children(recursive=True)}
            live[arm].collector.start(live[arm].policy)
            everyone = psutil.Process().children(recursive=True)
            engines[arm] = [process for process in everyone if process.pid not in known]
        result = {"model": name, "live": compare(live, num_steps, None, engines)}
        rollouts = save_rollouts(live["r3"])
    finally:
        for trainer in live.values():
            trainer.collector.close()
    saved = {}
    for arm in ARMS:
        keys = (f"debug.load_rollouts={rollouts}", f"moe.routing_replay={arm}")
        saved[arm] = make_trainer(model, scratch / f"{name}_saved_{arm}", mesh, *keys)
    return {**result, "saved": compare(saved, 2 * num_steps, NUM_SAVED, {})}


def save_rollouts(trainer: Any) -> Path:
    """Save a few more rollouts of a live trainer, as `debug.save_rollouts` writes them."""
    from tests.loop.stepped import collected

    for i in range(NUM_SAVED):
        groups = collected(trainer)
        save_groups(saved_step(trainer.folder.rollouts, i), groups)
    trainer.policy.onload()
    return trainer.folder.rollouts


def main() -> None:
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--steps", type=int, default=15, help="pairs of live steps")
    args = parser.parse_args()
    if unknown := sorted(set(args.models) - set(MODELS)):
        parser.error(f"got {', '.join(unknown)}; expected some of {', '.join(MODELS)}")
    torch.set_num_threads(1)
    prepare()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.models or list(MODELS):
            row = measure(name, Path(scratch), args.steps)
            destroy_mesh()
            print(json.dumps(row), flush=True)
            rows.append(row)
    missed = sum(row["live"]["ratio_of_medians"]["cpu/step_s"] > GOAL for row in rows)
    passed = len(rows) - missed
    write_result(
        "replay_overhead", {"goal": GOAL, "rows": rows}, passed=passed, failed=0, missed=missed,
        packages=("torch", "megatron-core", "sglang"),
    )  # fmt: skip
    finish(passed, 0, missed)


if __name__ == "__main__":
    main()
