"""Disks that are full, or read-only, in the middle of a run: real ones, of a few megabytes."""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import mrl.system.disk as disk_module
from mrl.config import load_recipe
from mrl.errors import InputError, RunFailed
from mrl.jobs.train import train
from mrl.preflight import check, room
from mrl.run.callbacks import Callback
from mrl.run.folder import RunFolder
from parallel.checkpoint.manifest import latest_step
from tests.disks import can_mount, fill_up, make_read_only, mount_disk
from tests.loop.conftest import TOY_RECIPE, Toy
from tests.ranks import run_ranks
from tests.release import release

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


class Fills(Callback):
    """The disk of the token records is full from the second step on."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk

    def on_step(self, step: int, metrics: Any, groups: Any) -> bool:
        if step == 0:
            fill_up(self.disk / "run/tokens")
        return False


def filled(overrides: list[str], disk: Path) -> str:
    mount_disk(disk, 1 << 24)
    return json.dumps(ends(overrides, Fills(disk)))


def locked(overrides: list[str], disk: Path) -> str:
    mount_disk(disk, 1 << 24)
    return json.dumps(ends(overrides, Locks(disk)))


def full(overrides: list[str], disk: Path, num_bytes: int, is_asked: bool) -> str:
    mount_disk(disk, num_bytes)
    room.free_bytes = lambda path: None  # another program takes what was free at the start
    if not is_asked:
        disk_module.free_bytes = lambda path: None
    return json.dumps(ends(overrides))


@pytest.mark.parametrize("way", [release("sync"), "async", release("asked")])
def test_a_full_disk_is_named_at_once_and_the_checkpoint_before_stays(
    way: str, toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    given = toy.overrides(
        disk / "run", f"debug.load_rollouts={recorded / 'rollouts'}", "train.num_steps=4",
        "checkpoint.save_every=1", f"checkpoint.async_save={way == 'async'}",
    )  # fmt: skip
    (said,) = run_ranks(1, full, given, disk, 6_000_000, way == "asked", folder=tmp_path / "out")
    out = json.loads(said)
    assert out["kind"] == "DiskFailed", out["text"]
    assert f"{disk}/run" in out["text"]
    if way == "asked":
        assert re.search(
            r"is full: it needs 3\.\d MB, and \d\.\d MB are free in .*; free some space",
            out["text"],
        )
    assert "the disk is full" in out["text"]
    assert out["seconds"] < 10, out["text"]
    assert out["saved"] == 1
    assert not [name for name in out["files"] if ".partial" in name or "iter_0000002" in name]
    assert out["failure"]


@pytest.mark.release
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


@pytest.mark.release
def test_a_disk_that_is_full_for_token_records_is_named(
    toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    given = toy.overrides(
        disk / "run", f"debug.load_rollouts={recorded / 'rollouts'}", "train.num_steps=4",
        "checkpoint.save_every=1", "diagnosis.save_tokens_every=1",
    )  # fmt: skip
    (said,) = run_ranks(1, filled, given, disk, folder=tmp_path / "out")
    out = json.loads(said)
    assert out["kind"] == "DiskFailed", out["text"]
    start = f"{disk}/run/tokens/step_000001.safetensors could not be written: the disk is full, "
    assert out["text"].startswith(start)
    assert (out["saved"], out["steps"]) == (1, [0])
    assert not [name for name in out["files"] if name.startswith("tokens/")]  # of the small disk
    assert out["failure"]


class Moves(Callback):
    """The run folder is moved after the second step."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def on_step(self, step: int, metrics: Any, groups: Any) -> bool:
        if step == 1:
            self.run.rename(self.run.with_name("elsewhere"))
        return False


def moved(overrides: list[str], run: Path) -> str:
    return json.dumps(ends(overrides, Moves(run)))


def limited(overrides: list[str], num_bytes: int) -> str:
    """Let no file grow above a size, as `ulimit -f` does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    return json.dumps(ends(overrides))


def without_inodes(overrides: list[str], disk: Path, num_inodes: int) -> str:
    mount_disk(disk, 1 << 26, num_inodes)
    return json.dumps(ends(overrides))


def on_full_device(overrides: list[str]) -> str:
    """Print to a device that is full."""
    sys.stdout = Path("/dev/full").open("w")  # noqa: SIM115
    return json.dumps(ends(overrides))


@pytest.mark.release
@pytest.mark.parametrize("way", ["limited", "inodes", "device", "moved"])
def test_whatever_cannot_be_written_ends_the_run_with_its_cause(
    way: str, toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    root = tmp_path / ("disk/run" if way == "inodes" else "run")
    given = toy.overrides(
        root, f"debug.load_rollouts={recorded / 'rollouts'}", "train.num_steps=4",
        "checkpoint.save_every=2", "checkpoint.async_save=false",
    )  # fmt: skip
    ways: dict[str, tuple[Any, ...]] = {
        "limited": (limited, given, 700 << 10),
        "inodes": (without_inodes, given, tmp_path / "disk", 24),
        "device": (on_full_device, given),
        "moved": (moved, given, root),
    }
    (said,) = run_ranks(1, *ways[way], folder=tmp_path / "out")
    out = json.loads(said)
    assert out["kind"] == "DiskFailed", out["text"]
    what, why = {
        "limited": (f"{root}/checkpoints/", "File too large: it is above the limit"),
        "inodes": (f"{root}/", "the disk has no inodes left"),
        "device": ("standard output ", "the disk is full; redirect it"),
        "moved": (f"{root}/checkpoints", f"the folder {root} is gone, moved"),
    }[way]
    assert re.search(f"{what}.*could not be written: .*{why}", out["text"]), out["text"]
    if way != "inodes":  # there what the failed save gives back may suffice for failure.json
        assert out["failure"] == (way != "moved"), out["files"]
    assert way != "moved" or not root.exists()


def small(overrides: list[str], disk: Path) -> list[str]:
    """Check the recipe on ever larger disks."""
    said: list[str] = []
    for num_bytes in (1, 5, 8, 30):
        mount_disk(disk, num_bytes * 1_000_000)
        plan = check(load_recipe(TOY_RECIPE, overrides), 1)
        try:
            said.append(room.check_room(plan, said.append))
        except InputError as error:
            said.append(str(error))
    return said


def test_a_run_needs_room_for_two_checkpoints(toy: Toy, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    given = toy.overrides(disk / "run", "checkpoint.keep=2")
    ((one, five, warned, eight, thirty),) = run_ranks(1, small, given, disk, folder=tmp_path / "o")
    for text in (one, five):
        assert text.startswith(f"output_dir {disk}/run: a checkpoint takes about 3.2 MB, and a run")
        assert "being written), 6.4 MB more; " in text
        assert f"B are free in {disk}; make room there, or put the run folder elsewhere" in text
    assert "checkpoint.keep=2: a checkpoint takes about 3.2 MB, 8.0 MB are free" in warned
    assert eight == f"a checkpoint takes about 3.2 MB; 8.0 MB are free in {disk}"
    assert thirty == f"a checkpoint takes about 3.2 MB; 30.0 MB are free in {disk}"
