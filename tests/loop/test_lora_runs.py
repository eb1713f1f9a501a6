"""LoRA runs: what they begin with or go on from is checked first; a resumed one has the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.cli import main
from mrl.config import load_recipe
from mrl.run.folder import RunFolder
from mrl.toy_model import write_toy_model
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.checkpoint.saved_tensors import SavedTensors
from parallel.hf_config import HfModel
from parallel.lora.peft_folder import WEIGHTS
from parallel.lora.weights import LoraSetup
from tests.loop.conftest import TOY_RECIPE, Toy, trained
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
    for name in ("lora", "full"):
        (root / name).mkdir(parents=True, exist_ok=True)
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


@pytest.mark.release
@pytest.mark.timeout(400)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
    toy: Toy, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = HfModel.read(toy.model)
    write_adapter(tmp_path / "adapter", model, make_adapter(model, "shared_outer"))

    def overrides(name: str, num_steps: int, *more: str) -> list[str]:
        saved = f"debug.load_rollouts={recorded / 'rollouts'}"
        steps = (f"train.num_steps={num_steps}", "checkpoint.save_every=2")
        lora = (*LORA, "lora.experts=shared_outer", f"lora.path={tmp_path / 'adapter'}")
        return toy.overrides(tmp_path / name, saved, *steps, *lora, *more)

    def go(name: str, num_steps: int) -> None:
        out = tmp_path / f"out_{name}_{num_steps}"
        run_ranks(1, trained, overrides(name, num_steps), folder=out)

    go("whole", 4)
    go("run", 2)
    go("run", 4)
    whole, run = (
        SavedTensors(tmp_path / name / "checkpoints/iter_0000004") for name in ("whole", "run")
    )
    assert list(whole) == list(run)
    assert all(whole[key].equal(run[key]) for key in whole)
    rows = [RunFolder(tmp_path / name).read_metrics() for name in ("whole", "run")]
    for key in ("loss/policy", "grad_norm"):
        assert [row[key] for row in rows[0]] == [row[key] for row in rows[1]]

    command = ["check", str(TOY_RECIPE), *overrides("run", 4, "lora.init=gaussian")]
    line = refused(capsys, command)
    assert "lora.init is 'kaiming' there and 'gaussian' now (never changes in a run); keep" in line
    (tmp_path / "adapter").rename(tmp_path / "moved")
    main(["check", str(TOY_RECIPE), *overrides("run", 4, f"lora.path={tmp_path / 'moved'}")])

    main(["export", str(tmp_path / "run"), str(tmp_path / "exported")])
    assert "| algorithm | gspo |" in (tmp_path / "exported/README.md").read_text()
    write_toy_model(tmp_path / "other", seed=1)
    capsys.readouterr()
    merge = ["export", str(tmp_path / "run"), "--merged", str(tmp_path / "merged")]
    main(merge)
    assert "are not those on which the adapter was trained" not in printed(capsys)
    main([*merge[:-1], str(tmp_path / "wrong"), "--model", str(tmp_path / "other")])
    assert "other are not those on which the adapter was trained: merged" in printed(capsys)


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())
