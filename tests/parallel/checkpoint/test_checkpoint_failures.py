"""Saves when something else fails: the next step, another rank, the disk of the first one."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from mrl.errors import RunFailed
from mrl.run.folder import RunFolder
from parallel.checkpoint import manifest
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.checkpoint.manifest import LATEST, damage, folder_name, latest_step
from tests.parallel.checkpoint.test_checkpoint_layouts import build
from tests.parallel.layouts import join_mesh
from tests.ranks import run_ranks

WAIT_S = 120.0


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not file.exists():
        assert time.monotonic() < deadline, file
        time.sleep(0.01)


@contextlib.contextmanager
def before_shares(action: Callable[[], object]) -> Iterator[None]:
    """Each write of a share, in whichever process, begins with `action()`."""
    real = FileSystemWriter.write_data

    def write_data(self: Any, *args: Any) -> Any:
        action()
        return real(self, *args)

    FileSystemWriter.write_data = write_data
    try:
        yield
    finally:
        FileSystemWriter.write_data = real


def slow_disk(seconds: float = 1.0) -> contextlib.AbstractContextManager[None]:
    """Every write of a share takes that much longer."""
    return before_shares(lambda: time.sleep(seconds))


@contextlib.contextmanager
def full_disk(num_bytes: int = 100) -> Iterator[None]:
    """No file of this process, or of one forked meanwhile, grows beyond `num_bytes`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def rescues(model_path: Path, root: Path) -> dict[str, Any]:
    """Three saves of which no rank hears again; the second rank has no room for its report, or for
    its share."""
    mesh = join_mesh(model_path, {})
    policy, said = build(model_path, mesh), []
    room = {"whole": None, "share lost": 0, "rank failed": 1000}
    stores = []
    for case, num_bytes in room.items():
        root.mkdir(parents=True, exist_ok=True)
        store = Checkpoints(root / case, mesh, keep=2, async_save=True, warn=said.append)
        is_short = mesh.rank == 1 and num_bytes is not None
        with full_disk(num_bytes or 0) if is_short else contextlib.nullcontext():
            store.save(1, policy, {"case": case})
        stores.append(store)
    for writer in active_children():
        writer.join()
    dist.barrier()
    if mesh.rank == 1:
        return {}  # no collective after this can end
    wait_for(root / "whole" / LATEST)  # nobody has asked for it
    for store in stores:
        store.rescue(0.3)
        store.rescue(0.3)  # nothing is left to do
    return {case: latest_step(root / case) for case in room} | {"said": said}


def test_a_save_that_is_whole_gets_its_name_without_the_other_ranks(
    model_path: Path, tmp_path: Path
) -> None:
    out = run_ranks(2, rescues, model_path, tmp_path / "c", folder=tmp_path / "out")[0]
    assert [out[case] for case in ("whole", "share lost", "rank failed")] == [1, None, None]
    folder = tmp_path / "c/whole" / folder_name(1)
    assert damage(folder) is None
    assert not list(folder.glob("written_*"))
    lost, failed = out["said"]
    assert "lost: rank 1 has not written its share in 0.3 s" in lost
    assert "rank 1" in failed
    assert "ulimit -f" in failed


def fails_at_the_end(model_path: Path, root: Path) -> list[str]:
    """A folder stands where the first rank is about to write, in the background, its last files."""
    mesh = join_mesh(model_path, {})
    policy, said = build(model_path, mesh), []
    for end in ("finish", "rescue"):
        root.mkdir(parents=True, exist_ok=True)
        store = Checkpoints(root / end, mesh, keep=2, async_save=True, warn=said.append)
        folder = root / end / f".{folder_name(1)}.partial"
        with before_shares(partial(wait_for, folder / "metadata.json")):
            store.save(1, policy, {})
        if mesh.rank == 0:
            (folder / "metadata.json").mkdir()
        wait_for(folder / ".metadata")
        time.sleep(0.3)
        try:
            store.finish() if end == "finish" else store.rescue(0.3)
        except RunFailed as error:
            said.append(str(error))
    return said


