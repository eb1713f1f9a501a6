"""A resume whose checkpoint comes from a slow disk is no hang, and one whose disk hangs is found."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.loop.conftest import REPOSITORY, Toy, environment
from tests.loop.test_run import metrics, processes_of
from tests.loop.test_watchdog import launched, overrides_of, watched
from tests.watch.ranks import Rank

SLOW = REPOSITORY / "tests/loop/slow_reads"
LIMIT_S = 4.0
pytestmark = [pytest.mark.release, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def started(
    toy: Toy, recorded: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """A run of two ranks with a checkpoint of two steps, and the keys that continue it."""
    output = tmp_path_factory.mktemp("started") / "run"
    overrides = [*overrides_of(toy, recorded, output), f"watch.limits.load={LIMIT_S}"]
    first = launched(output, [*overrides, "train.num_steps=2"])
    printed, _ = first.communicate(timeout=300)
    assert first.returncode == 0, printed
    return output, overrides


def slowed(output: Path, overrides: list[str], **how: str) -> subprocess.Popen[str]:
    more = environment(PYTHONPATH=f"{SLOW}:{REPOSITORY}", **how)
    return launched(output, overrides, env=more)


def seconds_in(process: subprocess.Popen[str], rank: Rank, last: str) -> dict[str, float]:
    """How long a rank is in each phase, until `last` is over or the process ends."""
    found: dict[str, float] = {}
    before = time.monotonic()
    while process.poll() is None:
        phase, now = rank.pulse().phase, time.monotonic()
        if found.get(last) and phase != last:
            break
        found[phase] = found.get(phase, 0.0) + now - before
        before = now
        time.sleep(0.01)
    return found


def test_a_disk_that_hangs_under_a_checkpoint_is_found(
    started: tuple[Path, list[str]],
) -> None:
    output, overrides = started
    how = {"MRL_TEST_PAUSE_S": "0.02", "MRL_TEST_HANGS_AFTER": "5"}  # rank 0 reads its part first
    process = slowed(output, [*overrides, "train.num_steps=3"], **how)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 72, printed
    found = json.loads((output / "failure.json").read_text())
    assert (found["rank"], found["phase"]) == (1, "load:checkpoint"), found
    assert LIMIT_S < found["since_s"] < 2 * LIMIT_S
    assert any("file_digest" in line for line in found["log_tail"])
    assert processes_of(output) == []


def test_a_checkpoint_that_takes_20_times_longer_than_the_weights_raises_no_alarm(
    started: tuple[Path, list[str]],
) -> None:
    output, overrides = started
    process = slowed(output, [*overrides, "train.num_steps=3"], MRL_TEST_PAUSE_S="1.5")
    rank = watched(process, set())[0]
    seconds = seconds_in(process, rank, "load:checkpoint")
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    assert seconds["load:checkpoint"] > 20 * seconds["load"], seconds
    assert seconds["load:checkpoint"] > 5 * LIMIT_S, seconds
    assert "makes no progress" not in printed
    assert len(metrics(output)) == 3
