"""Who hangs, from what the ranks show: limits and verdicts as functions."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from mrl.config.watch import Phase
from mrl.system import heartbeat
from mrl.system.heartbeat import Collective, Pulse
from mrl.watch.process import BEAT_BYTES, Process, innermost
from mrl.watch.verdict import Limits, Observation, Verdict, Watch


def seen(phase: str, position: int, beats: int, state: str = "R", step: int = 3) -> Observation:
    return Observation(Pulse(phase, step, position, beats), state)


def watch(given: dict[str, float] | None = None, **least: float) -> Watch:
    return Watch(Limits(given or {}, least, 1800.0))


def run(watch: Watch, seconds: float, *ranks: Observation) -> Verdict | None:
    for _ in range(round(2 * seconds)):
        if found := watch.tick(0.5, ranks):
            return found
    return None


def test_limits_are_given_or_learned() -> None:
    limits = Limits({"train": 7.0}, {"rollout": 900.0}, 1800.0)
    assert limits.of("train", 100.0) == 7.0
    assert limits.of("save", None) == 1800.0  # nobody was through it yet
    assert limits.of("save", 2.0) == 60.0
    assert limits.of("save", 50.0) == 250.0
    assert limits.of("rollout", 50.0) == 900.0  # an engine may take as long
    assert limits.of("rollout", 50.0, is_stopped=True) == 250.0
    assert limits.of("save", None, is_stopped=True) == 60.0


def test_a_stopped_rank_is_at_fault_and_not_the_one_that_waits() -> None:
    at_once = watch({"train": 4.0, "score": 4.0})
    assert run(at_once, 60, seen("train", 9, 5), seen("train", 9, 5)) is not None
    found = run(watch({"train": 4.0}), 60, seen("train", 9, 5), seen("train", 9, 9, "T"))
    assert found is not None
    assert (found.rank, found.how, found.pulse.phase) == (1, "stopped", "train")
    assert 4.0 < found.since_s <= 5.0
    assert found.text() == (
        "rank 1 is stopped (SIGSTOP): 4.5 s in phase train of step 3, whose limit is 4 s"
    )


def test_the_rank_that_is_furthest_behind_is_at_fault() -> None:
    follower = watch({"rollout": 10.0, "score": 2.0})
    ahead = seen("score", 12, 1000)
    assert run(follower, 9, ahead, seen("rollout", 11, 7)) is None  # its wait is within its limit
    found = run(follower, 2, ahead, seen("rollout", 11, 7))
    assert found is not None
    assert (found.rank, found.how) == (1, "stuck")


def test_a_rank_that_waits_in_a_collective_waits_for_the_one_that_does_not() -> None:
    waits = seen("save", 9, 5)._replace(
        collective=Collective("all_gather", "dp", 91, is_over=False)
    )
    hangs = seen("save", 9, 8)._replace(collective=Collective("all_gather", "dp", 90, is_over=True))
    for ranks in ([waits, hangs, waits], [hangs, waits, waits]):
        found = run(watch({"save": 4.0}), 60, *ranks)
        assert found is not None
        assert found.rank == ranks.index(hangs)


def test_a_rank_that_waits_for_one_that_moves_does_not_hang() -> None:
    """Rank 1 has no engine: it shows no progress while rank 0 generates."""
    follower = watch({"rollout": 5.0})
    for beats in range(50):
        assert run(follower, 4, seen("rollout", 11, beats), seen("rollout", 11, 3)) is None


def test_a_rank_that_is_late_is_named_once() -> None:
    follower = watch({"rollout": 10.0})
    ranks = seen("score", 12, 1000), seen("rollout", 11, 7)
    run(follower, 4, *ranks)
    assert follower.late() is None
    run(follower, 2, *ranks)
    late = follower.late()
    assert late is not None
    assert late.rank == 1
    assert follower.late() is None
    together = watch({"train": 10.0})  # nobody is behind: one of them computes
    run(together, 6, seen("train", 9, 5), seen("train", 9, 5))
    assert together.late() is None


def test_a_limit_is_learned_once_all_ranks_were_through_the_phase() -> None:
    follower = watch()
    start = [seen("train", 1, 0)] * 2
    assert run(follower, 30, *start) is None
    follower.tick(0.5, [seen("log", 2, 1), start[1]])
    assert run(follower, 500, seen("log", 2, 1), start[1]) is None  # the first limit
    follower.tick(0.5, [seen("log", 2, 1)] * 2)
    again = [seen("train", 3, 2)] * 2
    assert run(follower, 2600, *again) is None  # 5 x 530 s
    found = run(follower, 200, *again)
    assert found is not None
    assert found.limit_s == pytest.approx(5 * 530, abs=5)


def test_what_one_tenant_needs_says_nothing_of_another() -> None:
    follower, quick = watch(), Pulse("train", 3, 9, 9, "quick")
    for beats in range(9, 20):
        follower.tick(0.5, [Observation(quick._replace(beats=beats, position=beats), "R")])
    assert run(follower, 61, Observation(quick._replace(position=20), "R")) is not None
    slow = Observation(Pulse("train", 0, 30, 30, "slow"), "R")
    assert run(follower, 1799, slow) is None  # its first step
    found = run(follower, 2, slow)
    assert found is not None
    assert "in phase train of step 0 of tenant slow, whose limit is 1800 s" in found.text()


def test_the_first_limit_of_a_phase_does_not_come_from_other_work_under_its_name() -> None:
    """A resume: the weights load in 4 s, then the checkpoint, with Adam's moments, in 80."""
    follower = watch()
    for position, phase, seconds in ((1, "load", 4), (2, "start", 30), (3, "load:checkpoint", 80)):
        ranks = [seen(phase, position, position, step=-1)] * 2
        assert run(follower, seconds, *ranks) is None
    assert run(follower, 1700, *ranks) is None
    assert run(follower, 100, *ranks) is not None
    given = watch({"load": 10.0})
    found = run(given, 11, seen("load:checkpoint", 1, 1))
    assert found is not None
    assert found.limit_s == 10.0