def test_what_goes_wrong_in_the_background_is_said_on_every_rank(
    model_path: Path, tmp_path: Path
) -> None:
    args = (model_path, tmp_path / "c")
    one, two = run_ranks(2, fails_at_the_end, *args, folder=tmp_path / "out")
    assert one[0] == two[0]
    assert "IsADirectoryError" in one[0]
    assert "the one before it is untouched" in one[0]
    assert "is lost: IsADirectoryError" in one[1]


def interrupted(model_path: Path, root: Path) -> list[bool]:
    """Ctrl-C reaches the process that writes as well."""
    mesh = join_mesh(model_path, {})
    store = Checkpoints(root, mesh, keep=2, async_save=True)
    store.save(1, build(model_path, mesh), {})
    (writer,) = active_children()
    ignored = ignores_interrupt(writer.pid or 0)
    os.kill(writer.pid or 0, signal.SIGINT)
    store.rescue(WAIT_S)
    return [ignored, latest_step(root) == 1]


def ignores_interrupt(pid: int) -> bool:
    """Whether it does so before it ends."""
    while True:
        rows = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(row.split(":", 1) for row in rows)
        if int(fields["SigIgn"], 16) >> (signal.SIGINT - 1) & 1:
            return True
        if "Z" in fields["State"]:
            return False


def test_ctrl_c_does_not_stop_the_writing(model_path: Path, tmp_path: Path) -> None:
    args = (model_path, tmp_path / "c")
    assert run_ranks(1, interrupted, *args, folder=tmp_path / "o")[0] == [True, True]


