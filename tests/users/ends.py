"""How a run ends: Ctrl-C, and the command that goes on."""

from __future__ import annotations

import json
import signal
import time

import psutil

from tests.users.things import User, thing

LIMIT_S = 180.0
STEPS = ("train.num_steps=4", "checkpoint.save_every=1")


@thing("I press Ctrl-C in the middle of a run, and start it again.")
def ctrl_c(user: User) -> str:
    command = user.start("train", *user.recipe("run", *STEPS))
    metrics = user.folder / "run/metrics.jsonl"
    deadline = time.monotonic() + LIMIT_S
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        assert command.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    tree = psutil.Process(command.pid).children(recursive=True)
    # The test's own server of engines outlives its commands.
    tree = [process for process in tree if "tests.engine_template" not in process.cmdline()]
    assert tree  # and the engine's processes, where this command was the first that had one
    command.send_signal(signal.SIGINT)
    done = command.finish(LIMIT_S)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("mrl: ")]
    assert said.startswith("mrl: interrupted; saved: a checkpoint with ")
    assert said.endswith("run/config.yaml"), said
    gone, left = psutil.wait_procs(tree, 30)
    assert (len(gone), left) == (len(tree), [])
    assert not (user.folder / "run/failure.json").exists()
    user.train("run", *STEPS)
    rows = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert rows == [0, 1, 2, 3]
    return f"exit code 130 and one line; {len(tree)} processes are gone; the next start finished"
