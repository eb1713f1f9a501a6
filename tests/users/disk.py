"""Disks and the files of a run: no room, lost rows, other weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from mrl.cli import main
from tests.disks import can_mount, make_read_only, mount_disk
from tests.loop.conftest import COMMAND_TIMEOUT_S, environment
from tests.loop.forked import Command
from tests.users.things import User, thing

SMALL = ("train.num_steps=2", "checkpoint.save_every=1")


def on_disk(user: User, num_bytes: int, arguments: list[str], code: int) -> str:
    """Run `mrl` where the folder `disk` is a disk of that size."""
    if not can_mount():
        return ""

    def entry(given: list[str]) -> None:
        mount_disk(user.folder / "disk", num_bytes)
        main(given)

    out = user.folder / "printed_on_disk"
    done = Command(arguments, environment(), out, user.folder, entry).finish(COMMAND_TIMEOUT_S)
    printed = done.stdout + done.stderr
    assert done.returncode == code, printed
    return " ".join(printed.split())


@thing("My disk is too small for two checkpoints.")
def too_small(user: User) -> str:
    said = on_disk(user, 4_000_000, ["check", *user.recipe("disk/run")], 2)
    if not said:
        return "not tried: this user may not mount a disk"
    assert "a checkpoint takes about 3.2 MB, and a run needs room for two" in said
    return said


@thing("My disk fills up in the middle of a run.", wall="A full disk is never named.")
def fills_up(user: User) -> str:
    recipe = user.recipe("disk/run", "train.num_steps=4", "checkpoint.save_every=1")
    said = on_disk(user, 7_000_000, ["train", *recipe, "checkpoint.keep=4"], 74)
    if not said:
        return "not tried: this user may not mount a disk"
    assert "the disk is full" in said
    assert f"{user.folder}/disk/run" in said
    assert "saved a checkpoint with 1 steps done" in said
    return said[said.index("mrl: ") :][:300]


@thing("I look at how much room a run takes.", is_long=False)
def how_much(user: User) -> str:
    said = " ".join(user.mrl("check", *user.recipe("run")).split())
    assert "a checkpoint takes about 3.2 MB; " in said
    assert f"are free in {user.folder}" in said
    return said[said.index("a checkpoint takes") :]


@thing("metrics.jsonl has lost its first rows.", wall="Lost metrics are silent.")
def lost_rows(user: User) -> str:
    user.train("run", *SMALL)
    file = user.folder / "run/metrics.jsonl"
    file.write_text(file.read_text().split("\n", 1)[1])
    said = " ".join(user.mrl("train", "run", "train.num_steps=3").split())
    assert "metrics.jsonl: the row of step 0 is missing; training continues with the copy" in said
    assert [json.loads(row)["step"] for row in file.read_text().splitlines()] == [0, 1, 2]
    return said[said.index("warning: ") :][:200]


@thing("Somebody has replaced the model's weights since my run began.")
def other_weights(user: User) -> str:
    model = Path(shutil.copytree(user.toy.model, user.folder / "model"))
    user.train("run", *SMALL, f"model.path={model}")
    file = model / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    said = " ".join(user.mrl("train", "run", "train.num_steps=3", code=2).split())
    assert "whose contents have changed" in said
    assert "starting the rollout engine" not in said
    data[-5] ^= 1
    file.write_bytes(data)
    model.rename(user.folder / "moved")
    user.mrl("train", "run", "train.num_steps=3", f"model.path={user.folder / 'moved'}")
    return "refused before the engine starts; a model that only moved is accepted"


@thing("The file system of my run folder is read-only.")
def read_only(user: User) -> str:
    if not can_mount():
        return "not tried: this user may not mount a disk"

    def entry(given: list[str]) -> None:
        mount_disk(user.folder / "disk", 1 << 20)
        make_read_only(user.folder / "disk")
        main(given)

    out, recipe = user.folder / "printed", user.recipe("disk/run")
    done = Command(["train", *recipe], environment(), out, user.folder, entry).finish(240)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2, said
    assert "no folder can be created in" in said
    return said
