"""Disks that are full, or read-only, in the middle of a run: real ones, of a few megabytes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from mrl.commands.train import train
from mrl.config import load_recipe
from mrl.errors import RunFailed
from mrl.run.callbacks import Callback
from mrl.run.folder import RunFolder
from parallel.checkpoint.manifest import latest_step
from tests.disks import can_mount, make_read_only, mount_disk
from tests.loop.conftest import TOY_RECIPE, Toy
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not can_mount(), reason="this user may not mount a disk")


def ends(overrides: list[str], *callbacks: Callback) -> dict[str, Any]:
    """Train until the disk ends it; return what was said, and what is in the folder then."""
    folder = RunFolder(overrides[1].removeprefix("output_dir="))
    try:
        train(load_recipe(TOY_RECIPE, overrides), 1, callbacks)
    except RunFailed as error:
        last = folder.read_metrics()[-1] if folder.metrics.exists() else {"time/timestamp": 0}
        files = [str(f.relative_to(folder.root)) for f in folder.root.rglob("*") if f.is_file()]
        steps = [row["step"] for row in folder.read_metrics()]
        return {
            "text": str(error),
            "kind": type(error).__name__,
            "seconds": time.time() - last["time/timestamp"],
            "files": files,
            "steps": steps,
            "saved": latest_step(folder.checkpoints),
            "failure": (folder.root / "failure.json").exists(),
        }
    raise AssertionError("the run did not end")


class Locks(Callback):
    """The file system of the rollouts is read-only from the second step on."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk

    def on_step(self, step: int, metrics: Any, groups: Any) -> bool:
        if step == 1:
            make_read_only(self.disk / "run/rollouts")
        return False


def locked(overrides: list[str], disk: Path) -> str:
    mount_disk(disk, 1 << 24)
    return json.dumps(ends(overrides, Locks(disk)))


def full(overrides: list[str], disk: Path, num_bytes: int) -> str:
    mount_disk(disk, num_bytes)
    return json.dumps(ends(overrides))


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_full_disk_is_named_at_once_and_the_checkpoint_before_stays(
    way: str, toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    given = toy.overrides(
        disk / "run", f"debug.load_rollouts={recorded / 'rollouts'}", "train.num_steps=4",
        "checkpoint.save_every=1", f"checkpoint.async_save={way == 'async'}",
    )  # fmt: skip
    (said,) = run_ranks(1, full, given, disk, 6_000_000, folder=tmp_path / "out")
    out = json.loads(said)
    assert out["kind"] == "DiskFailed", out["text"]
    assert f"{disk}/run" in out["text"]
    assert "the disk is full, " in out["text"]
    assert "B are free in " in out["text"]
    assert out["seconds"] < 10, out["text"]
    assert out["saved"] == 1
    assert not [name for name in out["files"] if ".partial" in name or "iter_0000002" in name]
    assert out["failure"]


def test_a_file_system_that_becomes_read_only_is_named(
    toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    given = toy.overrides(
        disk / "run", f"debug.load_rollouts={recorded / 'rollouts'}", "train.num_steps=4",
        "checkpoint.save_every=1",
    )  # fmt: skip
    (said,) = run_ranks(1, locked, given, disk, folder=tmp_path / "out")
    out = json.loads(said)
    assert out["kind"] == "DiskFailed", out["text"]
    start = f"{disk}/run/rollouts/step_000002.jsonl could not be written: the file system is"
    assert out["text"].startswith(f"{start} read-only, ")
    assert (out["saved"], out["steps"]) == (2, [0, 1])
