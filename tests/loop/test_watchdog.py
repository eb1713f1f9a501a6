"""A rank that is stopped for good ends the run: the right rank and phase are named, and the next start
continues from the checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mrl.watch.connection import SILENT_S
from tests.loop.conftest import REPOSITORY, TOY_RECIPE, Toy, environment, trained
from tests.loop.test_elastic import assert_same
from tests.loop.test_run import metrics, processes_of
from tests.ranks import run_ranks
from tests.slurm.cluster import free_ports
from tests.watch.ranks import Rank, ranks_of, stop_in


def watched(process: subprocess.Popen[str], beside: set[int]) -> list[Rank]:
    """Both ranks once they are there, of another start than `beside`."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        ranks = [rank for rank in ranks_of(process.pid) if rank.pid not in beside]
        if len(ranks) == 2:
            return ranks
        time.sleep(0.05)
    raise AssertionError(process.communicate())


def overrides_of(toy: Toy, recorded: Path, output: Path) -> list[str]:
    """Four steps on two ranks, with a checkpoint each."""
    return toy.overrides(
        output,
        f"debug.load_rollouts={recorded / 'rollouts'}",
        "parallel.tensor_model_parallel_size=2",
        "train.num_steps=4",
        "checkpoint.save_every=1",
        "watch.limits.train=4",
    )


