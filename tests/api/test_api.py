"""`import mrl`: what is typed, refused and told to callbacks; runs are on saved rollouts, in forks."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import mrl
from mrl.run.compare import MACHINE
from tests.loop.conftest import TOY_RECIPE, Toy, recorded, toy  # noqa: F401 (fixtures)
from tests.ranks import run_ranks

TIMES = MACHINE


def test_the_import_alone_needs_no_torch():
    code = (
        "import sys, mrl\n"
        "mrl.load_recipe, mrl.Recipe, mrl.Callback, mrl.InputError\n"
        "assert set(mrl.__all__) <= set(dir(mrl))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there():
    assert all(getattr(mrl, name).__module__.startswith("mrl") for name in mrl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = mrl.trian
    assert (Path(mrl.__file__).parent / "py.typed").is_file()


def test_a_recipe_comes_from_a_file_a_dict_or_a_recipe(tmp_path):
    base = mrl.load_recipe(TOY_RECIPE)
    changed = mrl.load_recipe(base, {"optimizer.lr": 1e-6, "output_dir": tmp_path / "run"})
    assert changed.optimizer.lr == 1e-6
    assert changed.output_dir == str(tmp_path / "run")
    assert changed == mrl.load_recipe(
        TOY_RECIPE, ["optimizer.lr=0.000001", f"output_dir={tmp_path}/run"]
    )
    assert base.optimizer.lr != 1e-6
    assert mrl.load_recipe(base, None) == base
    keys = base.model_dump(mode="json")
    assert mrl.load_recipe(keys) == base
    assert mrl.load_recipe({**keys, "seed": 7}).seed == 7
    sets = [{"name": "a", "path": "x.jsonl", "temperature": 0.0}]
    assert mrl.load_recipe(base, {"eval.sets": sets}).eval.sets[0].temperature == 0


@pytest.mark.parametrize(
    ("recipe", "overrides", "reason"),
    [
        (TOY_RECIPE, {"optimizer.learning_rte": 1}, "unknown key 'optimizer.learning_rte'"),
        ({"train": {}}, {}, "recipe: .*model: required"),
        (3, {}, "recipe: got int, expected the path of a YAML file, a dict or an mrl.Recipe"),
        (TOY_RECIPE, "a=1", r"overrides: got 'a=1', expected a list such as \['a=1'\]"),
        (TOY_RECIPE, {"optimizer.lr": object()}, "override optimizer.lr: got object"),
        (TOY_RECIPE, {"reward": print}, "got builtin_function_or_method, .* as text: file.py:NAME"),
        ("nowhere.yaml", {}, "recipe nowhere.yaml: No such file"),
    ],
)
def test_bad_input_is_an_exception(recipe, overrides, reason):
    with pytest.raises(mrl.InputError, match=reason):
        mrl.load_recipe(recipe, overrides)


def test_what_is_no_callback_is_refused():
    for wrong in (print, mrl.Callback):
        with pytest.raises(
            mrl.InputError, match=r"callbacks\[0\]: .* is not an object with a method on_step"
        ):
            mrl.train(TOY_RECIPE, callbacks=[wrong])  # type: ignore[list-item]


def test_one_callback_or_key_in_the_place_of_a_list_is_refused():
    one: Any = Watch()
    with pytest.raises(mrl.InputError, match=r"callbacks: got .*, expected a list such as"):
        mrl.train(TOY_RECIPE, callbacks=one)
    with pytest.raises(mrl.InputError, match=r"allow: got 'optimizer.lr', expected a list such as"):
        mrl.train(TOY_RECIPE, allow="optimizer.lr")


def test_another_thread_is_refused():
    with ThreadPoolExecutor(1) as pool, pytest.raises(mrl.InputError, match="in the main thread"):
        pool.submit(mrl.train, TOY_RECIPE).result()


class Watch(mrl.Callback):
    """Notes what it is told, and stops after a step."""

    def __init__(self, last: int | None = None) -> None:
        self.seen: list[tuple[int, float, int]] = []
        self._last = last

    def on_step(
        self, step: int, metrics: Mapping[str, float], groups: Sequence[mrl.SampleGroup]
    ) -> bool:
        held = [group for group in groups if group.texts is not None]
        for group in held:
            assert group.rewards is not None
            assert group.advantages is not None
            assert len(group.texts or []) == len(group.rewards) == 4
            assert isinstance(group.prompt.content, str)
        self.seen.append((step, metrics["reward/mean"], len(held)))
        return step == self._last


def state() -> tuple[Any, ...]:
    """What a run must leave as it was."""
    gc.collect()
    return (
        dist.is_initialized(),
        signal.getsignal(signal.SIGUSR1),
        len(psutil.Process().children(recursive=True)),
        dict(os.environ),
        torch.get_num_threads(),
        sum(issubclass(type(o), mrl.SampleGroup) for o in gc.get_objects()),
    )


def files_and_threads() -> int:
    """How many files this process has open, and how many threads, Python's and others'."""
    gc.collect()
    return sum(len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))


def numbers(result: mrl.TrainResult) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock or another run in the process decides."""
    return [{k: v for k, v in r.items() if not k.startswith(TIMES)} for r in result.metrics]


