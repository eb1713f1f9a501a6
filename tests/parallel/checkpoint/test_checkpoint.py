"""Saving in the background, pruning, refusals, and what is left when the machine fails."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from moe.routes import Replay
from mrl.errors import InputError, RunFailed
from mrl.types import Sample
from parallel.checkpoint import manifest
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.checkpoint.manifest import candidates, damage, folder_name, latest_step, newest_good
from parallel.checkpoint.pickle_scan import check_pickles, imported
from parallel.checkpoint.saved_tensors import SavedTensors
from parallel.checkpoint.shard_writer import ShardWriter, check_coverage
from parallel.checkpoint.sharded_state import state_shards
from parallel.optimizer.state import optimizer_shards
from tests.parallel.checkpoint.test_checkpoint_failures import before_shares
from tests.parallel.checkpoint.test_checkpoint_layouts import build
from tests.parallel.conftest import write_model
from tests.parallel.few_samples import few_samples
from tests.parallel.layouts import join_mesh, loss, ready_batch
from tests.ranks import run_ranks, start_fork


def test_metadata_names_no_getattr_whatever_python_wrote_it() -> None:
    """Python 3.11.0 to 3.11.3 pickles members of an enumeration by getattr."""
    name = f"{_MEM_FORMAT_ENCODING.__module__}.{_MEM_FORMAT_ENCODING.__name__}"
    for member in _MEM_FORMAT_ENCODING:
        data = pickle.dumps(member)
        assert imported(data) == [name]
        assert pickle.loads(data) is member


def two_saves(model_path: Path, root: Path) -> None:
    mesh = join_mesh(model_path, {})
    policy, store = build(model_path, mesh), Checkpoints(root, mesh, keep=2)
    for step in (1, 2):
        store.save(step, policy, {"step": step})


@pytest.fixture(scope="module")
def written(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 of two ranks."""
    root = tmp_path_factory.mktemp("written") / "checkpoints"
    run_ranks(2, two_saves, model_path, root, folder=root.parent / "out")
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "checkpoints"))


def test_what_is_on_disk(written: Path) -> None:
    folder = written / "iter_0000002"
    names = {".metadata", "__0_0.distcp", "__1_0.distcp", "common.pt", "metadata.json"}
    assert {f.name for f in folder.iterdir()} == {*names, "manifest.json", "manifest.json.sha256"}
    content = manifest.read_manifest(folder)
    assert content["files"].keys() == names
    assert (content["step"], content["format"], content["trainer"]) == (2, 2, {"step": 2})
    assert content["layout"]["world"] == 2
    assert content["dtype"] == "float32"
    assert content["model"]["config"]["model_type"] == "qwen3_moe"
    assert content["versions"].keys() == {"mrl", "torch", "megatron-core"}
    tensors = SavedTensors(folder)
    assert "model.decoder.layers.3.mlp.experts.local_experts.2.linear_fc1.weight" in set(tensors)


@pytest.mark.parametrize("number", [70, pytest.param(1000, marks=pytest.mark.release)])
def test_every_damaged_byte_is_caught_and_named_and_the_one_before_is_used(
    number: int, root: Path
) -> None:
    generator, folder = random.Random(0), root / "iter_0000002"
    files = sorted(folder.iterdir())
    for each in range(number):
        file = files[each % len(files)]
        data = file.read_bytes()
        place = generator.randrange(len(data))
        if generator.random() < 0.25:
            file.write_bytes(data[:place])
        else:
            flipped = bytes([data[place] ^ (1 << generator.randrange(8))])
            file.write_bytes(data[:place] + flipped + data[place + 1 :])
        reports: list[str] = []
        found = newest_good(candidates(root), damage, reports.append)
        assert found == root / "iter_0000001"
        assert len(reports) == 1
        assert f"{file} " in reports[0] or f"{file}:" in reports[0], reports
        file.write_bytes(data)
    assert newest_good(candidates(root), damage, reports.append) == folder


@pytest.mark.parametrize("number", range(7))
def test_a_missing_file_is_named(number: int, root: Path) -> None:
    file = sorted((root / "iter_0000002").iterdir())[number]
    file.unlink()
    assert str(file) in (damage(root / "iter_0000002", digests=False) or "")


def test_nothing_whole_and_nothing_at_all(root: Path, tmp_path: Path) -> None:
    assert newest_good(candidates(tmp_path / "none"), damage, print) is None
    for folder in root.glob("iter_*"):
        (folder / "common.pt").write_bytes(b"")
    reports: list[str] = []
    with pytest.raises(InputError, match=r"none of 2 checkpoint.*whole") as caught:
        newest_good(candidates(root), damage, reports.append)
    assert "\n" not in str(caught.value)
    assert len(reports) == 2


