"""What `lora` in a recipe means for each architecture: modules, rules, names, shapes and refusals."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from mrl.config import LoraConfig
from mrl.config.adapter import PEFT_PREFIX, Adapter, Experts
from mrl.errors import InputError
from parallel.architectures import find_architecture
from parallel.hf_config import HfModel
from parallel.lora.rules import adapter_rules, adapter_shapes, is_adapter, read_adapter
from tests.parallel.adapters import RANK, adapter_of
from tests.parallel.models import COMMON, SETTINGS, checkpoint_tensors, write_tiny

LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")


def model_of(model_type: str, **changes: Any) -> HfModel:
    """A tiny model of which only the config exists."""
    name, settings = SETTINGS[model_type]
    kind = getattr(importlib.import_module("transformers"), f"{name}Config")
    config = kind(**{**COMMON, **settings, **changes}).to_dict()
    return HfModel(Path("nowhere"), config, find_architecture(config))


@pytest.mark.parametrize(
    ("model", "attention", "of_experts"),
    [
        (model_of("qwen3"), QKVO, None),
        (model_of("qwen3_moe"), QKVO, MLP),
        (model_of("qwen2_moe"), QKVO, MLP),
        (model_of("mixtral"), QKVO, ("w1", "w3", "w2")),
        (model_of("olmoe"), QKVO, MLP),
        (model_of("glm4_moe"), QKVO, MLP),
        (model_of("gpt_oss"), QKVO, MLP),
        (model_of("qwen3_next"), (*QKVO, "in_proj_qkvz", "in_proj_ba", "out_proj"), MLP),
        (model_of("deepseek_v3"), LATENT, MLP),
        (model_of("deepseek_v32"), LATENT, MLP),
        (model_of("deepseek_v3", q_lora_rank=None), ("q_proj", *LATENT[2:]), MLP),
    ],
    ids=lambda value: value.config["model_type"] if isinstance(value, HfModel) else "",
)
def test_the_modules_of_an_adapter(
    model: HfModel, attention: tuple[str, ...], of_experts: tuple[str, ...] | None
) -> None:
    assert read_adapter(LoraConfig(), model) == Adapter(32, 32.0, attention)
    twice = LoraConfig(rank=4, alpha=6.0, targets=("o_proj", "o_proj"))
    assert read_adapter(twice, model) == Adapter(4, 6.0, ("o_proj",))
    if of_experts is not None:
        for experts in ("shared_outer", "per_expert"):
            alone = read_adapter(LoraConfig(targets=(), experts=experts), model)
            assert alone == Adapter(32, 32.0, (), experts, of_experts)


NO_DENSE_LAYER = model_of("qwen3_moe", mlp_only_layers=[])


@pytest.mark.parametrize(
    ("model", "keys", "parts"),
    [
        (
            model_of("qwen3_moe"),
            {"targets": ("q_proj", "q_porj")},
            [
                "lora.targets: got 'q_porj'; give `attention`, or some of q_proj, k_proj, v_proj, o_p"
            ],
        ),
        (
            model_of("qwen3_moe"),
            {"targets": ("gate",)},
            ["got 'gate': the router stays that of the base: SGLang cannot serve an adapter of it"],
        ),
        (
            model_of("qwen3"),
            {"targets": ("lm_head",)},
            ["got 'lm_head': the output layer stays that of the base"],
        ),
        (
            model_of("qwen3"),
            {"targets": ("embed_tokens",)},
            ["got 'embed_tokens': the embedding stays that of the base"],
        ),
        (
            model_of("mixtral"),
            {"targets": ("w1",)},
            ["got 'w1': it is a module of the experts, which lora.experts decides about"],
        ),
        (
            NO_DENSE_LAYER,
            {"targets": ("q_proj", "gate_proj")},
            ["got 'gate_proj': it is a module of the experts", "some of q_proj, k_proj, v_proj, o"],
        ),
        (
            model_of("deepseek_v32"),
            {"targets": ("o_proj", "wq_b")},
            [
                "got 'wq_b': the indexer stays that of the base: it is never trained; give `attention`"
            ],
        ),
        (
            model_of("deepseek_v3"),
            {"targets": ("q_proj",)},
            ["got 'q_proj'; give `attention`, or some of q_a_proj, q_b_proj, kv_a_proj_with_mqa"],
        ),
        (
            model_of("deepseek_v3", q_lora_rank=None),
            {"targets": ("q_a_proj",)},
            ["got 'q_a_proj'; give `attention`, or some of q_proj, kv_a_proj_with_mqa"],
        ),
        (
            model_of("qwen3_moe"),
            {"targets": ()},
            ["lora.targets is empty and lora.experts is none: nothing would be trained"],
        ),
        (
            model_of("qwen3"),
            {"experts": "per_expert"},
            ["lora.experts is per_expert, but the model has no experts; give none"],
        ),
    ],
)
def test_what_cannot_be_adapted_is_refused(
    model: HfModel, keys: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        read_adapter(LoraConfig(**keys), model)
    assert all(part in str(caught.value) for part in parts), caught.value


LAYER, HF = "decoder.layers.{layer}", f"{PEFT_PREFIX}model.layers.{{layer}}"


def expert_table(experts: Experts) -> dict[str, tuple[str, str]]:
    """Megatron's name -> (PEFT's, how it is cut) of the experts' matrices, as the contract has them."""
    own = f"{LAYER}.mlp.experts.local_experts.{{expert}}"
    table = {
        f"{own}.linear_fc1.lora.{name}.{matrix}": (f"experts.{{expert}}.{name}", split)
        for name in ("gate_proj", "up_proj")
        for matrix, split in (("A", "none"), ("B", "rows"))
    }
    table |= {
        f"{own}.linear_fc2.lora.down_proj.A": ("experts.{expert}.down_proj", "columns"),
        f"{own}.linear_fc2.lora.down_proj.B": ("experts.{expert}.down_proj", "none"),
    }
    if experts == "shared_outer":
        for place in (("1", "gate_proj", "A"), ("1", "up_proj", "A"), ("2", "down_proj", "B")):
            del table["{}.linear_fc{}.lora.{}.{}".format(own, *place)]
            name = f"{LAYER}.mlp.shared_outer.{place[1]}.{place[2]}"
            table[name] = f"experts.{place[1]}", "none"
    return {
        name: (f"{HF}.mlp.{peft}.lora_{name[-1]}.weight", split)
        for name, (peft, split) in table.items()
    }


