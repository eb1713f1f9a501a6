"""A run that continues with other settings: the drill after running out of memory, and branches."""

from __future__ import annotations

import hashlib
import re
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.commands.branch_run import branch
from mrl.config import load_recipe
from mrl.engines.base import EngineLost
from mrl.engines.sglang.cause import cause
from mrl.errors import InputError, RunFailed
from mrl.jobs.out_of_memory import memory_advice
from mrl.jobs.train import train
from mrl.preflight import check
from mrl.run.folder import RunFolder
from mrl.run.source import read_source
from mrl.trainer import Trainer
from parallel import prepare
from parallel.mesh import init_mesh
from parallel.policy import Policy
from tests.loop.conftest import TOY_RECIPE, Toy
from tests.loop.shared_engine import SharedEngine
from tests.loop.stepped import exchange_engine
from tests.ranks import run_ranks

STEPS = (
    "train.num_steps=4",
    "train.num_steps_per_rollout=2",
    "checkpoint.save_every=2",
    "checkpoint.async_save=false",
)
NEW = ("train.micro_batch_tokens=80", "rollout.mem_fraction_static=0.4")
LOSS = ("step", "loss/total", "grad_norm")


def losses(run: Path) -> list[dict[str, float]]:
    return [{key: row[key] for key in LOSS} for row in RunFolder(run).read_metrics()]


def swapped(overrides: list[str], changed: list[str] | None) -> None:
    """Train without stopping; after two steps the learner gets the recipe with `changed`."""
    recipe = load_recipe(TOY_RECIPE, overrides)
    plan, folder = check(recipe, 1), RunFolder(recipe.output_dir)
    folder.open(recipe, plan.update)
    prepare()
    trainer = Trainer(plan, init_mesh(plan.dims, recipe.seed), folder)
    for _ in range(4):
        if trainer.step == 2 and changed:
            trainer.learner.recipe = load_recipe(TOY_RECIPE, [*overrides, *changed])
        folder.add_metrics(trainer.run_step())


def continued(run: Path, overrides: list[str], allowed: list[str]) -> None:
    train(read_source(run, overrides), 1, allowed=allowed)