def launched(
    output: Path, overrides: list[str], *words: str, env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start `mrl.launch` with two ranks; `env` is the environment."""
    launch = [sys.executable, "-m", "mrl.launch", "--standalone", "--nproc-per-node", "2", *words]
    return subprocess.Popen(
        [*launch, "-m", "mrl", "train", str(TOY_RECIPE), *overrides],
        cwd=REPOSITORY,
        env={**(env or environment(PYTHONPATH=str(REPOSITORY))), "MRL_TEST_RUN": str(output)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.release
@pytest.mark.timeout(600)
def test_a_stopped_rank_is_named_and_later_starts_give_the_bits_of_a_run_without(
    toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    overrides = overrides_of(toy, recorded, output)
    process = launched(output, overrides, "--max-restarts", "1")
    seen: set[int] = set()
    for _ in range(2):  # the second start is stopped, too: it has no restart left
        ranks = watched(process, seen)
        seen |= {rank.pid for rank in ranks}
        stopped = stop_in(ranks[0], "train", 1, 0.0, 100)
        start = time.monotonic()
        assert stopped is not None
        while any(Path(f"/proc/{rank.pid}").exists() for rank in ranks):
            assert time.monotonic() < start + 60
            time.sleep(0.1)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 72, printed
    assert "mrl: starting the ranks again, restart 1 of 1" in printed
    assert printed.count("is stopped (SIGSTOP)") == 2 * 2  # half of the limit, then the block
    found = json.loads((output / "failure.json").read_text())
    assert (found["exit_code"], found["phase"], found["step"]) == (72, "train", stopped.step)
    assert 4 < found["since_s"] < 8
    for rank in range(2):
        assert "most recent call first" in (output / f"logs/stacks_rank_{rank}.txt").read_text()
    assert len(metrics(output)) == stopped.step
    assert processes_of(output) == []
    last = launched(output, overrides)
    printed, _ = last.communicate(timeout=300)
    assert last.returncode == 0, printed
    whole = tmp_path / "whole"
    run_ranks(2, trained, overrides_of(toy, recorded, whole), folder=tmp_path / "out")
    assert_same(output, whole)


def two_nodes(toy: Toy, recorded: Path, output: Path, *more: str) -> list[subprocess.Popen[str]]:
    """Two launchers with a rank each, which count as two nodes, in the training pass."""
    overrides = toy.overrides(
        output,
        f"debug.load_rollouts={recorded / 'rollouts'}",
        "parallel.expert_model_parallel_size=2",
        "train.num_steps=4",
        "checkpoint.save_every=1",
        "watch.limits.train=4",
        *more,
    )
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}", "--rdzv-id", "two"]
    train = ["-m", "mrl", "train", str(TOY_RECIPE), *overrides]
    return [
        subprocess.Popen(
            [sys.executable, "-m", "mrl.launch", *words, *train],
            cwd=REPOSITORY,
            env=environment(MRL_TEST_RUN=str(output), PYTHONPATH=str(REPOSITORY)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]  # fmt: skip


def rank_of(launcher: subprocess.Popen[str]) -> tuple[int, Rank]:
    """The rank that a launcher has started, with its number."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and launcher.poll() is None:
        for rank in ranks_of(launcher.pid):
            return int(psutil.Process(rank.pid).environ()["RANK"]), rank
        time.sleep(0.05)
    raise AssertionError(launcher.communicate())


@pytest.mark.release
@pytest.mark.timeout(400)
def test_a_stopped_rank_of_another_node_is_named(toy: Toy, recorded: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    launchers = two_nodes(toy, recorded, output)
    ranks = dict(map(rank_of, launchers))
    stopped = stop_in(ranks[1], "train", 1, 0.0, 100)
    assert stopped is not None
    printed = [launcher.communicate(timeout=100)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [72, 72], printed
    found = json.loads((output / "failure.json").read_text())
    assert (found["exit_code"], found["phase"], found["step"]) == (72, "train", stopped.step)
    assert found["rank"] == 1
    assert len(found["ranks"]) == 2
    assert f"rank 0: train of step {stopped.step}, S, all_" in found["ranks"][0]
    assert "not over)" in found["ranks"][0]
    assert 4 < found["since_s"] < 8
    for rank in range(2):
        assert "most recent call first" in (output / f"logs/stacks_rank_{rank}.txt").read_text()
    assert processes_of(output) == []


FAILS = """
import os
from mrl.algorithms import gspo
from mrl.algorithms.gspo import *

def loss(logprobs, batch, config):
    if os.environ["RANK"] == "1":
        raise ValueError("the bug of rank 1")
    return gspo.loss(logprobs, batch, config)
"""


@pytest.mark.release
@pytest.mark.timeout(400)
def test_the_error_of_a_rank_stays_the_cause_when_another_node_loses_it(
    toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    """Its own record comes first, and both launchers end with its code, not that of a lost rank."""
    output, algorithm = tmp_path / "run", tmp_path / "fails.py"
    algorithm.write_text(FAILS)
    launchers = two_nodes(toy, recorded, output, f"algorithm.name={algorithm}")
    printed = [launcher.communicate(timeout=300)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [1, 1], printed
    found = json.loads((output / "failure.json").read_text())
    assert (found["exit_code"], found["rank"]) == (1, 1)
    assert found["what"] == "ValueError: the bug of rank 1"
    for text in printed:
        assert "mrl: ValueError: the bug of rank 1" in text
    assert sum("Traceback (most recent call last)" in text for text in printed) == 1
    assert processes_of(output) == []


@pytest.mark.release
@pytest.mark.timeout(400)
@pytest.mark.parametrize("at", [0, 1], ids=["of-rank-0", "of-rank-1"])
def test_a_node_that_is_not_heard_from_ends_both(
    toy: Toy, recorded: Path, tmp_path: Path, at: int
) -> None:
    """Monitor and rank of one node are stopped together, as if the node or its network had died."""
    output = tmp_path / "run"
    launchers = two_nodes(toy, recorded, output)
    ranks = dict(map(rank_of, launchers))
    frozen = [
        psutil.Process(ranks[at].pid),
        *psutil.Process(ranks[at].pid).children(recursive=True),
    ]
    while ranks[0].pulse().step < 1:
        time.sleep(0.05)
    for process in frozen:
        process.suspend()
    start = time.monotonic()
    other = ranks[1 - at].pid
    while Path(f"/proc/{other}").exists():
        assert time.monotonic() < start + 2 * SILENT_S
        time.sleep(0.1)
    assert time.monotonic() > start + SILENT_S - 5
    for process in frozen:
        os.kill(process.pid, signal.SIGKILL)
    printed = [launcher.communicate(timeout=100)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [71, 71], printed
    text = "sends nothing" if at == 1 else "the node of rank 0 ("
    assert text in "".join(printed) + (output / "failure.json").read_text()
    assert processes_of(output) == []


@pytest.mark.release
@pytest.mark.timeout(400)
def test_two_nodes_that_train_to_the_end_raise_no_alarm(
    toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    launchers = two_nodes(toy, recorded, output)
    for launcher in launchers:
        rank_of(launcher)
    printed = [launcher.communicate(timeout=300)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], printed
    assert "watchdog" not in "".join(printed)
    assert "sends nothing" not in "".join(printed)
    assert not (output / "failure.json").exists()
    assert len(metrics(output)) == 4
    assert processes_of(output) == []
