"""`mrl export`: folders that cannot be written, disks that run full, weights of another kind."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from mrl.cli import main
from mrl.commands.export_checkpoint import _find, _run_of
from mrl.errors import ExitCode
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.checkpoint.manifest import write_manifest
from parallel.ledger import Ledger
from tests.loop.forked import Command
from tests.parallel.checkpoint.test_checkpoint_layouts import build
from tests.parallel.layouts import join_mesh
from tests.parallel.test_critic import build as build_critic
from tests.ranks import run_ranks

DISK_BYTES = 30_000
"""Room for some of the tensors."""


def save(model_path: Path, root: Path, is_critic: bool) -> None:
    mesh = join_mesh(model_path, {})
    store = Checkpoints(root, mesh, keep=1)
    if is_critic:
        store.save(3, build_critic(model_path, mesh, Ledger(torch.device("cpu"))), {})
    else:
        store.save(3, build(model_path, mesh), {})


@pytest.fixture(scope="module")
def checkpoint(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("policy") / "checkpoints"
    run_ranks(1, save, model_path, root, False, folder=root.parent)
    return root / "iter_0000003"


def refusal(source: Path, target: Path | str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["export", str(source), str(target)])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("mrl: ")
    assert error.count("\n") == 1
    return error


def test_a_folder_that_cannot_be_made_is_refused_in_one_line(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "empty")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    for target in (".", "..", "/", "file", "nowhere", "linked"):
        error = refusal(checkpoint, target, capsys)
        assert f"{os.path.abspath(target)} is not an empty folder" in error
    assert "Not a directory" in refusal(checkpoint, "file/below", capsys)
    assert "name too long" in refusal(checkpoint, "x" * 300, capsys)
    assert "/proc/new cannot be made: " in refusal(checkpoint, "/proc/new", capsys)  # root, too
    monkeypatch.chdir(tmp_path / "empty")
    assert "the folder that you are in" in refusal(checkpoint, ".", capsys)
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "empty").is_dir()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_the_right_to_write(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o500)
    assert "Permission denied" in refusal(checkpoint, tmp_path / "new", capsys)


def test_an_empty_folder_is_filled(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "empty"
    target.mkdir()
    main(["export", str(checkpoint), str(target)])
    assert (target / "model-00001-of-00001.safetensors").is_file()


def test_a_disk_that_runs_full_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for it; the system reports both where it writes."""

    def limited(arguments: list[str]) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python does where it starts
        resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BYTES, DISK_BYTES))
        main(arguments)

    target, printed = tmp_path / "new", tmp_path.with_name(f"{tmp_path.name}.printed")
    words = ["export", str(checkpoint), str(target)]
    done = Command(words, os.environ, printed, entry=limited).finish(120)
    assert done.returncode == ExitCode.DISK
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"mrl: {target} could not be written: ")
    assert "File too large" in last
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_is_not_exported_as_a_language_model(
    tied: bool, model_path: Path, tied_model_path: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    root, base = tmp_path / "critic", tied_model_path if tied else model_path
    run_ranks(1, save, base, root, True, folder=tmp_path / "out")
    error = refusal(root / "iter_0000003", tmp_path / "new", capsys)
    assert "is a critic's: its head has 1 row(s), not the 64 of the vocabulary" in error
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_is_found_from_inside_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "run/checkpoints/iter_0000003"
    checkpoint.mkdir(parents=True)
    write_manifest(checkpoint, {}, {})
    (tmp_path / "run/config.yaml").touch()
    for here, source in (
        (checkpoint, "."),
        (checkpoint.parent, checkpoint.name),
        (tmp_path, "run"),
    ):
        monkeypatch.chdir(here)
        found = _find(Path(source))
        assert found.resolve() == checkpoint
        assert _run_of(found).resolve() == tmp_path / "run"
