"""Whole runs with real engines that are added, removed and killed: the bits of calm runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.async_cases import workers_of
from benchmarks.elastic_engines import AHEAD
from benchmarks.elastic_runs import (
    command,
    differences,
    engines_by_step,
    finish,
    kill_launcher,
    set_pace,
    start,
    states,
    wait_for,
)
from mrl.cli import main
from mrl.drill.job import num_rows
from mrl.engine_pool.elastic.client import ask_engines
from mrl.errors import ExitCode
from mrl.toy_model import write_toy_model

pytestmark = [pytest.mark.release, pytest.mark.timeout(3600)]

STEPS = 12
SLOW_S = 3.0
"""Seconds of a group's reward while an engine starts."""
SCHEDULES = {
    "synchronous": (),
    "fixed": (*AHEAD, "async.max_staleness=1"),
}


@pytest.fixture(scope="module")
def model(made_once: Callable[..., Path]) -> Path:
    return made_once("toy", write_toy_model)


def keys_of(schedule: str, *more: str) -> list[str]:
    every = "checkpoint.save_every=4"
    return [*SCHEDULES[schedule], f"train.num_steps={STEPS}", every, *more]


@pytest.fixture(scope="module")
def calm(model: Path, made_once: Callable[..., Path]) -> Callable[[str], Path]:
    """Runs whose engine stays."""

    def train(schedule: str) -> Path:
        def write(folder: Path) -> None:
            run = folder / "run"
            finish(start(command(model, run, 1, keys_of(schedule)), run, 0.0))

        return made_once(f"calm_{schedule}", write) / "run"

    return train


def has_open(worker: psutil.Process, name: str) -> bool:
    """Return whether a process that the worker has started has a file of this name open."""
    for each in worker.children(recursive=True):
        with suppress(OSError):
            if any(file.readlink().name == name for file in Path(f"/proc/{each.pid}/fd").iterdir()):
                return True
    return False


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_engines_come_and_go_and_the_bits_stay(
    schedule: str, model: Path, calm: Callable[[str], Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = start(command(model, run, 1, keys_of(schedule)), run, SLOW_S)
    try:
        wait_for(lambda: num_rows(run) >= 1 and states(run), job, "a step")
        main(["engines", "add", str(run), "--count", "2"])
        assert states(run).keys() == {0, 1, 2}
        main(["engines", "remove", str(run), "0"])
        assert sorted(states(run)) == [1, 2]
        wait_for(lambda: states(run) == {1: "serving", 2: "serving"}, job, "both serve")
        ask_engines(run, "DELETE", "/engines/1", {"now": False})
        for worker in workers_of(job):
            if has_open(worker, "engine_01.log"):
                worker.kill()
        wait_for(lambda: 1 not in states(run), job, "the killed engine is gone")
        with pytest.raises(SystemExit) as refused:
            main(["engines", "remove", str(run), "2"])
        assert refused.value.code == ExitCode.BAD_INPUT
        set_pace(run, 0.0)
    except BaseException:
        job.kill()
        raise
    finish(job)
    assert differences(run, calm(schedule), STEPS) == []
    assert engines_by_step(run)[0] == 1
    assert max(engines_by_step(run)) >= 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_is_killed_while_engines_start_and_continues_with_another_number(
    schedule: str, model: Path, calm: Callable[[str], Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = start(command(model, run, 1, keys_of(schedule)), run, 0.5)
    try:
        wait_for(lambda: num_rows(run) >= 5, job, "a checkpoint")
        ask_engines(run, "POST", "/engines", {"count": 2})
        wait_for(lambda: len(workers_of(job)) == 3, job, "the workers of the added engines")
        kill_launcher(job)
    finally:
        job.kill()
    resumed = [*command(model, run, 2, keys_of(schedule)), "--allow", "rollout.num_ranks"]
    finish(start(resumed, run, 0.0))
    assert engines_by_step(run)[-1] == 2
    assert differences(run, calm(schedule), STEPS) == []


def test_an_engine_with_wrong_weights_never_serves_and_the_run_goes_on(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    wrong = ("rollout.engine=tests.disaggregated.wrong_engine", "rollout.batch_invariant=false")
    job = start(command(model, run, 1, keys_of("synchronous", *wrong)), run, SLOW_S)
    try:
        wait_for(lambda: num_rows(run) >= 1 and states(run), job, "a step")
        with pytest.raises(SystemExit) as failed:
            main(["engines", "add", str(run)])
        assert failed.value.code == ExitCode.FAILED
        assert (
            "engine 1 could not be added: its worker was lost: RuntimeError"
            in capsys.readouterr().out
        )
        set_pace(run, 0.0)
    except BaseException:
        job.kill()
        raise
    finish(job)
    assert engines_by_step(run) == [1] * STEPS
