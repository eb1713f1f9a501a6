"""The supervisor of a rollout rank is stopped for good: nothing waits for it without a limit."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import psutil
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
from tests.slurm.cluster import free_ports

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
        assert "the run is done, so the rank is killed" in printed
    else:
        assert (
            "has been stopped (SIGSTOP) for 60 s, and other ranks have ended: killing it" in printed
        )
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


@pytest.mark.parametrize(
    ("rank", "ranks", "keys"),
    [(0, 1, ()), (1, 2, ("parallel.expert_model_parallel_size=2",)), (1, 2, APART)],
    ids=["one rank", "trainer", "supervisor"],
)
def test_a_rank_that_is_stopped_while_it_imports_is_named(
    rank: int, ranks: int, keys: tuple[str, ...], model: Path, tmp_path: Path
) -> None:
    """Nothing of mrl runs there yet: its launcher looks."""
    output = tmp_path / "run"
    log = output.with_suffix(".log")
    process = start(command(model, output, ranks, *keys), log)
    wait_for(lambda: len(psutil.Process(process.pid).children()) == ranks, process)
    rank_of(process.pid, rank).suspend()
    assert process.wait(WITHIN_S) == 72, log.read_text()[-3000:]
    printed = log.read_text()
    assert f"mrl: rank {rank} is stopped (SIGSTOP): 61 s while starting" in printed
    assert "exit code 72" in printed
    assert processes_of(output) == []


def test_a_node_that_only_rolls_out_is_watched(model: Path, tmp_path: Path) -> None:
    """Nobody trains there; the first supervisor of the node starts its monitor."""
    output = tmp_path / "run"
    end = f"--rdzv-endpoint=127.0.0.1:{free_ports(1)[0]}"
    launch = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", end, "--rdzv-id=two"]
    words = command(model, output, 1, *APART, "train.num_steps=3")
    words[3:5] = launch
    assert words[2] == "mrl.launch"
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    launchers = [start(words, log) for log in logs]
    wait_for(lambda: num_rows(output) >= 1, launchers[0])
    ranks = [rank for each in launchers for rank in psutil.Process(each.pid).children()]
    (supervisor,) = [rank for rank in ranks if rank.environ().get("RANK") == "1"]
    monitors = [m for m in supervisor.children() if "mrl.watch.monitor" in " ".join(m.cmdline())]
    assert len(monitors) == 1
    supervisor.suspend()
    codes = [each.wait(2 * WITHIN_S) for each in launchers]
    printed = "".join(log.read_text() for log in logs)
    assert codes == [0, 0], printed[-3000:]
    assert "the run is done, so the rank is killed" in printed
    assert num_rows(output) == 3
    assert processes_of(output) == []
