"""What a run needs of its own files when it is resumed: they are whole, rebuilt, or named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mrl.config import load_recipe
from mrl.errors import InputError
from mrl.preflight import check
from mrl.run.folder import RunFolder
from mrl.run.metric_rows import COPY
from parallel.checkpoint.manifest import damage
from tests.loop.conftest import TOY_RECIPE, Toy, trained
from tests.ranks import run_ranks

LOSS = ("step", "loss/total", "grad_norm")


def losses(folder: RunFolder) -> list[list[float]]:
    return [[row[key] for key in LOSS] for row in folder.read_metrics()]


@pytest.mark.release
@pytest.mark.timeout(300)
def test_lost_and_damaged_rows_come_back_from_the_checkpoint(
    toy: Toy, recorded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved = f"debug.load_rollouts={recorded / 'rollouts'}"
    given = toy.overrides(tmp_path / "run", saved, "checkpoint.save_every=2")
    run_ranks(1, trained, [*given, "train.num_steps=2"], folder=tmp_path / "o1")
    folder = RunFolder(tmp_path / "run")
    checkpoint = folder.checkpoints / "iter_0000002"
    rows = folder.metrics.read_bytes()
    assert (checkpoint / COPY).read_bytes() == rows
    assert damage(checkpoint) is None
    folder.metrics.write_bytes(rows.replace(b'"step": 1', b'"step": '))
    capfd.readouterr()
    run_ranks(1, trained, [*given, "train.num_steps=4"], folder=tmp_path / "o2")
    said = " ".join("".join(capfd.readouterr()).split())
    assert "metrics.jsonl: the row of step 1 is missing, 1 line(s) cannot be read; training" in said
    assert losses(folder) == losses(RunFolder(recorded))
    assert folder.metrics.read_bytes().startswith(rows)
    assert (folder.checkpoints / "iter_0000004" / COPY).read_bytes() == folder.metrics.read_bytes()


def test_what_cannot_be_continued_is_refused_before_an_engine_starts(
    toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    """Model, data and rows that are not those of the run; `check` is all that happens before."""
    run, model, data = (tmp_path / name for name in ("run", "model", "rows.jsonl"))
    shutil.copytree(recorded, run)
    shutil.copytree(toy.model, model)
    rows = [json.dumps({"prompt": f"{n} of them"}) + "\n" for n in range(8)]
    data.write_text("".join(rows))
    more = ["train.num_steps=4", "checkpoint.save_every=2", f"data.path={data}"]
    recipe = load_recipe(TOY_RECIPE, [*toy.overrides(run, *more), f"model.path={model}"])
    folder = RunFolder(run)
    shutil.rmtree(run / "configs", ignore_errors=True)
    folder.history.file.unlink()
    folder.open(recipe, check(recipe, 1, allowed=None).update, 4)
    folder.close()
    check(recipe, 1)

    def refused() -> str:
        with pytest.raises(InputError) as caught:
            check(recipe, 1)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    data.write_text("".join(reversed(rows)))
    assert f"data.path is '{data}', whose contents have changed" in refused()
    data.write_text("".join(rows))
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-5] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    assert f"model.path is '{model}', whose contents have changed (never changes" in refused()
    weights[-5] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    folder.metrics.unlink()
    check(recipe, 1)  # brought back by the start
    (folder.checkpoints / "iter_0000004" / COPY).write_bytes(b"x")
    (folder.checkpoints / "iter_0000002" / COPY).write_bytes(b"x")
    assert "none of 2 checkpoint(s) is whole" in refused()
