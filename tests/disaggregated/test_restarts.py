"""A rank of a disaggregated run is killed under `mrl.launch --max-restarts`: nothing of it is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.disaggregated.test_runs import (
    AHEAD,
    LIMIT_S,
    bits,
    command,
    model,
    num_rows,
    processes_of,
    rows,
    start,
    train,
    wait_for,
)

__all__ = ["model"]  # a fixture
KEYS = (*AHEAD, "async.max_staleness=1", "train.num_steps=6", "checkpoint.save_every=2")

pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def calm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("calm") / "run"
    train(model, output, 2, *KEYS)
    return output


def rank_of(launcher: int, rank: int) -> psutil.Process:
    (found,) = [
        each
        for each in psutil.Process(launcher).children()
        if each.environ().get("RANK") == str(rank)
    ]
    return found


@pytest.mark.parametrize("rank", [0, 1], ids=["trainer", "supervisor"])
def test_a_killed_rank_costs_no_bit(rank: int, model: Path, calm: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    words = command(model, output, 2, *KEYS)
    words.insert(words.index("-m", 3), "--max-restarts=1")
    log = output.with_suffix(".log")
    process = start(words, log)
    wait_for(lambda: num_rows(output) >= 3, process)
    rank_of(process.pid, rank).send_signal(signal.SIGKILL)
    assert process.wait(LIMIT_S) == 0, log.read_text()[-3000:]
    printed = log.read_text()
    assert f"rank {rank} was killed by SIGKILL" in printed
    assert "starting the ranks again, restart 1 of 1" in printed
    assert [row["step"] for row in rows(output)] == list(range(6))
    assert bits(output, 6) == bits(calm, 6)
    assert processes_of(output) == []
