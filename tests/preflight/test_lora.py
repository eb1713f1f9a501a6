"""What `mrl check` refuses of `lora` in a recipe."""

from __future__ import annotations

import pytest

from mrl.config import load_recipe
from mrl.errors import InputError
from mrl.preflight.lora import check_lora
from mrl.toy_model import write_toy_model
from parallel.hf_config import HfModel
from tests.loop.conftest import REPOSITORY
from tests.loop.test_refusals import refused

RECIPE = REPOSITORY / "launch/recipes/toy_lora.yaml"


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("toy")
    write_toy_model(folder / "model", seed=0)
    return ["check", str(RECIPE), f"model.path={folder / 'model'}", f"output_dir={folder / 'run'}"]


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        # What the machine or the model refuses too, before `mrl check` comes to the adapter.
        ("model.transformer_impl=transformer_engine", ["native layers only", "leave it at auto"]),
        ("moe.expert_bias_update_rate=0.001", ["it would change the base", "set it to 0"]),
        ("megatron.overlap_param_gather=true", ["without the hooks that it needs", "leave it out"]),
    ],
)
def test_what_an_adapter_refuses(key: str, parts: list[str], command: list[str]) -> None:
    recipe = load_recipe(RECIPE, [*command[2:], key])
    with pytest.raises(InputError) as caught:
        check_lora(recipe, HfModel.read(recipe.model.path))
    parts = [f"{key} does not go with lora: ", *parts]
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        (
            "rollout.true_on_policy=true",
            ["rollout.true_on_policy=true does not go with lora", "no low-rank update", "leave it"],
        ),
        (
            "algorithm.reference_path=models/other",
            ["algorithm.reference_path=models/other does not go with lora", "turned off", "leave"],
        ),
        ("lora.targets=[q_porj]", ["lora.targets: got 'q_porj'; give `attention`, or some of"]),
        ("lora.targets=[gate]", ["got 'gate': the router stays that of the base"]),
        ("lora.dropout=0.1", ["lora.dropout"]),
        ("lora.rank=0", ["lora.rank"]),
        ("lora.experts=all", ["lora.experts"]),
    ],
)
def test_what_does_not_go_with_an_adapter_is_refused(
    key: str, parts: list[str], command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, [*command, key])
    assert all(part in line for part in parts), line
