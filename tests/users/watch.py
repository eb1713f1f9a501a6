"""The watchdog: ranks that are stopped or wait for ever, and what their user reads."""

from __future__ import annotations

import json
import os
import signal
import time

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
