"""What goes wrong in the middle of a run: Ctrl-C at any moment, a reward that begins to fail, memory
that runs out. Each time the run goes on to the bits of a run without it."""

from __future__ import annotations

import resource
import signal
import time
from pathlib import Path

import psutil

from tests.loop.forked import Command
from tests.users.things import User, thing

LIMIT_S = 240.0
STEPS = ("train.num_steps=8", "checkpoint.save_every=1")
INTERRUPTED = "mrl: interrupted; start again to continue from the last checkpoint"


def wait_for(command: Command, text: str, file: Path, count: int = 1) -> None:
    """Wait until a file of a command has a text `count` times."""
    deadline = time.monotonic() + LIMIT_S
    while not file.exists() or file.read_text().count(text) < count:
        assert command.poll() is None, (command.folder / "stderr").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def same_bits(user: User, one: str, other: str) -> str:
    printed = user.mrl("diff", user.folder / one, user.folder / other)
    assert "the same in the 8 steps that both have" in printed, printed
    return "the same in all 8 steps"


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
        tree = [process for process in tree if "tests.engine_starts" not in process.cmdline()]
        for _ in range(presses):
            if command.poll() is None:
                command.send_signal(signal.SIGINT)
                time.sleep(0.1)
        done = command.finish(LIMIT_S)
        assert done.returncode == 130, done.stderr
        assert [line for line in done.stderr.splitlines() if line] == [INTERRUPTED]
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
    command, said = user.start("train", *user.recipe("run", *keys)), []
    wait_for(command, "\n", user.folder / "run/metrics.jsonl", 2)
    for kind in ("raises", "nan", "short", "text", "hangs"):
        mode.write_text(kind)
        if said:
            command = user.start("train", user.folder / "run")
        done = command.finish(LIMIT_S)
        assert done.returncode == 70, done.stderr
        assert "Traceback" not in done.stderr
        said += [line for line in done.stderr.splitlines() if line.startswith("mrl: ")]
        assert "first_char.jsonl:" in said[-1]
    mode.write_text("good")
    user.mrl("train", user.folder / "run")
    return f"{' | '.join(said)} | {same_bits(user, 'whole', 'run')}"


@thing("A run uses up its memory in the middle; I take smaller micro-batches and go on.")
def out_of_memory(user: User) -> str:
    keys = (*STEPS, "train.micro_batch_tokens=100000", "train.logprob_chunk_tokens=0")
    command = user.start("train", *user.recipe("run", *keys))
    wait_for(command, "\n", user.folder / "run/metrics.jsonl", 2)
    limit = psutil.Process(command.pid).memory_info().vms + (1 << 20)
    resource.prlimit(command.pid, resource.RLIMIT_AS, (limit, limit))
    done = command.finish(LIMIT_S)
    assert done.returncode == 77, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("mrl: ")]
    (next_one,) = [line for line in done.stderr.splitlines() if line.startswith("  next ")]
    user.mrl("train", user.folder / "run", "train.micro_batch_tokens=160")
    rows = (user.folder / "run/metrics.jsonl").read_text().count("\n")
    assert rows == 8
    return f"{line} | {next_one.strip()}"
