"""What routing replay costs a step: `python -m benchmarks.replay_overhead [MODEL ...] [--steps N]`.

The real loop (launch/recipes/toy_moe.yaml: Megatron-core and SGLang on a CPU) with `moe.routing_replay`
r3 against off, both in one process, taking steps by turns (r3 off, off r3, ...), so that what else the
machine does meets both. Two comparisons a model:

saved   the same rollouts from files (`debug.load_rollouts`): what replay costs the trainer alone
live    each with an engine of its own, with and without the capture of routes: the whole step

Figures are medians in seconds, and the median over pairs of r3 / off. Passes where the live step with
replay takes at most 1.03 of the step without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_bench.machine import describe
from mrl.config import load_recipe
from mrl.preflight import check
from mrl.run_folder import RunFolder
from mrl.toy_model import write_toy_model
from parallel import prepare
from parallel.groups import Groups, destroy_groups, init_groups

RESULT = Path(__file__).parent / "results" / "replay_overhead.json"
RECIPE = Path(__file__).parents[1] / "launch" / "recipes" / "toy_moe.yaml"
LARGER = {
    "num_layers": 8, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, int]] = {"toy": {}, "larger": LARGER}
ARMS = ("r3", "off")
LIMIT = 1.03
NUM_SAVED = 4
"""Steps whose rollouts are saved."""


def make_trainer(model: Path, folder: Path, groups: Groups | None, *more: str) -> Any:
    from mrl.trainer import Trainer

    recipe = load_recipe(
        RECIPE,
        [f"model.path={model}", f"output_dir={folder}", f"train.num_steps={NUM_SAVED}", *more],
    )
    plan = check(recipe, 1)
    run = RunFolder(recipe.output_dir)
    run.open(recipe)
    return Trainer(plan, groups or init_groups(plan.dims, recipe.seed), run)


def compare(trainers: dict[str, Any], num_steps: int, num_files: int | None) -> dict[str, Any]:
    """Steps by turns; the first of each is not counted."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
    for i in range(num_steps + 1):
        for name in sorted(trainers, reverse=bool(i % 2)):
            if num_files:
                trainers[name].step = i % num_files
            rows[name].append(trainers[name].run_step())
    rows = {name: steps[1:] for name, steps in rows.items()}
    keys = [k for k in rows["r3"][0] if k.startswith("time/")]
    seconds = {
        name: {k: round(statistics.median(r[k] for r in steps), 4) for k in keys}
        for name, steps in rows.items()
    }
    pairs = [a["time/step_s"] / b["time/step_s"] for a, b in zip(*rows.values(), strict=True)]
    return {
        "pairs": num_steps,
        "seconds": seconds,
        "step_ratio": round(statistics.median(pairs), 4),
        "quartiles": [round(q, 4) for q in statistics.quantiles(pairs, n=4)[::2]],
        "ratio_of_median_steps": round(
            seconds["r3"]["time/step_s"] / seconds["off"]["time/step_s"], 4
        ),
        "rows": int(rows["r3"][0]["tokens/train"]),
    }


def measure(name: str, scratch: Path, num_steps: int) -> dict[str, Any]:
    """Both comparisons of a model, in this process; the engines are children of it."""
    model = scratch / name
    write_toy_model(model, **MODELS[name])
    save = (f"{scratch / name}_saved", "debug.save_rollouts=true")
    recorder = make_trainer(model, Path(save[0]), None, save[1])
    groups = recorder.groups
    result: dict[str, Any] = {"model": name}
    live: dict[str, Any] = {}
    try:
        recorder.collector.start(recorder.policy)
        for _ in range(NUM_SAVED):
            recorder.run_step()
        recorder.collector.close()
        load = f"debug.load_rollouts={recorder.folder.rollouts}"
        saved = {
            arm: make_trainer(
                model, scratch / f"{name}_saved_{arm}", groups, load, f"moe.routing_replay={arm}"
            )
            for arm in ARMS
        }
        result["saved"] = compare(saved, 2 * num_steps, NUM_SAVED)
        del saved
        for arm in ARMS:
            live[arm] = make_trainer(
                model, scratch / f"{name}_live_{arm}", groups, f"moe.routing_replay={arm}"
            )
            live[arm].collector.start(live[arm].policy)
        result["live"] = compare(live, num_steps, None)
    finally:
        for trainer in (recorder, *live.values()):
            trainer.collector.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], default=list(MODELS))
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    prepare()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.models:
            row = measure(name, Path(scratch), args.steps)
            destroy_groups()
            print(json.dumps(row), flush=True)
            rows.append(row)
    failed = sum(row["live"]["step_ratio"] > LIMIT for row in rows)
    packages = ("torch", "megatron-core", "sglang")
    result = {**describe(torch.device("cpu"), packages), "limit": LIMIT, "rows": rows}
    if args.models == list(MODELS):
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(rows) - failed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
