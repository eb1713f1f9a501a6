"""The configuration of a service: its errors, and its keys beside those of a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config import Recipe, ServiceConfig, load_recipe, load_service
from mrl.config.branch import Branch
from mrl.config.describe import keys_of_branch
from mrl.errors import InputError

ROOT = Path(__file__).parents[2]
MINIMAL = "model: {path: m}\noutput_dir: service\n"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("parallel.tp_size=2", "did you mean 'parallel.tensor_model_parallel_size'"),
        ("rollout.temperature=1", "a key of a tenant's recipe"),
        ("reward=first_char", "a key of a tenant's recipe"),
        ("lora.max_rnk=3", "did you mean 'lora.max_rank'"),
        ("lora.experts=[some]", "lora.experts.0: Input should be 'none', 'shared_outer'"),
        ("control.tcp=70000", "control.tcp"),
        ("model.transformer_impl=transformer_engine", "adapters are built into mrl's own layers"),
        ("output_dir=", "output_dir: empty"),
    ],
)
def test_errors_are_one_line_that_names_the_key(tmp_path: Path, override: str, says: str) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(MINIMAL)
    with pytest.raises(InputError) as error:
        load_service(file, [override])
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_recipe_and_a_service_are_not_mistaken_for_each_other() -> None:
    with pytest.raises(InputError, match=r"is a recipe, and .*: mrl train .*: mrl tenants add "):
        load_service(ROOT / "launch/recipes/toy_lora.yaml")
    with pytest.raises(InputError, match=r"configures a service, and is no recipe; .*: mrl serve "):
        load_recipe(ROOT / "launch/services/toy.yaml")


def test_short_forms_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(MINIMAL + "lora: {experts: per_expert}\n")
    service = load_service(file, ["tenants.max_number=3"])
    assert service.lora.experts == ("per_expert",)
    assert service.tenants.max_number == 3


def test_keys_that_a_recipe_has_too_are_of_the_same_type_and_default() -> None:
    shared = ("model", "parallel", "megatron", "train", "rollout", "moe", "watch", "checkpoint")
    ours, theirs = ({key.name: key for key in keys_of_branch(b)} for b in (ServiceConfig, Recipe))
    compared = 0
    for name in shared:
        if not ours[name].branches:  # megatron
            continue
        here, there = (_keys(keys[name].branches[0]) for keys in (ours, theirs))
        for key in here.keys() - {"capture_routes"}:
            assert here[key] == there[key], f"{name}.{key}"
            compared += 1
    assert compared > 30


def _keys(branch: type[Branch]) -> dict[str, tuple[str, object, bool]]:
    return {key.name: (key.type, key.default, key.is_required) for key in keys_of_branch(branch)}


def test_the_branches_that_other_rooms_take() -> None:
    service = ServiceConfig.model_validate(
        {
            "model": {"path": "m"},
            "output_dir": "o",
            "rollout": {"mem_fraction_static": 0.3},
            "moe": {"z_loss_coeff": 0.1, "capture_routes": False},
        }
    )
    assert service.rollout_config().mem_fraction_static == 0.3
    assert service.moe_config().z_loss_coeff == 0.1
    assert service.moe_config().routing_replay == "off"


def test_the_toy_service_takes_the_toy_recipe_with_an_adapter() -> None:
    service = load_service(ROOT / "launch/services/toy.yaml")
    recipe = load_recipe(ROOT / "launch/recipes/toy_lora.yaml")
    assert recipe.lora is not None
    assert recipe.model == service.model
    assert recipe.lora.rank <= service.lora.max_rank
    assert recipe.lora.experts in service.lora.experts
