"""What `mrl check` refuses of `lora` in a recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mrl.config import load_recipe
from mrl.config.adapter import AdapterLimits
from mrl.config.service import ServiceConfig
from mrl.engines.sglang.settings import adapter_settings
from mrl.errors import InputError
from mrl.preflight import check
from mrl.preflight.lora import check_lora
from mrl.service.engines import engine_limits
from mrl.toy_model import write_toy_model
from parallel.hf_config import HfModel
from parallel.lora.rules import read_adapter
from tests.loop.conftest import REPOSITORY
from tests.loop.test_refusals import refused
from tests.parallel.models import write_tiny

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
        (
            "model.transformer_impl=transformer_engine",
            ["only mrl's native layers", "leave it at auto"],
        ),
        ("optimizer.name=muon", ["Muon's rule is for whole matrices", "leave it at adam"]),
        ("moe.expert_bias_update_rate=0.001", ["it would change the base", "set it to 0"]),
        (
            "megatron.overlap_param_gather=true",
            ["it needs hooks that the matrices", "leave it out"],
        ),
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
            [
                "algorithm.reference_path=models/other does not go with lora",
                "without the adapter",
                "leave",
            ],
        ),
        ("lora.targets=[q_porj]", ["lora.targets: got 'q_porj'; give `attention`, or some of"]),
        ("lora.targets=[gate]", ["got 'gate': the router stays that of the base"]),
        ("lora.dropout=0.1", ["lora.dropout"]),
        ("lora.base_dtype=bfloat16", ["lora.base_dtype", "expected null", "set model.dtype"]),
        ("lora.rank=0", ["lora.rank"]),
        ("lora.rank=100000", ["lora.rank is 100000, but k_proj is 32 x 64", "to at most that"]),
        ("lora.rank=33", ["lora.rank is 33", "the rank of an update is at most 32"]),
        ("lora.experts=all", ["lora.experts"]),
    ],
)
def test_what_does_not_go_with_an_adapter_is_refused(
    key: str, parts: list[str], command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, [*command, key])
    assert all(part in line for part in parts), line


def test_the_plan_says_whose_wish_the_layers_are_and_what_the_adapter_begins_with(
    command: list[str],
) -> None:
    plan = check(load_recipe(RECIPE, command[2:]), 1)
    assert "local layers (LoRA needs them)" in dict(plan.rows())["trainer"]
    assert dict(plan.rows())["lora"].endswith("the base is frozen")
    lora = plan.recipe.lora.model_copy(update={"path": "my-adapter"})
    begun = replace(plan, recipe=plan.recipe.model_copy(update={"lora": lora}))
    assert dict(begun.rows())["lora"].endswith("the base is frozen; begins with my-adapter")


def test_the_rank_of_the_smallest_matrix_is_the_limit_also_of_a_service(command: list[str]) -> None:
    recipe = load_recipe(RECIPE, [*command[2:], "lora.rank=32"])
    model = HfModel.read(recipe.model.path)
    assert check_lora(recipe, model) is not None
    service = {"model": {"path": str(model.path)}, "output_dir": "x", "lora": {"max_rank": 33}}
    with pytest.raises(InputError, match=r"lora\.max_rank is 33, but k_proj is 32 x 64"):
        engine_limits(ServiceConfig.model_validate(service), model)


def test_an_engine_over_several_nodes_serves_no_adapter(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    keys = [*command[2:], "rollout.tensor_parallel_size=2"]
    with pytest.raises(InputError, match=r"the engine spans 2 nodes, .* set lora\.rollout=merged"):
        check(load_recipe(RECIPE, keys), 2)
    merged = check(load_recipe(RECIPE, [*keys, "lora.rollout=merged"]), 2)
    assert merged.engines.num_nodes == 2


def test_replicas_of_the_attention_serve_no_adapter_of_experts(command: list[str]) -> None:
    keys = [
        *command[2:],
        "rollout.tensor_parallel_size=2",
        "rollout.data_parallel_attention_size=2",
    ]
    recipe = load_recipe(RECIPE, keys)
    with pytest.raises(InputError, match=r"attention_size=2 experts compute .*lora\.experts=none"):
        check(recipe, 2)
    recipe = load_recipe(RECIPE, [*keys, "lora.experts=none"])
    with pytest.raises(InputError, match=r"attention_size=2 SGLang serves adapters on GPUs only"):
        check(recipe, 2)
    assert check(recipe, 2, elsewhere=True).adapter is not None
    limits = AdapterLimits.around([read_adapter(recipe.lora, HfModel.read(recipe.model.path))])
    settings = adapter_settings(limits, on_gpu=True, num_replicas=2)
    assert settings["lora_backend"] == "triton"  # of 0.5.23's backends, this one alone


def test_the_query_of_latent_attention_has_no_adapter_that_is_served(tmp_path: Path) -> None:
    model = HfModel.read(write_tiny("deepseek_v3", tmp_path / "model", q_lora_rank=None))
    with pytest.raises(InputError, match="'q_proj' only with 'k_proj' and 'v_proj'"):
        check_lora(load_recipe(RECIPE, ["lora.experts=none"]), model)
    for key in (
        "lora.rollout=merged",
        "lora.targets=[kv_b_proj, o_proj]",
        "rollout.engine=my.engine",
    ):
        assert check_lora(load_recipe(RECIPE, ["lora.experts=none", key]), model) is not None
