"""Snapshots on one node and on two: the same bits, also from a neighbour; what is left out."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe.routes import Replay
from mrl.errors import DiskFailed, InputError
from mrl.types import Sample
from parallel.checkpoint import file_moves, manifest, node_folder
from parallel.checkpoint import snapshots as module
from parallel.checkpoint.file_moves import Move
from parallel.checkpoint.manifest import MANIFEST, FileRecord, damage, point_to, record
from parallel.checkpoint.node_folder import SWEPT_AFTER_S, NodeFolder
from parallel.checkpoint.snapshot_note import NOTE, Note, note_to_resume, read_note, write_note
from parallel.checkpoint.snapshots import Snapshots
from parallel.mesh import Mesh
from parallel.policy import Policy
from tests.parallel.checkpoint.test_checkpoint_layouts import build, loss, next_step, ready_batch
from tests.parallel.few_samples import few_samples
from tests.parallel.layouts import join_mesh
from tests.ranks import run_ranks
from tests.release import release

WORLD = 3


def store(mesh: Mesh, folder: Path, num_nodes: int, warned: list[str]) -> Snapshots:
    """Ranks 0 and 1 are on the first node, rank 2 on the second one, if there are two."""
    node = folder / f"node{0 if num_nodes == 1 else mesh.rank // 2}"
    run = folder / "run"
    run.mkdir(exist_ok=True)
    return Snapshots(run, node, mesh, every=1, num_steps=9, warn=warned.append)


def taken(model_path: Path, folder: Path, samples: list[Sample], num_nodes: int) -> dict[str, Any]:
    """Two steps with a snapshot after each; then the step that would follow."""
    mesh = join_mesh(model_path, {})
    policy = build(model_path, mesh, True)
    warned: list[str] = []
    snapshots = store(mesh, folder, num_nodes, warned)
    snapshots.open(policy)
    batch, _ = ready_batch(policy, mesh, samples)
    for step in (1, 2):
        policy.train_step(batch, loss, Replay.rollout)
        snapshots.take(step, policy, {"step": step})
    metrics = snapshots.metrics()
    assert metrics["time/snapshot_s"] > 0
    copying = metrics.get("time/snapshot_copy_s", 0.0)
    assert (0 < copying < metrics["time/snapshot_s"]) == (num_nodes > 1)
    assert snapshots.metrics()["time/snapshot_s"] == 0
    assert warned == []
    num_bytes = [metrics.get(f"memory/snapshot_{key}", 0) for key in ("bytes", "copy_bytes")]
    return {"after": next_step(policy, mesh, samples), "bytes": num_bytes}


def interrupted(model_path: Path, folder: Path, samples: list[Sample]) -> dict[str, Any]:
    """Take three snapshots, and keep what a kill would leave in the middle of the third one.

    `unnamed`: before its folder has its name, `copying`: before the copies, `unnoted`: before its note.
    """
    mesh = join_mesh(model_path, {})
    policy = build(model_path, mesh, True)
    snapshots = store(mesh, folder, 2, [])
    snapshots.open(policy)
    batch, _ = ready_batch(policy, mesh, samples)
    for step in (1, 2):
        policy.train_step(batch, loss, Replay.rollout)
        snapshots.take(step, policy, {"step": step})
    after = next_step(policy, mesh, samples)
    with pytest.MonkeyPatch.context() as patch:
        for name, owner, key in (("unnamed", manifest, "publish"), ("copying", module, "move_files"),
                                 ("unnoted", module, "write_note")):  # fmt: skip
            patch.setattr(owner, key, keeping(getattr(owner, key), folder, name, mesh.rank))
        snapshots.take(3, policy, {"step": 3})
    return {"after": after}


def keeping(function: Any, folder: Path, name: str, rank: int) -> Any:
    """Return a function that first copies all files to `folder/name`, as they are; rank 0 does."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if rank == 0 and not (folder / name).exists():
            for part in ("run", "node0", "node1"):
                shutil.copytree(folder / part, folder / name / part)
        return function(*args, **kwargs)

    return call


def loaded(
    model_path: Path, folder: Path, samples: list[Sample], num_nodes: int, sizes: dict[str, int]
) -> dict[str, Any]:
    mesh = join_mesh(model_path, sizes)
    policy, warned = build(model_path, mesh, True), list[str]()
    snapshots = store(mesh, folder, num_nodes, warned)
    snapshots.open(policy)
    found = snapshots.load_newer(policy)
    after = None if found is None else next_step(policy, mesh, samples)
    snapshots.close()
    step = 0 if found is None else found.trainer["step"]
    return {"step": step, "after": after, "warned": warned}


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return few_samples()