def flushes(model_path: Path, root: Path) -> list[list[str]]:
    """Names of the files that were flushed to the disk before the folder got its name."""
    mesh = join_mesh(model_path, {})
    policy, names, real = build(model_path, mesh), [], os.fsync

    def fsync(file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        if ".partial" in path.parent.name:
            names.append(path.name)
        real(number)

    os.fsync = fsync
    Checkpoints(root, mesh, keep=1).save(1, policy, {})
    os.fsync = real
    return [names, [file.name for file in (root / folder_name(1)).iterdir()]]


def test_every_file_is_on_the_disk_before_it_counts(model_path: Path, tmp_path: Path) -> None:
    out = run_ranks(1, flushes, model_path, tmp_path / "c", folder=tmp_path / "out")[0]
    flushed, files = ({name.strip(".").removesuffix(".partial") for name in names} for names in out)
    flushed = {name.removesuffix(".tmp") for name in flushed}  # torch's name before the rename
    assert len(files) == 6
    assert files <= flushed


def fills_up(model_path: Path, root: Path) -> dict[str, str]:
    """There is no room for common.pt, for .metadata, and for what the second rank writes."""
    mesh = join_mesh(model_path, {})
    policy, first = build(model_path, mesh), mesh.rank == 0
    messages = {}

    def saves(store: Checkpoints, step: int, at_start: bool, at_end: bool) -> str:
        try:
            with full_disk() if at_start else contextlib.nullcontext():
                store.save(step, policy, {})
            with full_disk() if at_end else contextlib.nullcontext():
                store.finish()
        except RunFailed as error:
            return str(error)
        return "saved"

    def store(async_save: bool) -> Checkpoints:
        return Checkpoints(root, mesh, keep=2, async_save=async_save)

    messages["common"] = saves(store(True), 2, first, False)
    messages["metadata"] = saves(store(True), 3, False, first)
    messages["share"] = saves(store(False), 4, not first, False)
    return messages


def test_a_full_disk_stops_every_rank_and_leaves_none_waiting(
    model_path: Path, tmp_path: Path
) -> None:
    args = (model_path, tmp_path / "c")
    one, two = run_ranks(2, fills_up, *args, folder=tmp_path / "out")
    assert one == two
    for message in one.values():
        assert "checkpoint " in message
        assert "\n" not in message
    assert "File too large" in one["common"]
    assert "File too large" in one["metadata"]
    assert "rank 1" in one["share"]
    assert latest_step(tmp_path / "c") is None


def falls_back(model_path: Path, root: Path) -> dict[str, Any]:
    """Step 20 is damaged, so the run goes on from 10; twice, with a save in between."""
    mesh = join_mesh(model_path, {})
    policy, said = build(model_path, mesh), []
    store = Checkpoints(root, mesh, keep=2, warn=said.append)
    steps = []
    store.save(10, policy, {})
    for then in (13, 14):
        store.save(20, policy, {})
        if mesh.rank == 0:
            data = root / folder_name(20) / "__1_0.distcp"
            data.write_bytes(data.read_bytes()[:-1])
        dist.barrier()
        reader = Checkpoints(root, mesh, keep=2)  # an evaluation beside the training
        steps += [reader.load_newest(policy, renames=False).step, latest_step(root)]
        steps += [store.load_newest(policy).step, latest_step(root), store.load_newest(policy).step]
        store.save(then, policy, {})
    return {"steps": steps, "said": said, "left": sorted(f.name for f in root.glob("iter_*"))}


def test_a_damaged_checkpoint_is_set_aside_and_pushes_no_good_one_out(
    model_path: Path, tmp_path: Path
) -> None:
    outs = run_ranks(2, falls_back, model_path, tmp_path / "c", folder=tmp_path / "out")
    for out in outs:
        assert out["steps"] == [10, 20, 10, 10, 10, 13, 20, 13, 13, 13]
    aside = [f"{folder_name(20)}.damaged{end}" for end in ("", ".2")]
    assert outs[0]["left"] == [folder_name(13), folder_name(14), *aside]
    assert damage(tmp_path / "c" / folder_name(13)) is None
    assert "__1_0.distcp has" in outs[0]["said"][0]
    assert f"{folder_name(20)} is kept as {aside[0]}" in outs[0]["said"][1]
    assert len(outs[0]["said"]) == 4


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_crash_while_a_checkpoint_replaces_one_of_its_step_leaves_one_of_both(
    can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a session saves the same version under the same name again."""

    def publish(text: str) -> Path:
        unnamed = manifest.partial_folder(tmp_path, 10)
        unnamed.mkdir()
        (unnamed / "weights").write_text(text)
        files = {"weights": manifest.record(unnamed / "weights")}
        manifest.write_manifest(unnamed, {"step": 10}, files)
        return manifest.publish(tmp_path, 10, keep=1)

    final, seen = publish("old"), list[bool]()
    rename = Path.rename

    def noting(self: Path, target: Path) -> Path:
        done = rename(self, target)
        seen.append(final.exists())
        return done

    monkeypatch.setattr(Path, "rename", noting)
    if not can_exchange:  # as on a network file system
        monkeypatch.setattr(manifest, "exchange", lambda first, second: False)
    assert publish("new") == final
    assert all(seen) == can_exchange
    assert manifest.damage(final) is None
    assert (final / "weights").read_text() == "new"
    assert sorted(each.name for each in tmp_path.iterdir()) == [final.name, manifest.LATEST]


def test_a_kill_between_the_renames_of_a_replacement_loses_no_checkpoint(tmp_path: Path) -> None:
    """Where names cannot be exchanged. The next start looks for checkpoints before the next save."""
    (tmp_path / ".lock").touch()
    kept = [tmp_path / each / folder_name(10) for each in ("checkpoints", "states/a", "samplers/b")]
    for folder in kept:
        (folder.parent / f".{folder.name}.replaced").mkdir(parents=True)
    with contextlib.closing(RunFolder(tmp_path)) as run:
        run.claim()
    assert all(folder.exists() for folder in kept)
    kept[0].rename(kept[0].parent / f".{kept[0].name}.replaced")
    manifest.sweep(kept[0].parent)  # as by another save of this process
    assert [each.name for each in kept[0].parent.iterdir()] == [kept[0].name]
