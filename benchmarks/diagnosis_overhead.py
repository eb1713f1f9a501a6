"""This module measures what the diagnosis of a step costs: `python -m benchmarks.diagnosis_overhead`.

The demo (launch/recipes/toy_moe.yaml) with a live engine for a few steps, whose rollouts are kept; then
the trainer alone on these rollouts, by turns and in one process, so that what else the machine does
meets all: `off` (no token records, no decomposition), `tokens` (a record every step) and `decompose` (a
decomposition every step: the default is every tenth). And the pass before the update by itself: without
the comparison of routes, with its counts, and with its rows kept.

Passes where a token record adds at most LIMIT of a live step, by the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence.result import finish, summary, write_result
from benchmarks.replay_overhead import NUM_SAVED, make_trainer
from moe.routes import Replay
from mrl.learn.batching import make_train_batches
from mrl.toy_model import write_toy_model
from parallel import prepare
from parallel.mesh import destroy_mesh
from tests.loop.stepped import collected

LIMIT = 0.03
OFF = ("diagnosis.save_tokens_every=0", "diagnosis.decompose_every=0")
ARMS = {
    "off": OFF,
    "tokens": ("diagnosis.save_tokens_every=1", "diagnosis.decompose_every=0"),
    "decompose": ("diagnosis.save_tokens_every=0", "diagnosis.decompose_every=1"),
}


def by_turns(calls: dict[str, Callable[[int], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name in sorted(calls, reverse=bool(i % 2)):
            start = time.perf_counter()
            calls[name](i)
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}


def live_steps(trainer: Any) -> list[float]:
    """Seconds of the steps of a live trainer, whose rollouts are saved; the first is not counted."""
    try:
        trainer.collector.start(trainer.policy)
        steps = [trainer.run_step() for _ in range(NUM_SAVED)]
    finally:
        trainer.collector.close()
    trainer.policy.onload()
    return [row["time/step_s"] for row in steps][1:]


def run_saved(trainer: Any) -> Callable[[int], None]:
    def step(i: int) -> None:
        trainer.step = i % NUM_SAVED
        trainer.run_step()

    return step


def passes(trainer: Any) -> dict[str, Callable[[int], None]]:
    """Return the pass before the update, on the rollouts of one step, in its three forms."""
    recipe, learner, trainer.step = trainer.plan.recipe, trainer.learner, 0
    groups = collected(trainer)
    samples = [sample for group in groups for sample in group.samples]
    (batch,) = make_train_batches(
        [(samples, [0.0] * len(samples))],
        trainer.plan.algorithm,
        trainer.mesh,
        recipe.train.micro_batch_tokens,
        learner.exchange.deliver,
    )
    return {
        str(how): lambda i, how=how: trainer.policy.forward_only(
            batch.micro_batches, Replay.rollout, observe=how
        )
        for how in (None, "counts", "rows")
    }


def measure(scratch: Path, rounds: int) -> dict[str, Any]:
    model = scratch / "toy"
    write_toy_model(model)
    live = make_trainer(model, scratch / "live", None, *OFF, "debug.save_rollouts=true")
    live_s = statistics.median(live_steps(live))
    rollouts = f"debug.load_rollouts={live.folder.rollouts}"
    saved = {
        arm: make_trainer(model, scratch / arm, live.mesh, rollouts, *keys)
        for arm, keys in ARMS.items()
    }
    steps = by_turns({arm: run_saved(trainer) for arm, trainer in saved.items()}, rounds)
    forward = by_turns(passes(saved["off"]), rounds)
    medians = {arm: statistics.median(values) for arm, values in steps.items()}
    pairs = {
        arm: list(zip(steps[arm], steps["off"], strict=True)) for arm in ("tokens", "decompose")
    }
    added = {arm: statistics.median(a - b for a, b in pair) for arm, pair in pairs.items()}
    size = max(f.stat().st_size for f in saved["tokens"].folder.tokens.iterdir())
    return {
        "rounds": rounds,
        "live_step_s": round(live_s, 4),
        "trainer_step_s": {arm: round(s, 4) for arm, s in medians.items()},
        "ratio_of_medians": {arm: round(medians[arm] / medians["off"], 4) for arm in pairs},
        "added_s": {arm: round(s, 4) for arm, s in added.items()},
        "added_share_of_live_step": {arm: round(s / live_s, 4) for arm, s in added.items()},
        "pass_s": {how: round(statistics.median(v), 4) for how, v in forward.items()},
        "record_bytes": size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--steps", type=int, default=16, help="rounds of saved steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    prepare()
    with tempfile.TemporaryDirectory() as scratch:
        row = measure(Path(scratch), args.steps)
    destroy_mesh()
    print(json.dumps(row))
    failed = row["added_share_of_live_step"]["tokens"] > LIMIT
    write_result(
        "diagnosis_overhead", {"limit": LIMIT, **row}, passed=1 - failed, failed=int(failed),
        packages=("torch", "megatron-core", "sglang"),
    )  # fmt: skip
    finish(1 - failed, int(failed))


if __name__ == "__main__":
    main()