def test_a_tenant_that_loads_is_learned_anew() -> None:
    """It may be another one of the same name, with a larger adapter."""
    follower = watch()
    for position, phase in enumerate(("load", "train", "log", "load", "train", "log")):
        pulse = Pulse(phase, 0, position, position, "ann")
        if position < 4:
            follower.tick(0.5, [Observation(pulse, "R")])
        elif phase == "train":
            assert run(follower, 1799, Observation(pulse, "R")) is None


def test_a_rank_that_leads_engines_is_seen_and_holds_up_nobody() -> None:
    leads = seen(heartbeat.SUPERVISE, 0, 3, step=-1)
    follower = watch({"train": 100.0})
    for beats in range(30):  # the trainer works, and the supervisor, which passes no phase, beats
        ranks = [
            seen("train", 9, beats),
            leads._replace(pulse=leads.pulse._replace(beats=beats)),
        ]
        assert run(follower, 20, *ranks) is None
    found = run(follower, 101, seen("train", 9, 29), leads)
    assert found is not None
    assert (found.rank, found.how) == (0, "stuck")
    for state, how in (("T", "stopped"), ("S", "stuck"), ("Z", "gone")):
        follower = watch()
        moving = (Observation(Pulse("train", 3, 9, n), "R") for n in range(200))
        verdicts = [follower.tick(0.5, [s, leads._replace(state=state)]) for s in moving]
        found = next(each for each in verdicts if each)
        assert (found.rank, found.how, found.limit_s) == (1, how, 60.0)
    follower = watch()  # its last sign was long before it was stopped
    states = ["S"] * 4 + ["T"] * 200
    verdicts = [
        follower.tick(0.5, [s, leads._replace(state=state)])
        for s, state in zip(
            (Observation(Pulse("train", 3, 9, n), "R") for n in range(204)), states, strict=True
        )
    ]
    found = next(each for each in verdicts if each)
    assert (found.rank, found.how) == (1, "stopped")
    trained = watch()  # ranks that pass no phases are not awaited before a limit is learned
    for ranks in ([seen("save", 1, 1), leads], [seen("log", 2, 2), leads]):
        trained.tick(0.5, ranks)
    again = (leads._replace(pulse=leads.pulse._replace(beats=n)) for n in range(200))
    assert any(trained.tick(0.5, [seen("save", 3, 3), each]) for each in again)


def test_a_monitor_that_did_not_run_blames_nobody() -> None:
    follower = watch({"train": 60.0})
    assert follower.tick(0.5, [seen("train", 1, 1)]) is None
    assert follower.tick(10_000.0, [seen("train", 1, 1)]) is None  # the node was suspended


def test_a_rank_that_has_left_is_not_at_fault() -> None:
    """Rank 0 may still close its trackers for minutes when the process of rank 1 is gone."""
    follower = watch({"log": 10.0})
    left = seen(heartbeat.LEFT, 13, 6, "")
    assert run(follower, 9, seen("log", 14, 8), left) is None
    found = run(follower, 9, seen("log", 14, 8), left)
    assert found is not None
    assert (found.rank, found.how) == (0, "stuck")
    assert run(watch(), 10_000, left, left) is None


def test_a_page_says_what_the_rank_does() -> None:
    path = heartbeat.open_page()
    try:
        descriptor = os.open(path, os.O_RDONLY)
        memory = mmap.mmap(descriptor, heartbeat.SIZE, access=mmap.ACCESS_READ)
        os.close(descriptor)
        assert heartbeat.read_page(memory) == Pulse("start", -1, 0, 0)
        heartbeat.begin_step(4)
        with heartbeat.phase("sync"):
            with heartbeat.phase("load"):
                heartbeat.beat()
                assert heartbeat.read_page(memory) == Pulse("load", 4, 3, 4)
            assert heartbeat.read_page(memory).phase == "sync"
        assert heartbeat.read_page(memory).phase == "log"
        with heartbeat.phase("save:snapshot"), heartbeat.phase("save"):
            assert heartbeat.read_page(memory).phase == "save:snapshot"
        heartbeat.leave()
        assert heartbeat.read_page(memory).phase == heartbeat.LEFT
    finally:
        heartbeat.close_page()
    heartbeat.beat()
    with heartbeat.phase("train"):  # nothing is open
        pass


