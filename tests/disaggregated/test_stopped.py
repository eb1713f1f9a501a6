"""The supervisor of a rollout rank is stopped for good: nothing waits for it without a limit."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.disaggregated.test_restarts import rank_of
from tests.disaggregated.test_runs import (
    APART,
    command,
    model,
    num_rows,
    processes_of,
    start,
    wait_for,
)

__all__ = ["model"]  # a fixture
WITHIN_S = 150
"""Twice the 60 s after which a stopped rank is at fault, and the end of the run."""

pytestmark = [pytest.mark.release, pytest.mark.timeout(900)]


@pytest.mark.parametrize("is_watched", [True, False], ids=["watchdog", "launcher"])
def test_a_finished_run_does_not_wait_for_a_stopped_supervisor(
    is_watched: bool, model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    keys = (*APART, "train.num_steps=3", f"watch.enabled={str(is_watched).lower()}")
    log = output.with_suffix(".log")
    process = start(command(model, output, 2, *keys), log)
    wait_for(lambda: num_rows(output) >= 1, process)
    rank_of(process.pid, 1).send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    assert process.wait(WITHIN_S) == 0, log.read_text()[-3000:]
    assert time.monotonic() - begin > 50
    assert num_rows(output) == 3
    printed = log.read_text()
    if is_watched:
        assert "rank 1 is stopped (SIGSTOP)" in printed
        assert "the run is done, so it is killed" in printed
    else:
        assert "is stopped (SIGSTOP) for 60 s, others have ended: it is killed" in printed
    assert not (output / "failure.json").exists()
    assert processes_of(output) == []


def test_a_stopped_supervisor_ends_a_run_that_goes_on(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    log = output.with_suffix(".log")
    process = start(command(model, output, 2, *APART, "train.num_steps=100000"), log)
    wait_for(lambda: num_rows(output) >= 1, process)
    rank_of(process.pid, 1).send_signal(signal.SIGSTOP)
    assert process.wait(WITHIN_S) == 72, log.read_text()[-3000:]
    found = json.loads((output / "failure.json").read_text())
    assert (found["exit_code"], found["rank"], found["phase"]) == (72, 1, "supervise")
    assert "rank 1 is stopped (SIGSTOP)" in log.read_text()
    assert processes_of(output) == []
