"""What `mrl check` refuses of Muon, and what the keys of one optimizer mean for the other."""

from __future__ import annotations

import pytest

from mrl.config import load_recipe
from mrl.errors import InputError
from mrl.preflight.optimizer import check_optimizer
from mrl.run.changes import Kind, rule_of
from tests.loop.conftest import TOY_RECIPE

MUON = "optimizer.name=muon"


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (["optimizer.muon_momentum=0.9"], ["muon_momentum is 0.9", "name is adam", "leave"]),
        (["optimizer.muon_split_qkv=false"], ["muon_split_qkv is False", "set it to muon"]),
        (
            [MUON, "optimizer.muon_coefficient_type=quintic", "optimizer.muon_num_ns_steps=6"],
            ["muon_num_ns_steps is 6", "give a multiple of that"],
        ),
        *(
            ([MUON, f"megatron.{name}=true"], [f"megatron.{name} is True", "only Adam has it"])
            for name in (
                *("optimizer_cpu_offload", "use_precision_aware_optimizer"),
                *("overlap_param_gather", "reduce_scatter_with_fp32_accumulation"),
            )
        ),
        ([MUON, "megatron.decoupled_weight_decay=false"], ["decoupled_weight_decay is false"]),
    ],
)
def test_what_is_refused(keys: list[str], parts: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        check_optimizer(load_recipe(TOY_RECIPE, keys))
    assert all(part in str(caught.value) for part in parts), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "keys",
    [
        [],
        [MUON],
        [MUON, "optimizer.muon_coefficient_type=quintic", "optimizer.muon_num_ns_steps=10"],
        [MUON, "optimizer.muon_num_ns_steps=3", "optimizer.use_distributed_optimizer=true"],
        [MUON, "megatron.overlap_grad_reduce=true", "megatron.optimizer_cpu_offload=false"],
    ],
)
def test_what_is_taken(keys: list[str]) -> None:
    check_optimizer(load_recipe(TOY_RECIPE, keys))


def test_a_run_keeps_its_optimizer() -> None:
    assert rule_of("optimizer.name").kind is Kind.NEVER
    assert rule_of("optimizer.muon_momentum").kind is Kind.ALLOW


def test_sft_takes_the_same_optimizer_with_its_own_learning_rate() -> None:
    keys = [MUON, "optimizer.muon_momentum=0.9", "optimizer.use_distributed_optimizer=true"]
    more = ["optimizer.weight_decay=0.1", "optimizer.lr_warmup_steps=3"]
    config = load_recipe(TOY_RECIPE, [*keys, *more]).optimizer
    found = config.with_defaults(0.5)
    assert (found.name, found.lr, found.muon_momentum) == ("muon", 0.5, 0.9)
    assert found.use_distributed_optimizer
    assert (found.weight_decay, found.lr_warmup_steps) == (0.0, 0)
    assert not found.divides_ranges
    assert config.model_copy(update={"name": "adam"}).divides_ranges