def test_bytes_that_a_rank_moves_are_progress_where_it_loads_or_saves(tmp_path: Path) -> None:
    path, file = heartbeat.open_page(), tmp_path / "shard"
    file.write_bytes(bytes(4 * BEAT_BYTES))
    (tmp_path / "stacks").touch()
    try:
        own = Process.open(0, os.getpid(), path, str(tmp_path / "stacks"))
        for phase, is_progress in (("load:checkpoint", True), ("save", True), ("rollout", False)):
            with heartbeat.phase(phase):
                before = own.see().pulse
                waited = own.see().pulse.beats - before.beats
                assert waited <= is_progress  # seeing reads too: it may complete one more beat
                file.read_bytes()
                moved = own.see().pulse.beats - before.beats
                assert moved >= 4 if is_progress else moved == 0
        with heartbeat.phase("save:finish"):  # a fork writes for the rank
            before, said = own.see().pulse, os.pipe()
            if not (pid := os.fork()):
                heartbeat.register_writer()
                file.write_bytes(bytes(8 * BEAT_BYTES))
                os.write(said[1], b"x")
                signal.pause()
            os.read(said[0], 1)
            after = own.see().pulse
            os.kill(pid, signal.SIGSTOP)
            os.waitpid(pid, os.WUNTRACED)
            halted = own.see().state
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            assert after.beats >= before.beats + 8
            assert halted == "T"
    finally:
        heartbeat.close_page()


def test_a_rank_that_has_closed_its_page_is_not_known(tmp_path: Path) -> None:
    """It may have failed before the monitor started; the others report that."""
    with subprocess.Popen(["true"]) as gone:
        pass
    for pid in (os.getpid(), gone.pid):
        shown = Process.open(0, pid, str(tmp_path / "page"), str(tmp_path / "stacks")).see()
        assert shown.text() == "not known"
        assert run(watch(), 1000, shown) is None
    other = tmp_path / "other"  # the descriptor's number may be another file's by then
    other.write_text("small")
    assert Process.open(0, gone.pid, str(other), str(other)).see().text() == "not known"
    assert Process.open(0, gone.pid, "/proc/self/mem/x", str(other)).see().text() == "not known"


def test_a_rank_that_is_never_known_does_not_keep_limits_from_being_learned() -> None:
    follower, unknown = watch(), Observation(Pulse("", 0, 0, 0), "")
    follower.tick(0.5, [seen("train", 1, 0), unknown])
    follower.tick(0.5, [seen("log", 2, 1), unknown])
    follower.tick(0.5, [seen("train", 3, 2), unknown])
    found = run(follower, 100, seen("train", 3, 2), unknown)
    assert found is not None
    assert found.limit_s == 60


def test_ranks_are_level_again_after_work_for_a_tenant_that_failed_on_some() -> None:
    """A rank whose work raises comes through fewer phases than the others."""
    positions = []
    for fails in (False, True):
        path = heartbeat.open_page()
        try:
            descriptor = os.open(path, os.O_RDONLY)
            memory = mmap.mmap(descriptor, heartbeat.SIZE, access=mmap.ACCESS_READ)
            os.close(descriptor)
            heartbeat.begin_step(7)
            with suppress(ValueError), heartbeat.working_for("ann", 2):
                assert heartbeat.read_page(memory).where == "log of step 2 of tenant ann"
                if fails:
                    raise ValueError
                with heartbeat.phase("train"), heartbeat.phase("save"):
                    assert heartbeat.read_page(memory).where == "save of step 2 of tenant ann"
            pulse = heartbeat.read_page(memory)
            assert pulse.where == "log of step 7"
            positions.append(pulse.position)
        finally:
            heartbeat.close_page()
    assert positions[0] == positions[1]


def test_the_recipe_names_every_phase() -> None:
    assert Phase.__args__ == heartbeat.PHASES  # type: ignore[attr-defined]


def test_the_report_has_the_innermost_calls_of_the_main_thread() -> None:
    stacks = (
        'Stack (most recent call first):\n  File "b.py", line 2 in train\n'
        '  File "c.py", line 3 in main\n'
        'Thread 0x01 (most recent call first):\n  File "a.py", line 1 in wait\n\n'
        'Current thread 0x02 (most recent call first):\n  File "b.py", line 2 in train\n'
    )
    before = 'Stack (most recent call first):\n  File "old.py", line 1 in long_ago\n'
    for written in (stacks, stacks[: stacks.index("Thread")], before + stacks):
        assert [line.strip() for line in innermost(written)] == [
            "Stack (most recent call first):",
            'File "b.py", line 2 in train',
            'File "c.py", line 3 in main',
        ]
    assert innermost("") == []