def runs_in_a_row(overrides: list[str], folder: str) -> list[Any]:
    """Run A, run B with other options, and A again, stopped and continued, in this process."""

    def recipe(name: str, *more: str) -> mrl.Recipe:
        return mrl.load_recipe(TOY_RECIPE, [*overrides, f"output_dir={folder}/{name}", *more])

    hook = sys.excepthook
    first, watch = mrl.train(recipe("a")), Watch(last=1)
    assert sys.excepthook is hook
    after, before = state(), files_and_threads()
    other = mrl.train(recipe("b", "algorithm.name=grpo", "optimizer.lr=1e-4"))
    stopped = mrl.train(recipe("again"), callbacks=[watch, Nothing()])
    assert stopped.stopped == (
        "a callback stopped the run: saved a checkpoint with 2 steps done; start again to continue "
        "with step 2"
    )
    assert len(stopped.metrics) == 2
    rest = Watch()
    second = mrl.train(recipe("again"), callbacks=[rest])
    assert not second.stopped
    assert state() == after
    # 64 files and 48 threads a run where Megatron's wrapper keeps the process groups; one may be left.
    assert files_and_threads() - before <= 3 * 10
    assert [step for step, _, _ in watch.seen + rest.seen] == [0, 1, 2]
    assert numbers(first) == numbers(second)
    assert numbers(first) != numbers(other)
    with pytest.raises(mrl.InputError, match="b holds a run of another recipe"):
        mrl.train(recipe("b"))
    return [first.metrics[-1]["loss/policy"], sum(held for _, _, held in watch.seen + rest.seen)]


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.release)])
def test_runs_in_one_process_know_nothing_of_each_other(world, toy: Toy, recorded: Path, tmp_path):  # noqa: F811
    overrides = [
        *toy.overrides(tmp_path / "x", "train.num_steps=3", "checkpoint.save_every=0"),
        f"debug.load_rollouts={recorded / 'rollouts'}",
    ]
    results = run_ranks(world, runs_in_a_row, overrides, str(tmp_path), folder=tmp_path / "out")
    assert all(math.isfinite(loss) for loss, _ in results)
    assert sum(held for _, held in results) == 12


class Nothing(mrl.Callback):
    """Has only what the protocol gives it."""


class Raises(mrl.Callback):
    def on_step(self, step: int, metrics: Any, groups: Any) -> None:
        raise KeyError("mine")


def failed_then_run(overrides: list[str]) -> int:
    recipe = mrl.load_recipe(TOY_RECIPE, overrides)
    with pytest.raises(KeyError, match="mine"):
        mrl.train(recipe, callbacks=[Raises()])
    return len(mrl.train(recipe).metrics)


def test_after_a_failure_the_process_can_train_again(toy: Toy, recorded, tmp_path):  # noqa: F811
    overrides = [
        *toy.overrides(tmp_path / "x", "train.num_steps=2", "checkpoint.save_every=0"),
        f"debug.load_rollouts={recorded / 'rollouts'}",
    ]
    (steps,) = run_ranks(1, failed_then_run, overrides, folder=tmp_path / "out")
    assert steps == 2
