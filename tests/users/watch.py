"""The watchdog: ranks that are stopped or wait for ever, and what their user reads."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress

import psutil

from tests.loop.forked import Command
from tests.users.things import User, thing
from tests.watch.ranks import Rank, page_of, stop_in

STEPS = "train.num_steps=3"
START_S = 180.0


def rank_of(command: Command) -> Rank:
    """Return the rank of a run of one process once its watchdog is there."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and command.poll() is None:
        for page in page_of(command.pid):
            return Rank(command.pid, page)
        time.sleep(0.02)
    raise AssertionError(command.poll())


@thing("I misspell a phase in watch.limits.", is_long=False)
def unknown_phase(user: User) -> str:
    printed = user.mrl("check", *user.recipe("run"), "watch.limits.trian=60", code=2)
    assert "watch.limits.trian" in printed
    assert "'train'" in printed
    return printed.strip()


@thing("I set the limit of a phase to 0 to switch it off.", is_long=False)
def limit_of_zero(user: User) -> str:
    printed = user.mrl("check", *user.recipe("run"), "watch.limits.train=0", code=2)
    assert "watch.limits.train: Input should be greater than 0, got 0" in printed
    return printed.strip()


@thing(
    "My training process is stopped for good, and I start the run again.",
    wall="A stopped rank hangs a job for ever, without a word.",
)
def stopped_for_good(user: User) -> str:
    keys = (STEPS, "checkpoint.save_every=1")
    command = user.start("train", *user.recipe("run", *keys, "watch.limits.train=4"))
    stopped = stop_in(rank_of(command), "train", 1, 0.0, START_S)
    assert stopped is not None
    assert command.wait(60) == -signal.SIGKILL
    found = json.loads((user.folder / "run/failure.json").read_text())
    assert (found["exit_code"], found["rank"], found["phase"]) == (72, 0, "train")
    assert 4 < found["since_s"] <= 8
    assert found["ranks"]
    assert (user.folder / "run/logs/stacks_rank_0.txt").stat().st_size
    user.train("run", *keys)
    return f"{found['what']}; the second start finished the run"


@thing("I stop the training process in a debugger, look, and let it continue.")
def stopped_for_a_look(user: User) -> str:
    command = user.start("train", *user.recipe("run", STEPS))
    rank = rank_of(command)
    assert stop_in(rank, "train", 0, 0.0, START_S) is not None
    os.kill(rank.pid, signal.SIGCONT)
    assert command.wait(START_S) == 0
    assert not (user.folder / "run/failure.json").exists()
    return "the run ended as without"


@thing(
    "All processes of my engine are stopped in a weight sync, and nobody lets them continue.",
    wall="An engine that hangs in a weight sync is found after ten minutes only.",
)
def engine_stopped_in_a_sync(user: User) -> str:
    command = user.start("train", *user.recipe("run", STEPS, "rollout.stall_timeout_s=8"))
    rank = rank_of(command)
    deadline = time.monotonic() + START_S
    while (rank.pulse().phase, rank.pulse().step) != ("sync", 1):
        assert command.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    tree = psutil.Process(rank.pid).children(recursive=True)
    engine = [each for each in tree if "mrl.engines.sglang.child" in each.cmdline()]
    assert engine
    begun = time.monotonic()
    for each in (*engine, *engine[0].children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            each.suspend()
    while psutil.pid_exists(engine[0].pid) and engine[0].is_running():
        assert time.monotonic() < begun + 60
        time.sleep(0.05)
    seconds = time.monotonic() - begun
    assert command.wait(START_S) == 0
    printed = (command.folder / "stdout").read_text() + (command.folder / "stderr").read_text()
    assert "no answer to POST /" in printed
    rows = [
        json.loads(line) for line in (user.folder / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert [row["rollout/engine_restarts"] for row in rows] == [0, 1, 0]
    assert seconds < 8 + 8
    return f"found after {seconds:.0f} s with stall_timeout_s=8, another engine did the step"
