"""`mrl branch`: the run that is meant, and a copy that fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from mrl.commands import branch_run
from mrl.commands.branch_run import branch
from mrl.commands.export_checkpoint import export
from mrl.config import Recipe, dump_recipe, load_recipe
from mrl.errors import DiskFailed, InputError
from mrl.run.folder import RunFolder
from mrl.run.source import load_run
from parallel.checkpoint.manifest import folder_name, point_to, record, write_manifest
from tests.loop.conftest import TOY_RECIPE


def write_run(root: Path, step: int) -> Path:
    """Write a run folder with a checkpoint of `step`, which has one file."""
    folder = RunFolder(root)
    checkpoint = folder.checkpoints / folder_name(step)
    checkpoint.mkdir(parents=True)
    dump_recipe(load_recipe(TOY_RECIPE, [f"output_dir={root}"]), folder.config)
    folder.metrics.write_text("".join(json.dumps({"step": i}) + "\n" for i in range(step)))
    (checkpoint / "weights").write_text("1")
    write_manifest(checkpoint, {}, {"weights": record(checkpoint / "weights")})
    point_to(folder.checkpoints, step)
    return root


def test_a_run_whose_folder_is_named_like_a_step_of_another(tmp_path: Path) -> None:
    """Users name the branch of `first@4` so."""
    first, named = write_run(tmp_path / "first", 4), write_run(tmp_path / "first@4", 6)
    with pytest.raises(InputError, match=f"write {named}/ for .*, or {first}/@4 for"):
        branch(str(named), tmp_path / "new", [])
    assert branch(f"{named}/", tmp_path / "one", []).step == 6
    assert branch(f"{first}/@4", tmp_path / "two", []).step == 4
    first.rename(tmp_path / "elsewhere")
    assert branch(str(named), tmp_path / "three", []).step == 6


@pytest.mark.parametrize("was_there", [True, False])
@pytest.mark.parametrize(
    ("number", "kind", "says"),
    [
        (errno.ENOSPC, DiskFailed, "could not be written: the disk is full"),
        (errno.EACCES, InputError, "Permission denied; no branch was made, give another folder"),
    ],
)
def test_a_copy_that_fails_says_why_and_leaves_nothing(
    number: int, kind: type[Exception], says: str, was_there: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run, new = write_run(tmp_path / "run", 2), tmp_path / "new"
    if was_there:
        new.mkdir()

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        for name in ("os.link", "shutil.copy2"):
            patched.setattr(name, fail)
        with pytest.raises(kind, match=says):
            branch(str(run), new, [])
    assert new.exists() == was_there
    assert branch(str(run), new, []).step == 2


def test_a_branch_into_the_same_folder_leaves_the_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, new = write_run(tmp_path / "run", 2), tmp_path / "new"
    contents_of = branch_run.contents_of

    def late(recipe: Recipe) -> dict[str, str]:
        monkeypatch.setattr(branch_run, "contents_of", contents_of)
        branch(str(run), new, ["optimizer.lr=0.5"])  # by another process
        return contents_of(recipe)

    monkeypatch.setattr(branch_run, "contents_of", late)
    with pytest.raises(InputError, match=f"another process is making {new}; give another folder"):
        branch(str(run), new, [])
    assert load_run(new).optimizer.lr == 0.5


def test_a_checkpoint_that_its_running_job_removes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", 2)
    gone = RunFolder(run).checkpoints / folder_name(2)

    def late(*_: object, **__: object) -> None:
        shutil.rmtree(gone, ignore_errors=True)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(gone))

    monkeypatch.setattr(branch_run, "_link", late)
    monkeypatch.setattr("parallel.checkpoint.hf_export.export_checkpoint", late)
    with pytest.raises(
        InputError, match=f"^{gone} was removed meanwhile: .* give the command again"
    ):
        branch(str(run), tmp_path / "new", [])
    assert not (tmp_path / "new").exists()
    write_run(run, 2)  # again
    with pytest.raises(InputError, match=f"^{gone} was removed meanwhile"):
        export(run, tmp_path / "exported", None, 1)
