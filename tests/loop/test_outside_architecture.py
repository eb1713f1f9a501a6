"""A model of an architecture that mrl does not have: `model.architecture: file.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mrl.cli import main
from mrl.config import load_recipe
from mrl.errors import InputError
from parallel.hf_config import HfModel
from tests.loop.conftest import TOY_RECIPE, Toy, environment
from tests.loop.forked import Command
from tests.loop.my_moe import block_with, write_my_moe

FILE = "my/my_moe.py"


@pytest.fixture
def mine(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """The user's model, in whose parent folder the user is."""
    model = write_my_moe(toy.model, tmp_path)
    monkeypatch.chdir(tmp_path)
    return Toy(model)


def test_it_trains_resumes_and_exports_as_the_known_one(
    mine: Toy, recorded: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    saved = f"debug.load_rollouts={recorded / 'rollouts'}"
    more = (f"model.architecture={FILE}", saved, "checkpoint.save_every=1")
    for file in (mine.model / "config.json", tmp_path / FILE):  # a key of its own: sizes has it
        file.write_text(file.read_text().replace('"vocab_size"', '"num_words"'))
    done = mine.run(tmp_path / "run", *more, "train.num_steps=1")
    assert done.returncode == 0, done.stderr
    require_the_same_text(mine, tmp_path, more)
    arguments = ["train", str(tmp_path / "run"), "train.num_steps=2"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = Command(arguments, environment(), tmp_path / "again", elsewhere).finish(120)
    assert done.returncode == 0, done.stderr
    assert load_recipe(tmp_path / "run/config.yaml").model.architecture == str(tmp_path / FILE)

    monkeypatch.chdir(elsewhere)
    main(["export", str(tmp_path / "run"), "mine"])
    main(["export", str(recorded / "checkpoints/iter_0000002"), "known"])
    ours, known = (
        load_file(f"{name}/model-00001-of-00001.safetensors") for name in ("mine", "known")
    )
    assert ours.keys() == known.keys()
    assert all(tensor.equal(known[name]) for name, tensor in ours.items())
    assert json.loads(Path("mine/config.json").read_text())["model_type"] == "my_moe"

    (tmp_path / FILE).rename(tmp_path / "moved.py")
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "run"), "again"])
    message = capsys.readouterr().err
    assert f"no file {tmp_path / FILE}" in message
    assert "say where it is now with --architecture FILE" in message
    main(["export", str(tmp_path / "run"), "again", "--architecture", str(tmp_path / "moved.py")])


def require_the_same_text(mine: Toy, folder: Path, more: tuple[str, ...]) -> None:
    """A run is not continued with another text of the file."""
    file = folder / FILE
    text = file.read_text()
    file.write_text(f"{text}# another\n")
    done = mine.run(folder / "run", *more, "train.num_steps=2")
    file.write_text(text)
    assert done.returncode == 2
    assert "model.architecture is" in done.stderr
    assert "whose contents have changed (changes only with --allow)" in done.stderr


def test_check_and_plan_use_it(mine: Toy, recorded: Path, tmp_path: Path, capsys):
    overrides = mine.overrides(tmp_path / "run", f"model.architecture={FILE}")
    overrides += [f"debug.load_rollouts={recorded / 'rollouts'}", "train.num_steps=4"]
    main(["check", str(TOY_RECIPE), *overrides])
    assert "my_moe, 8 experts in 4 of 4 layers" in capsys.readouterr().out
    main(["check", "--plan", str(TOY_RECIPE), *overrides])
    assert "my_moe" in capsys.readouterr().out
    (mine.model / "model.safetensors").unlink()
    main(["check", "--plan", str(TOY_RECIPE), *overrides])
    assert "config.json only" in capsys.readouterr().out


def test_the_engine_needs_a_package_for_it(mine: Toy, tmp_path: Path, capsys, monkeypatch):
    overrides = mine.overrides(tmp_path / "run", f"model.architecture={FILE}")
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "")
    with pytest.raises(SystemExit):
        main(["check", str(TOY_RECIPE), *overrides])
    assert "set SGLANG_EXTERNAL_MODEL_PACKAGE to a package" in capsys.readouterr().err
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "not_there_at_all")
    with pytest.raises(SystemExit):
        main(["check", str(TOY_RECIPE), *overrides])
    assert "not_there_at_all cannot be imported: ModuleNotFoundError" in capsys.readouterr().err


