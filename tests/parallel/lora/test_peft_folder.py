"""PEFT's folder: what is written is read bit for bit, in every form; what does not fit is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mrl.config.adapter import Adapter, Experts
from mrl.errors import InputError
from parallel.hf_config import HfModel
from parallel.lora.peft_folder import CONFIG, WEIGHTS, PeftFolder, write_peft_folder
from tests.parallel.lora.exchange import (
    RANK,
    assert_same,
    make_adapter,
    random_matrices,
    write_adapter,
)
from tests.parallel.models import SETTINGS, write_tiny

KINDS: tuple[Experts, ...] = ("none", "shared_outer", "per_expert")
PREFIX = "base_model.model.model.layers.0"
Q_A = f"{PREFIX}.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HfModel]:
    root = tmp_path_factory.mktemp("models")
    return {name: HfModel.read(write_tiny(name, root / name)) for name in SETTINGS}


@pytest.mark.parametrize("experts", KINDS)
@pytest.mark.parametrize(
    "model_type",
    [
        *("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", "gpt_oss", "qwen3_next"),
        *("deepseek_v3", "deepseek_v32"),
    ],
)
def test_what_is_written_is_read_bit_for_bit(
    model_type: str, experts: Experts, models: dict[str, HfModel], tmp_path: Path
) -> None:
    model = models[model_type]
    adapter = make_adapter(model, experts)
    tensors = write_adapter(tmp_path / "a", model, adapter)
    again = dict(PeftFolder(tmp_path / "a", adapter, model))
    assert_same(again, tensors)
    (tmp_path / "b").mkdir()
    write_peft_folder(tmp_path / "b", again.items(), adapter, model, str(model.path))
    for name in (CONFIG, WEIGHTS):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_every_expert_has_a_matrix_under_its_number(
    models: dict[str, HfModel], tmp_path: Path
) -> None:
    """Also those that share one: SGLang, vLLM and PEFT look for these names."""
    model = models["qwen3_moe"]
    tensors = write_adapter(tmp_path / "a", model, make_adapter(model, "shared_outer"))
    found = load_file(tmp_path / "a" / WEIGHTS)
    assert all(tensor.ndim == 2 for tensor in found.values())
    experts = {name for name in found if ".experts." in name}
    assert experts == {
        f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{module}.lora_{matrix}.weight"
        for layer in (0, 2, 3)
        for expert in range(4)
        for module in ("gate_proj", "up_proj", "down_proj")
        for matrix in "AB"
    }
    shared = tensors[f"{PREFIX}.mlp.experts.down_proj.lora_B.weight"]
    assert torch.equal(found[f"{PREFIX}.mlp.experts.3.down_proj.lora_B.weight"], shared)
    assert json.loads((tmp_path / "a" / CONFIG).read_text())["target_modules"] == [
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ]


def test_shared_matrices_are_read_without_a_number(
    models: dict[str, HfModel], tmp_path: Path
) -> None:
    model = models["qwen3_moe"]
    adapter = make_adapter(model, "shared_outer")
    tensors = random_matrices(model, adapter)
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps(adapter.peft_config()))
    assert_same(dict(PeftFolder(tmp_path, adapter, model)), tensors)


def fuse(tensors: dict[str, Tensor], layers: tuple[int, ...], *, joined: bool) -> dict[str, Tensor]:
    """What PEFT makes of numbered experts: as it reads them, or (`joined`) as it trains anew: gate and
    up projection then have one A, and the inputs must be so."""
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in layers:
        base = f"base_model.model.model.layers.{layer}.mlp.experts"

        def of(module: str, matrix: str, base: str = base) -> list[Tensor]:
            return [tensors[f"{base}.{e}.{module}.lora_{matrix}.weight"] for e in range(4)]

        gate_a, up_a, gate_b, up_b = (
            of(m, x) for m, x in zip(("gate_proj", "up_proj") * 2, "AABB", strict=True)
        )
        if joined:
            a, b = gate_a, [torch.cat(pair) for pair in zip(gate_b, up_b, strict=True)]
        else:
            a = [torch.cat(pair) for pair in zip(gate_a, up_a, strict=True)]
            b = [torch.block_diag(*pair) for pair in zip(gate_b, up_b, strict=True)]
        down_a, down_b = of("down_proj", "A"), of("down_proj", "B")
        for prefix, first, second in (
            (f"{base}.base_layer", a, b),
            (base, down_a, down_b),
        ):
            out[f"{prefix}.lora_A.weight"] = torch.cat(first)
            out[f"{prefix}.lora_B.weight"] = torch.stack(second, dim=-1).flatten(1).contiguous()
    return out


FUSED = {"target_parameters": ["gate_up_proj", "down_proj"], "target_modules": ["q_proj"]}
TWICE = {
    "rank_pattern": {r".*\.gate_up_proj": 2 * RANK},
    "alpha_pattern": {r".*\.gate_up_proj": 12.0},
}


def with_one_a(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensors[name.replace("up_proj.lora_A", "gate_proj.lora_A")] for name in tensors}


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_the_form_of_transformers_5_is_read(
    joined: bool, model_type: str, models: dict[str, HfModel], tmp_path: Path
) -> None:
    model = models[model_type]
    adapter = make_adapter(model, "per_expert")
    tensors = random_matrices(model, adapter)
    words = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj."}
    words[".w2."] = ".down_proj."

    def plain(name: str) -> str:
        for old, new in words.items():
            name = name.replace(old, new)
        return name

    named = {plain(name): tensor for name, tensor in tensors.items()}
    named = with_one_a(named) if joined else named
    layers = (0, 2, 3) if model_type == "qwen3_moe" else (0, 1, 2, 3)
    save_file(fuse(named, layers, joined=joined), tmp_path / WEIGHTS)
    config = adapter.peft_config() | FUSED | ({} if joined else TWICE)
    (tmp_path / CONFIG).write_text(json.dumps(config))
    found = PeftFolder(tmp_path, adapter, model)
    assert_same(dict(found), {name: named[plain(name)] for name in tensors})


def test_gate_and_up_projection_that_are_mixed_are_refused(
    models: dict[str, HfModel], tmp_path: Path
) -> None:
    model = models["qwen3_moe"]
    adapter = make_adapter(model, "per_expert")
    tensors = fuse(random_matrices(model, adapter), (0, 2, 3), joined=False)
    name = f"{PREFIX}.mlp.experts.base_layer.lora_B.weight"
    tensors[name][0, -1] = (
        0.5  # gate projection of the last expert, by a row of A of the up projection
    )
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps(adapter.peft_config() | FUSED | TWICE))
    found = PeftFolder(tmp_path, adapter, model)
    with pytest.raises(InputError, match=r"mixes gate and up projection of expert 3 \(rank 6 for"):
        found.check_numbers()


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (
            {"rank_pattern": TWICE["rank_pattern"]},
            "experts.gate_up_proj has the scale 1 .*, expected lora.alpha / lora.rank = 2",
        ),
        ({}, "has rank 6 and adapter_config.json says 3, expected 3 or 6; train it with one rank"),
    ],
)
def test_experts_of_another_scale_or_rank_are_refused(
    patterns: dict[str, Any], expected: str, models: dict[str, HfModel], tmp_path: Path
) -> None:
    model = models["qwen3_moe"]
    adapter = make_adapter(model, "per_expert")
    save_file(fuse(random_matrices(model, adapter), (0, 2, 3), joined=False), tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps(adapter.peft_config() | FUSED | patterns))
    with pytest.raises(InputError, match=expected):
        PeftFolder(tmp_path, adapter, model)


Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def setting(**values: Any) -> Change:
    return lambda config, tensors: config.update(values)


def tensor(name: str, value: Callable[[dict[str, Tensor]], Tensor | None]) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        made = value(tensors)
        tensors.pop(name, None)
        if made is not None:
            tensors[name] = made

    return change


def with_nan(tensors: dict[str, Tensor]) -> Tensor:
    changed = tensors[Q_A].clone()
    changed[1, 2] = torch.nan
    return changed


REFUSED: dict[str, tuple[Change, list[str]]] = {
    "type": (setting(peft_type="IA3"), ["peft_type is 'IA3', expected 'LORA'"]),
    "rank": (setting(r=8), ["r is 8, but lora.rank is 3; give lora.rank=8"]),
    "alpha": (
        setting(lora_alpha=16),
        ["lora_alpha is 16, but lora.alpha is 6; give lora.alpha=16"],
    ),
    "no rank": (setting(r=None), ["r is None, expected a positive number"]),
    "rslora": (
        setting(use_rslora=True),
        ["use_rslora is true", "scales by lora_alpha / sqrt(r)", "lora_alpha 10.392304845413264"],
    ),
    "dora": (setting(use_dora=True), ["use_dora is True, expected none", "or merge it into"]),
    "pissa": (
        setting(init_lora_weights="pissa_niter_4"),
        ["init_lora_weights is 'pissa_niter_4', which changes the base weights too"],
    ),
    "bias": (setting(bias="all"), ["bias is 'all', expected 'none'"]),
    "saved modules": (setting(modules_to_save=["lm_head"]), ["modules_to_save is ['lm_head']"]),
    "unknown": (setting(new_variant={"a": 1}), ["new_variant is {'a': 1}, expected none"]),
    "pattern": (
        setting(alpha_pattern={"q_proj": 12}),
        ["self_attn.q_proj has the scale 4 (alpha_pattern)", "lora.alpha / lora.rank = 2"],
    ),
    "damaged pattern": (setting(rank_pattern={"(": 3}), ["rank_pattern is {'(': 3}, expected reg"]),
    "missing": (
        tensor(Q_A, lambda tensors: None),
        [f"has no {Q_A}; it adapts down_proj, gate_proj, k_proj", "lora.targets and lora.experts"],
    ),
    "an expert's": (
        tensor(f"{PREFIX}.mlp.experts.2.up_proj.lora_A.weight", lambda tensors: None),
        ["has no base_model.model.model.layers.0.mlp.experts.2.up_proj.lora_A.weight;"],
    ),
    "more": (
        tensor("base_model.model.lm_head.lora_A.weight", lambda tensors: torch.zeros(3, 32)),
        ["also has base_model.model.lm_head.lora_A.weight; it adapts down_proj"],
    ),
    "shape": (
        tensor(Q_A, lambda tensors: torch.zeros(3, 33)),
        [f"{Q_A} is 3 x 33, expected 3 x 32 (rank 3 of this model)"],
    ),
    "whole numbers": (
        tensor(Q_A, lambda tensors: torch.zeros(3, 32, dtype=torch.int8)),
        [f"{Q_A} is stored as I8, expected one of F64, F32, F16, BF16"],
    ),
    "not finite": (tensor(Q_A, with_nan), [f"{Q_A} holds nan, expected finite numbers"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(
    case: str, models: dict[str, HfModel], tmp_path: Path
) -> None:
    change, parts = REFUSED[case]
    model = models["qwen3_moe"]
    adapter = make_adapter(model, "per_expert")
    tensors = dict(write_adapter(tmp_path / "a", model, adapter))
    config = json.loads((tmp_path / "a" / CONFIG).read_text())
    change(config, tensors)
    save_file(tensors, tmp_path / "a" / WEIGHTS)
    (tmp_path / "a" / CONFIG).write_text(json.dumps(config))
    with pytest.raises(InputError) as error:
        PeftFolder(tmp_path / "a", adapter, model).check_numbers()
    message = str(error.value)
    assert message.startswith("lora.path: ")
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_neutral_settings_are_no_reason_to_refuse(
    models: dict[str, HfModel], tmp_path: Path
) -> None:
    """What PEFT's save_pretrained writes beside rank and alpha."""
    model = models["qwen3_moe"]
    adapter = make_adapter(model, "per_expert")
    tensors = write_adapter(tmp_path / "a", model, adapter)
    config = adapter.peft_config() | {
        "peft_version": "0.21.2", "lora_dropout": 0.1, "target_modules": "all-linear",
        "fan_in_fan_out": True, "modules_to_save": None, "loftq_config": {}, "use_dora": False,
        "qalora_group_size": 16, "rank_pattern": {}, "init_lora_weights": "gaussian",
    }  # fmt: skip
    (tmp_path / "a" / CONFIG).write_text(json.dumps(config))
    assert_same(dict(PeftFolder(tmp_path / "a", adapter, model)), tensors)