def test_latest_sets_a_run_back_and_its_loss_does_not_lose_the_run(root: Path) -> None:
    (root / manifest.LATEST).write_text("1\n")
    assert candidates(root) == [root / "iter_0000001"]
    (root / manifest.LATEST).write_text("9\n")
    assert newest_good(candidates(root), damage, lambda text: None) == root / "iter_0000002"
    for garbage in (b"\xff\xfe", b"two"):
        (root / manifest.LATEST).write_bytes(garbage)
        assert candidates(root)[0] == root / "iter_0000002"


def test_a_checkpoint_of_format_1_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "step": 3}))
    with pytest.raises(
        InputError, match="format 1, this version of mrl reads format 2; continue with"
    ):
        damage(folder)


class Shell:
    """Unpickled, it runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_planted_pickle_is_refused_unopened(name: str, protocol: int, root: Path) -> None:
    folder, trace = root / "iter_0000002", root / "ran"
    planted = {"x": Shell(f"touch {trace}")}
    if name == ".metadata":
        (folder / name).write_bytes(pickle.dumps(planted, protocol))
    else:
        torch.save(planted, folder / name, pickle_protocol=max(protocol, 1))
    content = manifest.read_manifest(folder)
    files = {n: manifest.record(folder / n) for n in content["files"]}
    manifest.write_manifest(folder, content, files)
    assert damage(folder) is None  # its digests are in order
    for opened in (check_pickles, SavedTensors):
        with pytest.raises(InputError, match=r"would run .*(system|\?)"):
            opened(folder)
    assert not trace.exists()


def test_a_name_hidden_on_the_stack_is_not_taken_for_another() -> None:
    honest = b"\x80\x04\x8c\x05torch\x8c\x04Size\x93."
    assert imported(honest) == ["torch.Size"]
    pop, system = b"0", b"\x8c\x05posix\x8c\x06system"
    hidden = b"\x80\x04" + system + b"\x8c\x05torch\x8c\x04Size" + pop + pop + b"\x93."
    assert imported(hidden) == ["?"]
    memo = b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94h\x00h\x01\x93."
    assert imported(memo) == ["posix.system"]


def prunes(model_path: Path, root: Path) -> list[str]:
    mesh = join_mesh(model_path, {})
    policy, store = build(model_path, mesh), Checkpoints(root, mesh, keep=2)
    (root / ".iter_0000099.partial").mkdir(parents=True)  # a save that was cut short
    (root / "iter_0000010.best").mkdir()  # the user's own
    for step in (10, 40, 60, 12, 14):  # set back to 10 by hand, then on from there
        store.save(step, policy, {})
    return sorted(f.name for f in root.iterdir())


def test_old_checkpoints_are_pruned_and_the_newest_written_stays(
    model_path: Path, tmp_path: Path
) -> None:
    names = run_ranks(1, prunes, model_path, tmp_path / "c", folder=tmp_path / "out")[0]
    assert names[:3] == ["iter_0000010.best", "iter_0000012", "iter_0000014"]
    assert latest_step(tmp_path / "c") == 14
    assert not [name for name in names if name.startswith(".")]


def trains_on(model_path: Path, samples: list[Sample], root: Path) -> dict[str, Any]:
    """The same state saved at once and in the background, while the policy trains on."""
    mesh = join_mesh(model_path, {"expert": 2})
    policy = build(model_path, mesh, distributed=True)
    batch, _ = ready_batch(policy, mesh, samples)
    policy.train_step(batch, loss, Replay.rollout)
    shards = state_shards(policy.weights, optimizer_shards(policy.optimizer))
    planner = ShardWriter(root / "copy", mesh.rank, 2).request(shards, copy=True).async_fn_args[1]
    copies = [s._sh_ten.data for group in planner.state_dict.values() for s in group._local_shards]
    apart = {t.data_ptr() for t in copies}.isdisjoint(s.data.data_ptr() for s in shards)
    Checkpoints(root / "sync", mesh, keep=2).save(1, policy, {})
    store = Checkpoints(root / "async", mesh, keep=2, async_save=True)
    store.save(1, policy, {})
    named = (root / "async" / folder_name(1)).exists()
    policy.train_step(batch, loss, Replay.rollout)
    store.save(2, policy, {})  # waits for the first
    first_named = (root / "async" / folder_name(1)).exists()
    second_named = (root / "async" / folder_name(2)).exists()
    while not (root / "async" / folder_name(2)).exists():
        policy.train_step(batch, loss, Replay.rollout)
        store.poll()
        torch.distributed.barrier()
    moved = build(model_path, mesh, distributed=True)
    store.load_newest(moved)
    return {"named": [named, first_named, second_named], "apart": apart, "num": len(copies)}


def test_training_goes_on_while_a_save_is_in_flight(model_path: Path, tmp_path: Path) -> None:
    out = run_ranks(2, trains_on, model_path, few_samples(), tmp_path, folder=tmp_path / "o")[0]
    assert out["named"] == [False, True, False]
    assert out["apart"]
    assert out["num"] > 100
    one, two = (SavedTensors(tmp_path / kind / folder_name(1)) for kind in ("sync", "async"))
    assert sorted(one) == sorted(two)
    for key in one:
        if not key.startswith("random."):
            assert torch.equal(one[key], two[key]), key
    later = SavedTensors(tmp_path / "async" / folder_name(2))
    assert not all(torch.equal(one[key], later[key]) for key in one if key.startswith("model."))


def cannot_write(model_path: Path, root: Path) -> dict[str, str]:
    """A folder stands where the second rank's file should go."""
    mesh = join_mesh(model_path, {})
    policy, messages = build(model_path, mesh), {}
    for async_save in (False, True):
        store = Checkpoints(root, mesh, keep=2, async_save=async_save)
        store.save(1, policy, {})
        store.finish()
        blocked = root / ".iter_0000002.partial" / "__1_0.distcp"
        messages[str(async_save)] = fails(store, policy, blocked)
    return messages