def test_the_engine_must_see_the_same_moe_layers(mine: Toy, tmp_path: Path, capsys) -> None:
    file = mine.model / "config.json"
    known = {"model_type": "qwen3_moe", "first_k_dense_replace": 1}
    file.write_text(json.dumps(json.loads(file.read_text()) | known))
    overrides = mine.overrides(tmp_path / "run", f"model.architecture={FILE}")
    with pytest.raises(SystemExit):
        main(["check", str(TOY_RECIPE), *overrides])
    message = "has the MoE layers (1, 2, 3, 4), but the engine's routes would have (2, 3, 4)"
    assert message in capsys.readouterr().err
    main(["check", str(TOY_RECIPE), *overrides, "moe.routing_replay=r2"])


@pytest.mark.release
def test_it_is_rolled_out_and_synced(mine: Toy, recorded: Path, tmp_path: Path, monkeypatch):
    """The engine serves the user's class, with the weights that the trainer sends under its rules."""
    monkeypatch.syspath_prepend(tmp_path)  # of the fork, for which PYTHONPATH comes too late
    done = mine.run(
        tmp_path / "run", f"model.architecture={FILE}", "train.num_steps=2",
        PYTHONPATH=str(tmp_path), SGLANG_EXTERNAL_MODEL_PACKAGE="my_models",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ours, known = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[:2]]
        for run in (tmp_path / "run", recorded)
    )
    for key in ("reward/mean", "loss/policy", "grad_norm"):
        assert [row[key] for row in ours] == [row[key] for row in known]


def test_unknown_model_type_tells_of_the_key(mine: Toy) -> None:
    with pytest.raises(InputError, match=r"'my_moe' is not in .* model.architecture=path/file.py"):
        HfModel.read(mine.model)
    assert HfModel.read(mine.model, "qwen3_moe").architecture.model_type == "qwen3_moe"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ARCHITECTURE = Arch", "MINE = Arch", "no object 'ARCHITECTURE' in it"),
        ("ARCHITECTURE = Arch", "ARCHITECTURE = sizes; Arch", "is a function, expected an object of"),
        ('("my_moe", sizes,', '("my_moe", 3,', "sizes is 3, expected a function"),
        ("return ModelSizes(", "return dict(", "sizes returned {.*expected a .*ModelSizes"),
        ('hf["vocab_size"]', 'hf["vocab"]', "sizes reads the key 'vocab', which config.json lacks"),
        ("**common.grouped_query_config(hf),", "", "expected a dict with kv_channels"),
        ("rules, moe_layer_numbers)", "rules, lambda hf: [1])", r"returned \[1\], expected \(1, 2, 3"),
        ("(f\"{mlp}.gate.weight\",)", "(f\"{mlp}.gate.weight\",), 'row'", "has split 'row', expected"),
        ("*common.decoder_rules(hf),", "*2 * common.decoder_rules(hf),", "is in 2 rules, expected one"),
        ("mlp = f", "mlp = 1 / 0; f", "rules raised ZeroDivisionError: division by zero"),
        ('"qk_layernorm": True,', '"moe_layer_freq": 1,', "has moe_layer_freq 1, expected a list"),
        ('"qk_layernorm": True,', '"moe_layer_freq": [1] * 3,', "each of its 4 layers"),
        ('"num_moe_experts": num_experts(hf)', '"num_moe_experts": 3', "but sizes has num_experts 8"),
        ('gate.weight",)', 'gate.weight")', "has hf 'model.layers.*expected a tuple of names"),
        ('gate.weight",)', 'gate.weight",), "gated"', r"has 1 name\(s\) of .*expected 2 for split"),
    ],
)  # fmt: skip
def test_a_broken_contract_is_one_line(
    mine: Toy, tmp_path: Path, old: str, new: str, message: str
) -> None:
    source = block_with("ARCHITECTURE =")
    assert old in source
    file = tmp_path / "broken.py"
    file.write_text(source.replace(old, new))
    with pytest.raises(InputError, match=message) as caught:
        HfModel.read(mine.model, str(file))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"model.architecture '{file}'")