ATTENTION_TABLE = {
    **{
        f"{LAYER}.self_attention.linear_qkv.lora.{name}.{matrix}": (
            f"{HF}.self_attn.{name}.lora_{matrix}.weight", split
        )
        for name in ("q_proj", "k_proj", "v_proj")
        for matrix, split in (("A", "none"), ("B", "rows"))
    },
    **{
        f"{LAYER}.self_attention.linear_proj.lora.o_proj.{matrix}": (
            f"{HF}.self_attn.o_proj.lora_{matrix}.weight", split
        )
        for matrix, split in (("A", "columns"), ("B", "none"))
    },
}  # fmt: skip


@pytest.mark.parametrize("experts", ["shared_outer", "per_expert"])
def test_the_rules_of_qwen3_moe(experts: Experts) -> None:
    adapter = read_adapter(LoraConfig(experts=experts), NO_DENSE_LAYER)
    rules = adapter_rules(NO_DENSE_LAYER.architecture.rules(NO_DENSE_LAYER.config), adapter)
    found = {rule.megatron: (*rule.hf, rule.split) for rule in rules}
    assert found == ATTENTION_TABLE | expert_table(experts)
    assert len(found) == len(rules)
    assert all(is_adapter(name) for name in found)


def test_projections_that_are_whole_on_every_rank_have_whole_matrices() -> None:
    model = model_of("deepseek_v3")
    rules = adapter_rules(model.architecture.rules(model.config), read_adapter(LoraConfig(), model))
    splits = {rule.megatron.removeprefix(f"{LAYER}.self_attention."): rule.split for rule in rules}
    for name, peft in (("q_down", "q_a_proj"), ("kv_down", "kv_a_proj_with_mqa")):
        for matrix in "AB":
            assert splits[f"linear_{name}_proj.lora.{peft}.{matrix}"] == "none"
    for name, peft in (("q_up", "q_b_proj"), ("kv_up", "kv_b_proj")):
        assert splits[f"linear_{name}_proj.lora.{peft}.A"] == "none"
        assert splits[f"linear_{name}_proj.lora.{peft}.B"] == "rows"


def expected_shapes(folder: Path, adapter: Adapter) -> dict[str, tuple[int, int]]:
    """A [rank, in] and B [out, rank] of every weight [out, in] of a checkpoint that is adapted."""
    expected = {}
    for name, weight in checkpoint_tensors(folder).items():
        module = name.removesuffix(".weight").rpartition(".")[2]
        is_expert = re.search(r"\.experts\.\d+\.", name) is not None
        if module not in (adapter.expert_modules if is_expert else adapter.modules):
            continue
        if name.endswith(".bias"):
            continue
        for matrix in "AB":
            outputs, inputs = weight.shape
            key = name
            is_outer = matrix == ("B" if module in ("down_proj", "w2") else "A")
            if is_expert and adapter.experts == "shared_outer" and is_outer:
                key = re.sub(r"\.experts\.\d+\.", ".experts.", name)
            shape = (adapter.rank, inputs) if matrix == "A" else (outputs, adapter.rank)
            expected[f"base_model.model.{key[:-7]}.lora_{matrix}.weight"] = shape
    return expected


@pytest.mark.parametrize("model_type", SETTINGS)
def test_shapes_and_rules_are_those_of_the_checkpoint(model_type: str, tmp_path: Path) -> None:
    folder = write_tiny(model_type, tmp_path / model_type)
    model = HfModel.read(folder)
    for experts in get_args(Experts):
        if experts != "none" and not model.sizes.num_experts:
            continue
        adapter = adapter_of(model, experts)
        expected = expected_shapes(folder, adapter)
        assert adapter_shapes(model, adapter) == expected
        assert all(RANK in shape for shape in expected.values())
        names = {
            rule.hf[0] for rule in adapter_rules(model.architecture.rules(model.config), adapter)
        }
        patterns = [
            re.escape(name).replace(r"\{layer\}", r"\d+").replace(r"\{expert\}", r"\d+")
            for name in names
        ]
        for name in expected:
            assert sum(re.fullmatch(pattern, name) is not None for pattern in patterns) == 1, name