def test_experts_that_differ_are_not_shared(models: dict[str, HfModel], tmp_path: Path) -> None:
    model = models["qwen3_moe"]
    write_adapter(tmp_path / "a", model, make_adapter(model, "per_expert"))
    found = PeftFolder(tmp_path / "a", make_adapter(model, "shared_outer"), model)
    with pytest.raises(InputError, match=r"differ in .*experts\.gate_proj, .*=per_expert"):
        found.check_numbers()


def _no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def _pickle(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def _cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-5])


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "there is no folder"),
    "no config": (lambda folder: (folder / CONFIG).unlink(), "adapter_config.json: No such file"),
    "no JSON": (lambda folder: (folder / CONFIG).write_text("{"), "is not valid JSON"),
    "a list": (lambda folder: (folder / CONFIG).write_text("[]"), "expected an object, got list"),
    "no weights": (_no_weights, "has no adapter_model.safetensors"),
    "a pickle": (_pickle, "has adapter_model.bin, a pickle, which can run code"),
    "cut short": (_cut, "is no whole safetensors file"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_folder_that_is_none_is_refused(
    case: str, models: dict[str, HfModel], tmp_path: Path
) -> None:
    change, expected = FILES[case]
    model = models["qwen3_moe"]
    adapter: Adapter = make_adapter(model, "none")
    write_adapter(tmp_path / "a", model, adapter)
    change(tmp_path / "a")
    with pytest.raises(InputError, match=expected):
        PeftFolder(tmp_path / "a", adapter, model)