@pytest.fixture(scope="module")
def on_two_nodes(
    model_path: Path, samples: list[Sample], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("taken")
    results = run_ranks(WORLD, taken, model_path, folder, samples, 2, folder=folder / "out")
    return folder, results[0]


def copied(source: Path, target: Path) -> Path:
    for name in ("run", "node0", "node1"):
        shutil.copytree(source / name, target / name)
        (target / name).chmod(0o700)
        (target / name / node_folder.TOKEN).unlink(missing_ok=True)
    return target


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_a_received_file_that_cannot_be_synced_is_a_reason_for_all_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other ranks wait for the reason of this one, and the run continues without the snapshot."""
    mesh: Any = SimpleNamespace(rank=0)
    reasons: list[str | None] = []

    def agreed(reason: str | None) -> str | None:
        reasons.append(reason)
        return reason

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(file_moves, "first_reason", agreed)
    monkeypatch.setattr(os, "fsync", full)
    empty = FileRecord(0, hashlib.sha256().hexdigest())  # nothing has to be sent for it
    with pytest.raises(DiskFailed, match="the disk is full"):
        file_moves.move_files(mesh, [Move(1, 0, "a")], tmp_path, {"a": empty})
    assert reasons[0] is None
    assert "the disk is full" in str(reasons[1])
    assert not list(tmp_path.iterdir())


def test_every_node_has_its_shares_and_a_neighbours(
    on_two_nodes: tuple[Path, dict[str, Any]],
) -> None:
    folder, result = on_two_nodes
    note = read_note(folder / "run")
    assert note is not None
    assert (note.step, note.checkpoint, len(note.nodes)) == (2, None, 2)
    small = {".metadata", "common.pt", "metadata.json", "manifest.json", "manifest.json.sha256"}
    for number, node in enumerate((folder / "node0", folder / "node1")):
        names = {f.name for f in (node / "iter_0000002").iterdir()}
        assert names == small | {f"__{rank}_0.distcp" for rank in range(3)}
        assert [f.name for f in node.glob("*iter_*")] == ["iter_0000002"], number
        assert node.stat().st_mode & 0o777 == 0o700
        assert damage(node / "iter_0000002") is None
        assert record(node / "iter_0000002" / MANIFEST).sha256 == note.sha256
    size = sum(f.stat().st_size for f in (folder / "node0/iter_0000002").iterdir())
    assert result["bytes"][0] == pytest.approx(size, rel=0.1)
    shares = (folder / "node0/iter_0000002").glob("*.distcp")  # with two nodes all are on both
    assert result["bytes"][1] == sum(file.stat().st_size for file in shares)


@pytest.mark.parametrize(
    "lost", ["node0", *map(release, ("none", "node1", "a share", "a small file"))]
)
def test_a_lost_node_is_made_good_by_its_neighbour_bitwise(
    lost: str, on_two_nodes: tuple[Path, dict[str, Any]], model_path: Path,
    samples: list[Sample], tmp_path: Path,
) -> None:  # fmt: skip
    folder = copied(on_two_nodes[0], tmp_path)
    if lost.startswith("node"):
        shutil.rmtree(folder / lost)
    elif lost != "none":
        name = "__1_0.distcp" if lost == "a share" else "common.pt"
        file = folder / "node0/iter_0000002" / name
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    args = (WORLD, loaded, model_path, folder, samples, 2, {})
    for result in run_ranks(*args, folder=tmp_path / "out"):
        assert result["step"] == 2, result["warned"]
        assert same(result["after"], on_two_nodes[1]["after"])
    assert (folder / "run" / NOTE).exists()  # no checkpoint is as new


@pytest.mark.release
def test_of_a_snapshot_that_a_kill_cut_short_nothing_is_used_but_the_one_before_bitwise(
    model_path: Path, samples: list[Sample], tmp_path: Path
) -> None:
    args = (model_path, tmp_path, samples)
    after = run_ranks(WORLD, interrupted, *args, folder=tmp_path / "out")[0]["after"]
    for name in ("unnamed", "copying", "unnoted"):
        folder = copied(tmp_path / name, tmp_path / f"{name}_again")
        cut = list(folder.glob("node0/*iter_0000003*/__0_0.distcp"))
        assert len(cut) == 1, name
        if name == "unnamed":
            os.truncate(cut[0], cut[0].stat().st_size // 2)
        again = (model_path, folder, samples, 2, {})
        for result in run_ranks(WORLD, loaded, *again, folder=folder / "out"):
            assert result["step"] == 2, (name, result["warned"])
            assert same(result["after"], after), name


@pytest.mark.release
def test_another_layout_loads_it(
    on_two_nodes: tuple[Path, dict[str, Any]], model_path: Path,
    samples: list[Sample], tmp_path: Path,
) -> None:  # fmt: skip
    folder = copied(on_two_nodes[0], tmp_path)
    args = (2, loaded, model_path, folder, samples, 1, {"tensor": 2})
    theirs = on_two_nodes[1]["after"]["weights"]
    for result in run_ranks(*args, folder=tmp_path / "out"):
        assert result["step"] == 2, result["warned"]
        for name, weight in result["after"]["weights"].items():
            assert torch.allclose(weight, theirs[name], rtol=0, atol=1e-4), name


@pytest.mark.parametrize(
    "case", ["lost on both", *map(release, ("other manifest", "older", "set back", "no note"))]
)
def test_what_is_not_whole_or_not_newest_is_left_out_and_removed(
    case: str, on_two_nodes: tuple[Path, dict[str, Any]], model_path: Path,
    samples: list[Sample], tmp_path: Path,
) -> None:  # fmt: skip
    folder = copied(on_two_nodes[0], tmp_path)
    run, nodes = folder / "run", [folder / f"node{number}/iter_0000002" for number in range(2)]
    note = read_note(run)
    assert note is not None
    if case == "lost on both":
        for node in nodes:
            (node / "__1_0.distcp").unlink()
    elif case == "other manifest":
        write_note(run, Note(note.step, "0" * 64, None, note.nodes))
    elif case == "older":
        (run / "iter_0000002").mkdir()
        point_to(run, 2)
    elif case == "set back":
        write_note(run, Note(note.step, note.sha256, 1, note.nodes))
    else:
        (run / NOTE).unlink()
    args = (WORLD, loaded, model_path, folder, samples, 2, {})
    result = run_ranks(*args, folder=tmp_path / "out")[0]
    assert result["step"] == 0
    expected = {
        "lost on both": "the snapshot of step 2 is left out: __1_0.distcp is damaged, or on no node",
        "other manifest": "the snapshot of step 2 is left out: it is on no node of this start",
    }
    text = expected.get(case)
    assert [line.startswith(text or "?") for line in result["warned"]] == [True] * (
        text is not None
    )
    assert not (run / NOTE).exists()
    assert not any((folder / name).exists() for name in ("node0", "node1"))


def test_a_note_counts_only_where_it_is_newest(tmp_path: Path) -> None:
    def note(step: int, checkpoint: int | None) -> Note:
        each = Note(step, "0" * 64, checkpoint, [{"host": "a", "folder": "/b"}])
        write_note(tmp_path, each)
        return each

    assert note_to_resume(tmp_path, 9) is None
    assert note(3, None) == note_to_resume(tmp_path, 9)
    assert note_to_resume(tmp_path, 3) is None  # train.num_steps was lowered
    for step in (2, 4):
        (tmp_path / f"iter_{step:07d}").mkdir()
    point_to(tmp_path, 4)
    note(3, 2)
    assert note_to_resume(tmp_path, 9) is None  # a checkpoint is newer
    assert note(5, 2) == note_to_resume(tmp_path, 9)
    point_to(tmp_path, 2)  # set back by hand
    assert note_to_resume(tmp_path, 9) is None
    (tmp_path / NOTE).write_text('{"step": "x"}')
    assert read_note(tmp_path) is None


def test_a_folder_of_someone_else_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "node"
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    with pytest.raises(InputError, match=r"only user .* can read and write .it is drwxrwxrwx"):
        NodeFolder(root).claim()
    link = tmp_path / "link"
    root.chmod(0o700)
    link.symlink_to(root)
    with pytest.raises(InputError, match="cannot be trusted"):
        NodeFolder(link).claim()


def test_old_folders_of_dead_runs_are_swept_and_no_others(tmp_path: Path) -> None:
    names = {kind: f"mrl-{os.getuid()}-{number:016x}" for number, kind in
             enumerate(("own", "dead", "alive", "young"))}  # fmt: skip
    folders = {kind: NodeFolder(tmp_path / name) for kind, name in names.items()}
    for folder in folders.values():
        folder.claim()
    for kind in ("dead", "young"):
        folders[kind].close()
    (tmp_path / "mrl-other").mkdir()
    for path in tmp_path.iterdir():
        if path.name != names["young"]:
            os.utime(path, (0, path.stat().st_mtime - 2 * SWEPT_AFTER_S))
    assert folders["own"].sweep() == [tmp_path / names["dead"]]
    left = {*names.values(), "mrl-other"} - {names["dead"]}
    assert {path.name for path in tmp_path.iterdir()} == left
    for folder in folders.values():
        folder.close()


def refused(model_path: Path, folder: Path) -> str:
    mesh = join_mesh(model_path, {})
    policy: Policy = build(model_path, mesh, True)
    with pytest.raises(InputError) as refusal:
        store(mesh, folder, 2, []).open(policy)
    return str(refusal.value)


@pytest.mark.release
def test_too_little_room_is_refused_at_the_start(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallel.checkpoint.snapshots.free_bytes", lambda path: 1000)
    for message in run_ranks(WORLD, refused, model_path, tmp_path, folder=tmp_path / "out"):
        assert "checkpoint.snapshot_folder: two snapshots need" in message
        assert "1.0 kB are free" in message or "1.1 kB are free" in message
        assert "checkpoint.snapshot_every=0" in message
