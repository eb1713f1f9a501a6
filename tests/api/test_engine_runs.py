"""The must-show of Python: two trainings and an evaluation in one process, and a sweep of three."""

from __future__ import annotations

import pytest

import mrl
from tests.api.test_api import Watch, numbers, state
from tests.loop.conftest import REPOSITORY, TOY_RECIPE, Toy, toy  # noqa: F401 (a fixture)
from tests.ranks import run_ranks

pytestmark = pytest.mark.release
DATA = str(REPOSITORY / "launch/recipes/data/first_char.jsonl")


def small(overrides: list[str], name: str, **more: object) -> mrl.Recipe:
    base = mrl.load_recipe(TOY_RECIPE, overrides)
    sets = [{"name": "letters", "path": DATA, "num_prompts": 4}]
    changes = {"train.num_steps": 2, "checkpoint.save_every": 0, "eval.sets": sets, **more}
    return mrl.load_recipe(base, {**changes, "output_dir": f"{base.output_dir}/{name}"})


def trained_twice_and_evaluated(overrides: list[str]) -> list[float]:
    watch = Watch()
    first = mrl.train(small(overrides, "a"), callbacks=[watch])
    after = state()
    second = mrl.train(small(overrides, "b"))
    one = mrl.evaluate(small(overrides, "a"))
    two = mrl.evaluate(small(overrides, "b"), step=2)
    assert state() == after
    assert not first.stopped + second.stopped
    assert [(step, held) for step, _, held in watch.seen] == [(0, 4), (1, 4)]
    assert numbers(first) == numbers(second)
    assert one.step == two.step == 2
    assert one.metrics == two.metrics
    assert one.samples.read_bytes() == two.samples.read_bytes()
    return [one.metrics["eval/letters/avg@1"]]


def swept(overrides: list[str]) -> list[float]:
    rates = (1e-4, 1e-3, 1e-2)
    results = [mrl.train(small(overrides, f"{lr:g}", **{"optimizer.lr": lr})) for lr in rates]
    assert [result.metrics[-1]["lr"] for result in results] == pytest.approx(rates)
    first = [result.metrics[0]["reward/mean"] for result in results]
    assert first[0] == first[1] == first[2]  # the same weights and seed
    has_groups, _, num_children, *_ = state()
    assert not has_groups
    assert not num_children
    return [result.metrics[-1]["loss/policy"] for result in results]


@pytest.mark.parametrize("script", [trained_twice_and_evaluated, swept])
def test_in_one_process_with_the_engine(script, toy: Toy, tmp_path):  # noqa: F811
    (printed,) = run_ranks(1, script, toy.overrides(tmp_path / "runs"), folder=tmp_path / "out")
    assert all(isinstance(number, float) for number in printed)
