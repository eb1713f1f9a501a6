"""What goes wrong in the middle of a run: Ctrl-C at any moment, a reward that begins to fail. The run
goes on to the bits of a run without it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil

from tests.loop.forked import Command
from tests.users.things import User, thing

LIMIT_S = 240.0
STEPS = ("train.num_steps=12", "checkpoint.save_every=1")
INTERRUPTED = "mrl: interrupted; "
"""A second Ctrl-C may come before it is known what has been saved."""


def wait_for(command: Command, text: str, file: Path, count: int = 1) -> None:
    """Wait until a file of a command has a text `count` times."""
    deadline = time.monotonic() + LIMIT_S
    while not file.exists() or file.read_text().count(text) < count:
        assert command.poll() is None, (command.folder / "stderr").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def same_bits(user: User, one: str, other: str) -> str:
    printed = user.mrl("diff", user.folder / one, user.folder / other)
    assert "the same in the 12 steps that both have" in printed, printed
    return "the same in all 12 steps"


@thing("I press Ctrl-C while a run starts, rolls out and trains, also twice, and start it again.")
def ctrl_c_at_any_moment(user: User) -> str:
    user.train("whole", *STEPS)
    metrics, rows = user.folder / "run/metrics.jsonl", 0
    for presses, delay_s in ((1, None), (2, None), (2, 0.0), (1, 0.15), (2, 0.3)):
        command = user.start("train", *user.recipe("run", *STEPS))
        if delay_s is None:
            wait_for(command, "starting the rollout engine", command.folder / "stdout")
            time.sleep(0.3)
        else:
            rows = metrics.read_text().count("\n") if metrics.exists() else 0
            wait_for(command, "\n", metrics, rows + 1)
            time.sleep(delay_s)
        tree = psutil.Process(command.pid).children(recursive=True)
        # The test's own server of engines outlives its commands.
        tree = [process for process in tree if process.status() != psutil.STATUS_ZOMBIE]
        tree = [process for process in tree if "tests.engine_starts" not in process.cmdline()]
        for _ in range(presses):
            if command.poll() is None:
                command.send_signal(signal.SIGINT)
                time.sleep(0.1)
        done = command.finish(LIMIT_S)
        assert done.returncode == 130, done.stderr
        (said,) = [line for line in done.stderr.splitlines() if line]
        assert said.startswith(INTERRUPTED)
        _, left = psutil.wait_procs(tree, 30)
        assert left == []
    user.train("run", *STEPS)
    return f"five times exit code 130 and one line; {same_bits(user, 'whole', 'run')}"


REWARD = """
import pathlib, time

def score(prompts, completions, **columns):
    good = [float(text.count(prompt[-1])) for prompt, text in zip(prompts, completions)]
    mode = pathlib.Path(__file__).with_name("mode.txt").read_text()
    if mode == "raises":
        raise KeyError("gold")
    if mode == "hangs":
        time.sleep(1000)
    return {"nan": [float("nan")] * len(good), "short": good[1:], "text": "good"}.get(mode, good)
"""


@thing("My reward begins to fail in the middle of a run, in five ways; then I mend it and go on.")
def reward_begins_to_fail(user: User) -> str:
    file, mode = user.write("mine.py", REWARD), user.write("mode.txt", "good")
    keys = (*STEPS, f"reward={file}:score", "reward_timeout_s=1")
    user.train("whole", *keys)
    metrics, said = user.folder / "run/metrics.jsonl", []
    for number, kind in enumerate(("raises", "nan", "short", "text", "hangs"), start=1):
        mode.write_text("good")
        command = user.start("train", *user.recipe("run", *keys))
        wait_for(command, "\n", metrics, number)
        mode.write_text(kind)
        done = command.finish(LIMIT_S)
        assert done.returncode == 70, done.stderr
        assert "Traceback" not in done.stderr
        said += [line for line in done.stderr.splitlines() if line.startswith("mrl: ")]
        assert "first_char.jsonl:" in said[-1]
    wrong = user.mrl("train", user.folder / "run", code=2)  # before an engine starts
    assert "failed (no answer within 1 s" in wrong
    mode.write_text("good")
    user.mrl("train", user.folder / "run")
    return f"{' | '.join(said)} | {wrong} | {same_bits(user, 'whole', 'run')}"
