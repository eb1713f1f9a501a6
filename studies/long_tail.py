"""This module measures what long-tail controls save and cost:
`python -m studies.long_tail [NUM_STEPS]`.

launch/recipes/long_tail.yaml, with half as many prompts a step, trained four times from one warm
start: waiting for all (`plain`), and with 1.5 times the prompts started, the rest dropped, resumed or
deferred. Real Megatron, and one real SGLang that the runs use in turn, one step each in an order that
rotates, so that a busy machine is busy for all. A step trains on as many samples in each of them.

For each run: the rollout time of a step (median) and of all (ratio to plain's); the tokens of an answer
that was trained on; the reward in training, mean of the last ten steps, which is of the prompts that
were trained on and so flatters what leaves out slow ones; and the reward of the final weights on the
same prompts for all, none left out, of those that ask for at most MEDIAN letters and those for more.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from benchmarks.evidence.result import finish, summary, write_result
from mrl.config import Recipe, load_recipe
from mrl.data.repeat import MEDIAN
from mrl.engine_pool.local import make_local_collector
from mrl.engines.base import RolloutEngine
from mrl.preflight import check
from mrl.run.folder import RunFolder
from mrl.toy_model import write_toy_model
from mrl.types import SampleGroup
from parallel import prepare
from parallel.mesh import Mesh, init_mesh
from tests.loop.stepped import SteppedRun, collected, exchange_engine, part_of, supply_of

ROOT = Path(__file__).parents[1]
COMMON = ["rollout.prompts_per_step=8", "checkpoint.save_every=0", "rollout.canary_prompts=0"]
MORE = "rollout.over_sampling=1.5"
RUNS = {
    "plain": [],
    "drop": [MORE],
    "resume": [MORE, "rollout.partial_rollouts=resume", "algorithm.importance=tis"],
    "defer": [MORE, "rollout.partial_rollouts=defer"],
}
NUM_STEPS = 30
"""The steps of a whole run; a shorter one is not written to the results."""
NUM_LAST = 10
EVALUATED = 48
"""Prompts, with one answer each."""


class Run(SteppedRun):
    """A run that can be examined."""

    def answers(self, mesh: Mesh) -> list[SampleGroup]:
        """Return answers of the present weights, to the same prompts for every run; none is left
        out.
        """
        recipe = self.plan.recipe
        whole = {"over_sampling": 1.0, "partial_rollouts": "drop"}
        rollout = recipe.rollout.model_copy(
            update={**whole, "prompts_per_step": EVALUATED, "samples_per_prompt": 1}
        )
        # One answer a prompt teaches nothing, so a plan that trains is refused.
        debug = recipe.debug.model_copy(update={"rollout_only": True})
        recipe = recipe.model_copy(
            update={"rollout": rollout, "debug": debug, "seed": recipe.seed + 1}
        )
        plan = check(recipe.model_copy(update={"output_dir": f"{recipe.output_dir}_eval"}), 1)
        collector = make_local_collector(plan, mesh, self.folder)
        engine = cast(RolloutEngine, part_of(self.collector).engine.server)
        unused = exchange_engine(collector, engine)
        mine, self.collector = self.collector, collector
        try:
            return collected(self)
        finally:
            self.collector = mine
            exchange_engine(collector, unused)
            collector.close()


def recipe_of(name: str, scratch: Path, num_steps: int) -> Recipe:
    places = [f"model.path={scratch / 'model'}", f"output_dir={scratch / name}"]
    steps = f"train.num_steps={num_steps}"
    return load_recipe(
        ROOT / "launch/recipes/long_tail.yaml", [*places, steps, *COMMON, *RUNS[name]]
    )


def start_runs(scratch: Path, num_steps: int) -> tuple[dict[str, Run], Mesh]:
    """Return all runs, which start at the same weights: the first one's checkpoint after SFT."""
    write_toy_model(scratch / "model", num_layers=2)
    prepare()
    runs: dict[str, Run] = {}
    mesh: Mesh | None = None
    engine: RolloutEngine | None = None
    for name in RUNS:
        recipe = recipe_of(name, scratch, num_steps)
        folder = RunFolder(recipe.output_dir)
        if runs:
            shutil.copytree(scratch / "plain/checkpoints", folder.checkpoints)
        plan = check(recipe, 1)
        folder.open(recipe)
        mesh = mesh or init_mesh(plan.dims, recipe.seed)
        runs[name] = Run(plan, mesh, folder)
        engine = runs[name].begin(engine)
        runs[name].checkpoints.finish()
    assert mesh is not None
    return runs, mesh


