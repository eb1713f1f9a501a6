"""Real runs in which a worker, an engine or the trainer dies at moments that chance seldom hits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mrl.drill.job import kill
from mrl.errors import ExitCode
from mrl.run.folder import RunFolder
from tests.disaggregated.dying_engine import ALWAYS, ENGINE, WORKER
from tests.disaggregated.test_runs import (
    APART,
    LIMIT_S,
    command,
    model,
    num_rows,
    processes_of,
    rows,
    start,
    wait_for,
)

__all__ = ["model"]
pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]

KEYS = (
    *(*APART, "async.max_staleness=2", "async.in_flight_updates=interrupt", "train.num_steps=6"),
    *("algorithm.importance=tis", "checkpoint.save_every=2"),
)


def check_trained(output: Path) -> None:
    assert [row["step"] for row in rows(output)] == list(range(6))
    assert all(row["staleness/max"] <= 2 for row in rows(output))
    trained = Counter[str]()
    for step in range(6):
        trained.update(line["prompt_id"] for line in RunFolder(output).read_rollouts(step))
    assert set(trained.values()) == {4}
    assert len(trained) == 6 * 4
    assert processes_of(output) == []


@pytest.mark.parametrize("moment", [*WORKER, *ENGINE])
def test_a_death_in_the_middle_costs_no_prompt(
    moment: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, died = tmp_path / "run", tmp_path / "died"
    monkeypatch.setenv("MRL_DIES", moment)
    monkeypatch.setenv("MRL_DIED", str(died))
    words = command(model, output, 2, *KEYS, "rollout.engine=tests.disaggregated.dying_engine")
    log = output.with_suffix(".log")
    assert start(words, log).wait(LIMIT_S) == 0, log.read_text()[-3000:]
    assert died.exists()
    check_trained(output)
    assert rows(output)[-1]["async/lost_workers"] == (moment in WORKER)
    assert sum(row["rollout/engine_restarts"] for row in rows(output)) == (moment in ENGINE)


def test_a_prompt_that_kills_every_engine_ends_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    monkeypatch.setenv("MRL_DIES", ALWAYS)
    monkeypatch.setenv("MRL_DIED", str(tmp_path / "died"))
    more = ("rollout.engine=tests.disaggregated.dying_engine", "rollout.max_restarts=2")
    log = output.with_suffix(".log")
    code = start(command(model, output, 2, *KEYS, *more), log).wait(LIMIT_S)
    assert code == ExitCode.LOST_ENGINE, log.read_text()[-3000:]
    assert "more than rollout.max_restarts=2" in " ".join(log.read_text().split())
    assert processes_of(output) == []


def test_the_death_of_rank_0_ends_all_and_costs_no_prompt(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    words = command(model, output, 2, *KEYS)
    process = start(words, output.with_suffix(".log"))
    wait_for(lambda: num_rows(output) >= 3, process)
    (trainer,) = [p for p in processes_of(output) if p.environ().get("RANK") == "0"][:1]
    kill([trainer])
    assert process.wait(LIMIT_S) not in (0, None)
    assert processes_of(output) == []
    assert start(words, output.with_suffix(".log")).wait(LIMIT_S) == 0
    check_trained(output)
    assert rows(output)[-1]["async/lost_workers"] == 0
