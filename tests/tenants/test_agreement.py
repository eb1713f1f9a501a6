"""What of a tenant's recipe has to agree with its service, and what it takes from it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from mrl.config import Recipe, dump_recipe, load_recipe
from mrl.config.suggest import all_keys
from mrl.errors import InputError
from mrl.service.agreement import resolve_tenant
from mrl.service.registry import Registry
from tests.tenants.parts import service, tenant


def test_keys_that_are_left_out_are_those_of_the_service(tmp_path: Path, model: Path) -> None:
    keys: dict[str, Any] = {
        "parallel": {"tensor_model_parallel_size": 2},
        "rollout": {"mem_fraction_static": 0.3, "server_args": {"log_level": "info"}},
        "megatron": {"bucket_size": 7},
        "moe": {"z_loss_coeff": 0.5},
    }
    ours = service(tmp_path, model, **keys)
    recipe = resolve_tenant(ours, tenant(tmp_path / "a"), "a")
    assert recipe.model == ours.model
    assert recipe.parallel == ours.parallel
    assert recipe.megatron == ours.megatron
    assert recipe.rollout.mem_fraction_static == 0.3
    assert recipe.rollout.max_total_tokens == 4096
    assert recipe.rollout.server_args == {"log_level": "info"}
    assert recipe.rollout.max_response_len == 8
    assert recipe.moe.z_loss_coeff == 0.5
    assert recipe.moe.routing_replay == "r3"
    dump_recipe(recipe, tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


def test_every_key_that_differs_is_named_in_one_message(tmp_path: Path, model: Path) -> None:
    tree = tenant(
        tmp_path / "a",
        model={"path": "elsewhere", "dtype": "bfloat16"},
        parallel={"tensor_model_parallel_size": 2},
        rollout={"max_total_tokens": 9, "server_args": {"log_level": "info"}},
        megatron={"bucket_size": 3},
        watch={"limits": {"save": 9.0}},
        train={"recompute": True},
        checkpoint={"stop_limit_s": 9.0, "save_every": 2},
    )
    with pytest.raises(InputError) as error:
        resolve_tenant(service(tmp_path, model), tree, "a")
    words = str(error.value)
    for part in (
        f"model.path is 'elsewhere' and '{model / 'model'}' in the service",
        "model.dtype is 'bfloat16' and 'float32' in the service",
        "parallel.tensor_model_parallel_size is 2 and 1 in the service",
        "rollout.max_total_tokens is 9 and 4096 in the service",
        "rollout.server_args.log_level is 'info' and not set in the service",
        "megatron.bucket_size is 3 and not set in the service",
        "watch.limits.save is 9.0 and not set in the service",
        "train.recompute is True and False in the service",
        "checkpoint.stop_limit_s is 9.0 and 25.0 in the service",
        "leave these keys out",
    ):
        assert part in words
    assert "save_every" not in words
    assert "\n" not in words


def test_a_default_that_is_given_is_a_choice_too(tmp_path: Path, model: Path) -> None:
    ours = service(tmp_path, model, rollout={"mem_fraction_static": 0.3})
    tree = tenant(tmp_path / "a", rollout={"mem_fraction_static": 0.6})
    with pytest.raises(InputError, match=r"mem_fraction_static is 0\.6 and 0\.3 in the service"):
        resolve_tenant(ours, tree, "a")
    assert resolve_tenant(ours, tree, "a", is_record=True).rollout.mem_fraction_static == 0.3


def test_a_record_keeps_to_what_may_not_change_freely(tmp_path: Path, model: Path) -> None:
    ours = service(tmp_path, model)
    tree = resolve_tenant(ours, tenant(tmp_path / "a"), "a").model_dump(mode="json")
    assert resolve_tenant(ours, tree, "a", is_record=True) == Recipe.model_validate(tree)
    other = service(tmp_path, model, rollout={"max_total_tokens": 64, "dtype": "bfloat16"})
    with pytest.raises(InputError) as error:
        resolve_tenant(other, tree, "a", is_record=True)
    assert "rollout.dtype is 'auto' and 'bfloat16'" in str(error.value)
    assert "max_total_tokens" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"lora": None}, "lora is not set, but all tenants share one base"),
        ({"lora": {"rollout": "merged"}}, "lora.rollout is merged"),
        ({"algorithm": {"name": "ppo"}}, "algorithm.name is ppo, which trains a critic"),
        (
            {"rollout": {"placement": "disaggregated", "num_ranks": 1}},
            "'disaggregated' and 'colocated' in the service",
        ),
        ({"async": {"max_staleness": 1}}, "and trainer take turns"),
        ({"rollout": {"true_on_policy": True}}, "rollout.true_on_policy is set"),
        ({"algorithm": {"reference_path": "m"}}, "algorithm.reference_path is set"),
        ({"moe": {"expert_bias_update_rate": 0.1}}, "moe.expert_bias_update_rate is set"),
        ({"debug": {"rollout_only": True}}, "debug.rollout_only is set"),
        ({"debug": {"load_rollouts": "r"}}, "debug.load_rollouts is set"),
        ({"profile": {"steps": [1]}}, "profile.steps is set"),
        ({"lora": {"rank": 9}}, "lora.rank is 9, but the service has lora.max_rank=8"),
        ({"lora": {"experts": "per_expert"}}, "but the service has lora.experts=[none]"),
        ({"lora": {"targets": ["q_proj", "o_proj"]}}, "lora.targets has o_proj, but"),
        ({"lora": {"targets": ["nothing"]}}, "lora.targets: got 'nothing'"),
        ({"train": {"micro_batch_tokens": 5000}}, "tenants.max_micro_batch_tokens=4096"),
        ({"reward_timeout_s": 61}, "reward_timeout_s is 61, but the service has tenants.max_rew"),
        ({"rollout": {"context_len": 65}}, "rollout.context_len is 65, but the service has"),
        ({"diagnosis": {"capture_routes": True}}, "moe.capture_routes=false"),
        ({"rollout": {"samples_per_prompt": 10**9}}, "at most 65536 samples a step"),
        ({"rollout": {"over_sampling": 1e6}}, "at most 65536 samples a step"),
        ({"rollout": {"dynamic_sampling_rounds": 65}}, "give at most 64"),
        (
            {"eval": {"sets": [{"name": "e", "path": "e", "samples_per_prompt": 10**9}]}},
            "set e: sam",
        ),
        ({"reward": None, "environment": {"name": "n", "num_workers": 65}}, "take 65 processes"),
        (
            {
                "reward": [{"name": f"r{n}"} for n in range(20)],
                "eval": {"sets": [{"name": f"e{n}", "path": "e"} for n in range(3)]},
            },
            "take 80 processes",
        ),
        ({"data": {"path": ["data.jsonl", "/dev/zero"]}}, "/dev/zero is a device, a pipe or a"),
        ({"sft": {"path": "/dev/null", "num_steps": 1, "batch_size": 1, "lr": 1}}, "/dev/null is"),
    ],
)
def test_what_a_service_cannot_do_is_refused_with_the_reason(
    tmp_path: Path, model: Path, keys: dict[str, Any], says: str
) -> None:
    ours = service(
        tmp_path,
        model,
        rollout={"context_len": 64},
        lora={"targets": ["q_proj", "v_proj"]},
        moe={"capture_routes": False},
        tenants={"max_micro_batch_tokens": 4096, "max_reward_s": 60},
    )
    fits = {"lora": {"targets": ["q_proj"]}, "moe": {"routing_replay": "off"}}
    assert resolve_tenant(ours, tenant(tmp_path / "a", **fits), "a").rollout.context_len == 64
    given = {name: value for name, value in keys.items() if name not in fits}
    for name, value in fits.items():
        given[name] = None if keys.get(name, 0) is None else value | keys.get(name, {})
    with pytest.raises(InputError) as error:
        resolve_tenant(ours, tenant(tmp_path / "a", **given), "a")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_an_adapter_may_be_too_large(tmp_path: Path, model: Path) -> None:
    for limit, fits in ((10**6, True), (1000, False)):
        ours = service(tmp_path, model, tenants={"max_adapter_bytes": limit})
        if fits:
            resolve_tenant(ours, tenant(tmp_path / "a"), "a")
            continue
        with pytest.raises(
            InputError, match=r"has \d+\.\d kB, but the service has tenants.max_ada"
        ):
            resolve_tenant(ours, tenant(tmp_path / "a"), "a")


def test_an_adapter_without_experts_fits_every_service(tmp_path: Path, model: Path) -> None:
    ours = service(tmp_path, model, lora={"experts": ["per_expert"]})
    recipe = resolve_tenant(ours, tenant(tmp_path / "a"), "a")
    assert recipe.lora is not None
    assert recipe.lora.experts == "none"


def test_a_model_by_another_name_is_the_same(tmp_path: Path, model: Path) -> None:
    (tmp_path / "link").symlink_to(model / "model")
    tree = tenant(tmp_path / "a", model={"path": str(tmp_path / "link")})
    ours = service(tmp_path, model)
    assert resolve_tenant(ours, tree, "a").model.path == ours.model.path


WRONG = (None, True, -1, 1.5, "x", "a.py:b", "reward_model:", "**/[", [], [[]], [3], {"": 1},
         {"a": {"b": []}}, [{"name": "x", "path": 3}], "x" * 5000, "a\nb")  # fmt: skip


def test_whatever_a_key_holds_is_refused_in_one_line_or_stored(tmp_path: Path, model: Path) -> None:
    ours, rng = service(tmp_path, model), random.Random(20)
    refusals: list[str] = []
    for key in all_keys():
        tree = branch = tenant(tmp_path / "a")
        *parents, leaf = key.split(".")
        for name in parents:
            inner = branch.get(name)
            branch[name] = branch = inner if isinstance(inner, dict) else {}
        branch[leaf] = rng.choice(WRONG)
        try:
            recipe = resolve_tenant(ours, tree, "a")
        except InputError as error:
            refusals.append(str(error))
        else:
            stored = json.loads(recipe.model_dump_json())
            assert resolve_tenant(ours, stored, "a", is_record=True) == recipe
    assert len(refusals) > 150
    assert not [each for each in refusals if "\n" in each]


def test_a_tenant_whose_files_cannot_be_written_hinders_no_other_at_a_start(
    tmp_path: Path, model: Path
) -> None:
    with Registry(service(tmp_path, model)) as registry:
        for name in ("a", "b", "c"):
            registry.add(name, tenant(tmp_path / name))
        blocked = [
            registry.root / "tenants/a/.recipe.yaml.partial",
            registry.root / "tenants/b/.state.json.partial",
        ]
    (registry.root / "tenants/b/recipe.yaml").write_text("damaged")
    for folder in blocked:
        folder.mkdir()
    with Registry(registry.service) as again:
        assert [each.state for each in again.tenants()] == ["paused", "paused", "queued"]
        assert "Is a directory" in again.get("a").reason
        assert list(again.kept) == ["b"]