def no_memory(*args: Any, **more: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def out_of_memory(overrides: list[str]) -> str:
    """Train, and run out of memory in the third step."""
    whole, steps = Policy.train_step, []

    def train_step(self: Policy, *args: Any) -> Any:
        steps.append(1)
        return whole(self, *args) if len(steps) < 5 else no_memory()

    Policy.train_step = train_step  # in a process of its own
    try:
        train(load_recipe(TOY_RECIPE, overrides), 1)
    except RunFailed as error:
        return str(error)
    raise AssertionError("the run was not stopped")


def digests(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        str(f): (hashlib.sha256(f.read_bytes()).hexdigest(), f.stat().st_mtime_ns)
        for f in folder.rglob("*")
        if f.is_file()
    }


@pytest.mark.timeout(300)
def test_out_of_memory_half_the_micro_batch_and_on(
    toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    """What continues equals an uninterrupted run with the new settings from that step on."""

    def given(name: str) -> list[str]:
        saved = f"debug.load_rollouts={recorded / 'rollouts'}"
        return toy.overrides(tmp_path / name, saved, *STEPS)

    run, copy, apart = (tmp_path / name for name in ("run", "copy", "apart"))
    (message,) = run_ranks(1, out_of_memory, given("run"), folder=tmp_path / "o1")
    assert "out of memory in phase train (CUDA out of memory. Tried to allocate 2.00" in message
    owners = (
        r"Rank 0 holds: weights [\d.]+ MB, gradients [\d.]+ MB, optimizer [\d.]+ MB, activations"
    )
    assert re.search(owners + r" and all else in the process [\d.]+ MB", message)
    assert re.search(r"routes of the step [\d.]+ k?B, the engine unknown\. Change", message)
    keys = "train.micro_batch_tokens=80", "train.recompute=true"
    assert f"Change {keys[0]} (160 now) and {keys[1]} (false now)" in message
    assert message.endswith(f"train {run}/config.yaml {keys[0]} {keys[1]}")
    shutil.copytree(run, copy)
    branch(f"{run}@2", apart, ["optimizer.lr=1e-2"])
    before = digests(run)
    run_ranks(1, continued, copy, list(NEW), [], folder=tmp_path / "o2")
    run_ranks(1, continued, apart, [], [], folder=tmp_path / "o3")
    assert digests(run) == before
    run_ranks(1, swapped, given("whole"), list(NEW), folder=tmp_path / "o4")
    assert losses(copy) == losses(tmp_path / "whole")  # bit for bit, and so to 1e-6

    first, last = RunFolder(copy).history.read()
    assert first["event"] == last["event"] == "start"
    assert last["step"] == 2
    assert last["changes"] == {
        "rollout.mem_fraction_static": [0.6, 0.4],
        "train.micro_batch_tokens": [160, 80],
    }
    made, started = RunFolder(apart).history.read()
    assert (made["event"], made["step"], made["parent"]) == ("branch", 2, str(run))
    assert made["changes"] == {"optimizer.lr": [0.003, 0.01]}
    assert (started["step"], started["changes"]) == (2, {})
    rates = [row["lr"] for row in RunFolder(apart).read_metrics()]
    assert rates == [0.003, 0.003, 0.01, 0.01]  # the recipe's, not the checkpoint's
    ours = losses(apart)
    assert ours[:2] == losses(run)[:2]
    norms = [rows[3]["grad_norm"] for rows in (ours, losses(copy))]
    assert abs(norms[0] / norms[1] - 1) > 1e-4  # after an update with another learning rate


@pytest.mark.release
@pytest.mark.timeout(600)
def test_the_drill_with_the_real_engine(tmp_path: Path) -> None:
    run_ranks(1, drill, tmp_path, folder=tmp_path / "out")


def drill(scratch: Path) -> None:
    """Compare with an uninterrupted run that gets settings and engine of the resumed one at step 2."""
    engine = SharedEngine(scratch)
    more = ("train.num_steps=4", "train.micro_batch_tokens=160", "checkpoint.async_save=false")
    new = (*more, *NEW)
    try:
        whole = engine.run("whole", more)
        for _ in range(2):
            whole.run_step()
        whole._save()
        kept = Path(shutil.copytree(whole.folder.checkpoints, scratch / "kept"))
        engine.stop()
        engine._engine = None
        resumed = engine.run("resumed", new, checkpoints=kept)
        assert resumed.step == 2
        again = [resumed.run_step() for _ in range(2)]
        whole.learner.recipe = resumed.plan.recipe
        assert engine._engine is not None
        exchange_engine(whole.collector, engine._engine)  # which has the new share
        rows = [whole.run_step() for _ in range(2)]
        for ours, theirs in zip(again, rows, strict=True):
            for key in LOSS:
                assert ours[key] == pytest.approx(theirs[key], abs=1e-6), key
    finally:
        with suppress(Exception):
            engine.stop()


def test_the_engines_death_by_memory_is_told_from_others(tmp_path: Path) -> None:
    recipe, folder = load_recipe(TOY_RECIPE), RunFolder(tmp_path / "run")
    lost = EngineLost("engine: died; last lines:\ntorch.OutOfMemoryError: CUDA out of memory.")
    said = memory_advice(RunFailed(f"4 rollout engines were lost; {lost}"), recipe, folder) or ""
    assert "rollout.mem_fraction_static (0.6 now: give less)" in said
    assert said.endswith(f"train {folder.config} rollout.mem_fraction_static=0.5")
    words = "engine: Not enough memory. Please try to increase --mem-fraction-static."
    assert "=0.7" in (memory_advice(EngineLost(words), recipe, folder) or "")
    host = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    assert "the trainer ran out of memory" in (memory_advice(host, recipe, folder) or "")
    folder.root.mkdir()  # whose step was one micro-batch, which half of 100,000 would not change
    folder.metrics.write_text('{"step": 0, "tokens/train": 6000.0}\n')
    large = load_recipe(TOY_RECIPE, ["train.micro_batch_tokens=100000"])
    said = memory_advice(host, large, folder) or ""
    assert "Change train.micro_batch_tokens=3000 (100000 now)" in said
    killed = EngineLost(f"engine: ended while it started: {cause('', -signal.SIGKILL)}")
    for other in (RuntimeError("boom"), killed, InputError("no such key")):
        assert memory_advice(other, recipe, folder) is None


@pytest.mark.parametrize(
    ("source", "overrides", "reason"),
    [
        (
            "run@7",
            [],
            "no checkpoint of step 7; it has checkpoints of these steps: 2, 4; checkpoint.save_every",
        ),
        ("nowhere", [], "is a folder without config.yaml"),
        ("run", ["seed=9"], "seed is 0 there and 9 now (never changes in a run)"),
        ("run", ["algorithm.name=ppo"], "ppo has a critic and gspo has none"),
        ("run", ["output_dir=x"], "leave it out"),
    ],
)
def test_a_branch_that_cannot_be(
    source: str, overrides: list[str], reason: str, recorded: Path, tmp_path: Path
) -> None:
    name = source if source == "nowhere" else str(recorded) + source.removeprefix("run")
    with pytest.raises(InputError) as caught:
        branch(name, tmp_path / "new", overrides)
    assert reason in str(caught.value)
    assert not (tmp_path / "new").exists()
