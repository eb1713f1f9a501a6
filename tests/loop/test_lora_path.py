"""`mrl check` reads what a LoRA run begins with or goes on from: lora.path, and its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.cli import main
from mrl.config import load_recipe
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.hf_config import HfModel
from parallel.lora.peft_folder import WEIGHTS
from parallel.lora.weights import LoraSetup
from tests.loop.conftest import TOY_RECIPE, Toy
from tests.loop.test_refusals import refused
from tests.parallel.layouts import build, join_mesh
from tests.parallel.lora.exchange import ALPHA, RANK, make_adapter, write_adapter
from tests.ranks import run_ranks

LORA = (f"lora.rank={RANK}", f"lora.alpha={ALPHA}")


def test_a_bad_folder_is_found_before_the_start(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = HfModel.read(toy.model)
    write_adapter(tmp_path / "adapter", model, make_adapter(model, "none"))
    path = f"lora.path={tmp_path / 'adapter'}"
    command = ["check", str(TOY_RECIPE), *toy.overrides(tmp_path / "run", *LORA, path)]
    main(command)
    assert "rank 3, alpha 6: q_proj, k_proj, v_proj, o_proj" in capsys.readouterr().out
    line = refused(capsys, [*command, "lora.experts=per_expert"])
    assert "has no base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_A.weight" in line
    line = refused(capsys, [*command, "lora.rank=4"])
    assert "r is 3, but lora.rank is 4; give lora.rank=3" in line
    (tmp_path / "adapter" / WEIGHTS).unlink()
    assert "has no adapter_model.safetensors" in refused(capsys, command)


def test_the_path_counts_from_the_recipe_too(tmp_path: Path) -> None:
    (tmp_path / "adapters/first").mkdir(parents=True)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(TOY_RECIPE.read_text() + "lora:\n  path: adapters/first\n")
    lora = load_recipe(recipe).lora
    assert lora is not None
    assert lora.path == str(tmp_path / "adapters/first")


def saves(model: Path, root: Path) -> None:
    mesh = join_mesh(model, {})
    lora = LoraSetup(make_adapter(HfModel.read(model), "none"))
    Checkpoints(root / "lora/checkpoints", mesh, keep=1).save(1, build(model, mesh, lora=lora), {})
    Checkpoints(root / "full/checkpoints", mesh, keep=1).save(1, build(model, mesh), {})


def test_a_checkpoint_of_another_kind_is_found_before_the_start(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(1, saves, Path(toy.model), tmp_path, folder=tmp_path / "out")
    for name, changes, expected in (
        ("lora", (), "holds a LoRA adapter of rank 3 alone, and this run trains all weights; give"),
        ("full", LORA, "holds all weights of the model, and this run trains a LoRA adapter; leave"),
        (
            "lora",
            ("lora.rank=4", LORA[1]),
            "holds another LoRA adapter: rank 3 there, 4 here; give",
        ),
    ):
        overrides = toy.overrides(tmp_path / name, *changes)
        line = refused(capsys, ["check", str(TOY_RECIPE), *overrides])
        assert f"checkpoint {tmp_path / name}/checkpoints/iter_0000001 {expected}" in line