def fails(store: Checkpoints, policy: Any, blocked: Path) -> str:
    def block() -> None:
        if store.mesh.rank == 1:
            blocked.mkdir()

    try:
        with before_shares(block):
            store.save(2, policy, {})
            store.finish()
    except RunFailed as error:
        return str(error)
    return ""


def test_a_write_that_fails_stops_every_rank(model_path: Path, tmp_path: Path) -> None:
    for out in run_ranks(2, cannot_write, model_path, tmp_path / "c", folder=tmp_path / "out"):
        for message in out.values():
            assert "rank 1: IsADirectoryError" in message
    assert latest_step(tmp_path / "c") == 1
    assert damage(tmp_path / "c" / folder_name(1)) is None


def refuses(model_path: Path, other_path: Path, root: Path) -> list[str]:
    mesh = join_mesh(other_path, {})
    messages = []
    for step, path in ((2, other_path), (5, model_path)):
        try:
            Checkpoints(root, mesh, keep=2).load(step, build(path, mesh))
        except InputError as error:
            messages.append(str(error))
    return messages


def test_another_model_is_refused(model_path: Path, root: Path, tmp_path: Path) -> None:
    narrow = write_model(tmp_path / "narrow", moe_intermediate_size=24)
    for out in run_ranks(2, refuses, model_path, narrow, root, folder=tmp_path / "out"):
        model, missing = out
        assert "of another model" in model
        assert "moe_ffn_size 16 there, 24 here" in model
        assert "iter_0000005" in missing
        assert "No such file" in missing


def test_an_element_that_nobody_writes_is_caught(written: Path) -> None:
    metadata = SavedTensors(written / "iter_0000002")._reader.metadata
    check_coverage(metadata)
    metadata.state_dict_metadata["model.embedding.word_embeddings.weight"].chunks.pop()
    with pytest.raises(ValueError, match=r"elements of model\.embedding"):
        check_coverage(metadata)


def saves_for_ever(model_path: Path, root: Path, async_save: bool) -> None:
    mesh = join_mesh(model_path, {})
    policy = build(model_path, mesh)
    store = Checkpoints(root, mesh, keep=2, async_save=async_save)
    for step in range(1, 10_000):
        store.save(step, policy, {"step": step})


@pytest.mark.parametrize("number_of_kills", [2, pytest.param(4, marks=pytest.mark.release)])
def test_kill_9_during_a_save_leaves_a_whole_checkpoint(
    number_of_kills: int, model_path: Path, tmp_path: Path
) -> None:
    generator = random.Random(1)
    for number in range(number_of_kills):
        root = tmp_path / f"c{number}"
        process = start_fork(saves_for_ever, model_path, root, bool(number % 2))
        while not (latest_step(root) or 0) > 1:
            time.sleep(0.01)
        time.sleep(generator.random() * 0.1)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        reports: list[str] = []
        found = newest_good(candidates(root), damage, reports.append)
        assert found is not None
        assert not reports
        assert manifest.read_manifest(found)["trainer"]["step"] >= 2
