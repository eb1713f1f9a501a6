"""Restarts after a lost rank: snapshots in the memory of the node, and what they leave."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from tests.users.things import User, thing

STEPS = "train.num_steps=4"


def started(user: User, run: str, num_rows: int, *more: str) -> str:
    """Start a run, kill it with SIGKILL when it has `num_rows` steps, and start it again."""
    command = user.start("train", *user.recipe(run, STEPS, *more))
    metrics = user.folder / run / "metrics.jsonl"
    deadline = time.monotonic() + 180
    while not metrics.exists() or len(metrics.read_text().splitlines()) < num_rows:
        assert command.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    command.send_signal(9)
    command.wait(60)
    return user.train(run, STEPS, *more)


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@thing(
    "I kill a run that saves only at its end, and start it again with snapshots in memory.",
    wall="A lost rank costs everything since the last checkpoint.",
)
def snapshot_in_memory(user: User) -> str:
    keys = ("checkpoint.save_every=0", "checkpoint.snapshot_every=1")
    printed = started(user, "run", 3, *keys)
    begun = [line["step"] for line in lines(user.folder / "run/history.jsonl")]
    assert begun[0] == 0
    assert begun[1] >= 2, printed
    assert [row["step"] for row in lines(user.folder / "run/metrics.jsonl")] == [0, 1, 2, 3]
    user.train("whole", STEPS, *keys)
    assert "the same" in user.mrl("diff", user.folder / "run", user.folder / "whole")
    return f"the second start continued with step {begun[1]}, and both runs are the same"


@thing("I give a file as the folder for snapshots.")
def snapshot_folder(user: User) -> str:
    (user.folder / "file").write_text("no folder")
    folder = f"checkpoint.snapshot_folder={user.folder / 'file'}"
    printed = user.train("run", STEPS, "checkpoint.snapshot_every=1", folder, code=2)
    assert "checkpoint.snapshot_folder" in printed
    assert "Not a directory" in printed
    return "refused in one line that names the key and the path"


@thing("I look for what a finished run with snapshots has left on the node.")
def nothing_left(user: User) -> str:
    folder = user.folder / "node"
    keys = ("checkpoint.snapshot_every=1", f"checkpoint.snapshot_folder={folder}")
    user.train("run", "train.num_steps=3", *keys)
    assert list(folder.iterdir()) == []
    assert not (user.folder / "run/checkpoints/snapshot.json").exists()
    rows = lines(user.folder / "run/metrics.jsonl")
    assert rows[2]["time/snapshot_s"] > 0
    assert os.listdir(user.folder / "run/checkpoints/iter_0000003")
    return f"nothing; a snapshot took {rows[2]['time/snapshot_s']:.2f} s"
