"""What happens to a run that is told to stop, or fails, before its first step."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrl import trainer
from mrl.cli import main
from mrl.config import load_recipe
from tests.loop.conftest import COMMAND_TIMEOUT_S, TOY_RECIPE, Toy, environment
from tests.loop.forked import Command


def told_while_the_model_loads(arguments: list[str]) -> None:
    make_policy = trainer.make_policy

    def told(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return make_policy(*args, **options)

    trainer.make_policy = told
    main(arguments)


def test_sigusr1_while_the_model_loads_leaves_before_the_first_step(
    toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    more = (f"debug.load_rollouts={recorded / 'rollouts'}", "train.num_steps=1")
    arguments = ["train", str(TOY_RECIPE), *toy.overrides(output, *more)]
    entry, printed = told_while_the_model_loads, tmp_path / "printed"
    done = Command(arguments, environment(), printed, entry=entry).finish(COMMAND_TIMEOUT_S)
    assert done.returncode == 75
    assert done.stderr.strip().splitlines()[-1] == (
        "mrl: SIGUSR1: stopped before the first step of this start, nothing is lost; start again to "
        "continue with step 0"
    )
    assert not (output / "metrics.jsonl").exists()
    assert not list((output / "checkpoints").glob("iter_*"))


def test_a_trainer_that_cannot_be_made_leaves_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def part(name: str) -> Any:
        return lambda *args, **options: SimpleNamespace(
            close=lambda: closed.append(name), moe_layers=()
        )

    def refuse(*args: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(trainer, "make_policy", part("policy"))
    monkeypatch.setattr(trainer, "make_collector", part("collector"))
    monkeypatch.setattr(trainer, "RolloutExchange", refuse)
    plan: Any = SimpleNamespace(
        recipe=load_recipe(TOY_RECIPE), model=None, adapter=None, reference=None
    )
    mesh: Any = SimpleNamespace(rank=1)
    folder: Any = SimpleNamespace(saved_step=lambda: None)
    with pytest.raises(RuntimeError, match="no"):
        trainer.Trainer(plan, mesh, folder)
    assert closed == ["collector", "policy"]