def lengths_asked(groups: Sequence[SampleGroup]) -> list[int]:
    return [int(group.prompt.content[2:5]) for group in groups]


def row_of(
    name: str, metrics: Sequence[dict[str, float]], final: Sequence[SampleGroup]
) -> dict[str, Any]:
    def mean(key: str, rows: Sequence[dict[str, float]]) -> float:
        return statistics.fmean(row[key] for row in rows)

    rewards = [float(group.rewards[0]) for group in final if group.rewards is not None]
    asked = lengths_asked(final)
    times = [row["time/rollout_s"] for row in metrics]
    extra = sorted(key for key in metrics[0] if key.startswith(("rollout/", "importance/")))
    return {
        "run": name,
        "rollout_s_median": round(statistics.median(times), 2),
        "rollout_s_total": round(sum(times), 1),
        "trained_len": round(mean("response_len/mean", metrics), 1),
        f"train_reward_last_{NUM_LAST}": round(mean("reward/mean", metrics[-NUM_LAST:]), 3),
        "final_reward": round(statistics.fmean(rewards), 3),
        "final_reward_short": round(
            statistics.fmean(r for r, n in zip(rewards, asked, strict=True) if n <= MEDIAN), 3
        ),
        "final_reward_long": round(
            statistics.fmean(r for r, n in zip(rewards, asked, strict=True) if n > MEDIAN), 3
        ),
        "means": {key: round(mean(key, metrics), 3) for key in extra},
    }


def num_not_accounted(run: Run) -> int:
    """Return the prompts drawn less those trained on and those that wait: 0 unless some are dropped."""
    recipe, state = run.plan.recipe, run.collector.state_dict()
    drawn = state["epoch"] * state["num_prompts"] + state["offset"]
    trained = run.step * recipe.rollout.prompts_per_step
    return drawn - trained - len(supply_of(run.collector).backlog.waiting)


def verdicts(rows: dict[str, dict[str, Any]], lost: dict[str, int]) -> dict[str, bool]:
    return {
        **{f"{n}: less rollout time": rows[n]["rollout_ratio"] < 1 for n in RUNS if n != "plain"},
        **{f"{n}: no prompt lost": lost[n] == 0 for n in RUNS if n != "drop"},
        "drop: answers trained on are shorter": rows["drop"]["trained_len"]
        < rows["plain"]["trained_len"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("num_steps", nargs="?", type=int, default=NUM_STEPS)
    num_steps = parser.parse_args().num_steps
    names = list(RUNS)
    metrics: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        runs, mesh = start_runs(Path(scratch), num_steps)
        try:
            for step in range(num_steps):
                turn = step % len(names)
                for name in names[turn:] + names[:turn]:
                    metrics[name].append(runs[name].run_step())
                shown = {n: round(metrics[n][-1]["time/rollout_s"], 2) for n in names}
                print(f"step {step} rollout_s {json.dumps(shown)}", flush=True)
            rows = {n: row_of(n, metrics[n], runs[n].answers(mesh)) for n in names}
            lost = {n: num_not_accounted(runs[n]) for n in names}
        finally:
            for run in runs.values():
                run.collector.close()
    for name, row in rows.items():
        total = rows["plain"]["rollout_s_total"]
        row["rollout_ratio"] = round(row["rollout_s_total"] / total, 3)
        row["prompts_dropped"] = lost[name]
        print(json.dumps(row))
    found = verdicts(rows, lost)
    rollout = runs["plain"].plan.recipe.rollout
    content = {
        "num_steps": num_steps,
        "samples_per_step": rollout.prompts_per_step * rollout.samples_per_prompt,
        "evaluated_prompts": EVALUATED,
        "rows": list(rows.values()),
        "verdicts": found,
    }
    for text, holds in found.items():
        print(f"{'ok' if holds else 'FAILED'} {text}")
    passed, failed = sum(found.values()), len(found) - sum(found.values())
    if num_steps == NUM_STEPS:
        packages = ("torch", "megatron-core", "sglang")
        write_result("long_tail", content, passed=passed, failed=failed, packages=packages)
    finish(passed, failed)


if __name__ == "__main__":
    main()
