"""What the launcher sees of ranks that hang before the watchdog has begun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.launch import ranks
from mrl.launch.ranks import LauncherWatchdog
from mrl.system.launcher import LAUNCH_FOLDER, signal_arrived, signal_watchdog_running
from mrl.system.proc import is_stopped, stat_of
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


def _sleeps(pid: int) -> bool:
    """Whether the process sleeps in its own program. `Popen` returns before its environment is set."""
    found = stat_of(pid)
    has_rank = b"RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    return found is not None and found.state == "S" and has_rank


@pytest.fixture
def sleeping(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two ranks that do nothing."""
    made = [
        subprocess.Popen(["sleep", "60"], env=os.environ | {"RANK": str(rank)}) for rank in (2, 3)
    ]
    for each in made:
        wait_until(lambda each=each: _sleeps(each.pid), "it has started")
    monkeypatch.setattr(ranks, "children", lambda: [each.pid for each in made])
    monkeypatch.setattr(ranks, "STOPPED_S", 2.0)
    monkeypatch.setattr(ranks, "IDLE_S", 4.0)
    yield made
    for each in made:
        each.kill()
        each.wait()


def looked(watch: LauncherWatchdog, times: int = 7) -> LauncherWatchdog:
    for _ in range(times):
        watch.check()
    return watch


def test_a_rank_that_is_stopped_in_its_start_is_killed_and_named(
    sleeping: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    watch = LauncherWatchdog(tmp_path, has_watchdog=False)
    assert looked(watch).failure is None  # idle, and of a command without a watchdog
    sleeping[1].send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(sleeping[1].pid), "it stops")
    found = looked(watch, 3).failure
    assert found is not None
    assert (found.exit_code, found.rank, found.phase) == (72, 3, "start")
    assert found.what.startswith("rank 3 is stopped (SIGSTOP): 3 s while starting")
    assert sleeping[1].wait(10) == -signal.SIGKILL
    assert sleeping[0].poll() is None


def test_a_stopped_rank_is_left_to_the_watchdog_once_it_has_begun(
    sleeping: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAUNCH_FOLDER, str(tmp_path))
    signal_watchdog_running()
    sleeping[1].send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(sleeping[1].pid), "it stops")
    assert looked(LauncherWatchdog(tmp_path, has_watchdog=True)).failure is None
    assert sleeping[1].poll() is None


def test_a_rank_that_hangs_while_it_imports_is_told_from_one_that_waits_for_it(
    sleeping: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAUNCH_FOLDER, str(tmp_path))
    signal_arrived(2)
    found = looked(LauncherWatchdog(tmp_path, has_watchdog=True)).failure
    assert found is not None
    assert (found.exit_code, found.rank) == (72, 3)
    assert "neither computes nor reads: 5 s" in found.what
    assert sleeping[0].poll() is None


def test_a_rank_that_reads_is_not_idle(
    sleeping: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = "print(len(open('/dev/zero', 'rb').read(1 << 17)), flush=True)"
    code = f"import sys\nfor _ in sys.stdin: {read}"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"RANK": "0"},
    ) as reading:  # fmt: skip
        monkeypatch.setattr(ranks, "children", lambda: [reading.pid])
        assert reading.stdin
        assert reading.stdout
        watch = LauncherWatchdog(tmp_path, has_watchdog=True)
        for _ in range(8):
            reading.stdin.write(b"\n")
            reading.stdin.flush()
            reading.stdout.readline()
            watch.check()
        assert watch.failure is None
        reading.stdin.close()


@pytest.mark.release
@pytest.mark.timeout(300)
def test_a_rank_that_does_not_come_is_named_under_torchrun_too(tmp_path: Path) -> None:
    meet = (
        "import os, time\n"
        "if os.environ['RANK'] == '1': time.sleep(300)\n"
        "from parallel.dims import ParallelDims\n"
        "from parallel.mesh import init_mesh\n"
        "init_mesh(ParallelDims(world=2, tp=1, pp=1, vpp=1, cp=1, ep=1, etp=1), 0, timeout_s=5)\n"
    )
    (tmp_path / "meet.py").write_text(meet)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *words, str(tmp_path / "meet.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "RankLost: ranks [1] have not connected to the other ranks in 5 s" in done.stderr
