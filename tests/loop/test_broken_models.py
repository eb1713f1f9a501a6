"""A model folder that is not whole, or that has the config.json of another model, is refused."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mrl.config import load_recipe
from mrl.errors import InputError
from mrl.preflight import check
from mrl.preflight.check import load_tokenizer
from parallel.hf_config import HfModel
from parallel.weight_checks import check_weights
from tests.loop.conftest import TOY_RECIPE, Toy


def read(folder: Path) -> None:
    model = HfModel.read(folder)
    check_weights(model, deep=False)
    load_tokenizer(model)


@pytest.fixture
def folder(toy, tmp_path):
    read(toy.model)
    return Path(shutil.copytree(toy.model, tmp_path / "model"))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"hidden_size": "big"}, "hidden_size is 'big', expected a positive number"),
        ({"num_hidden_layers": 10**100}, "num_hidden_layers is 1000"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, expected a positive number"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0, expected a positive number"),
        ({"head_dim": 0}, "head_dim is 0, expected a positive number"),
        ({"intermediate_size": "128"}, "intermediate_size is '128', expected a positive number"),
        ({"num_experts_per_tok": 99}, "routes a token to 99 experts, but has 8"),
        ({"num_experts": 16}, "num_experts is 16 and num_local_experts is 8, which mean the same"),
        (
            {"rope_theta": 0},
            "rope_theta is 0 and rope_parameters.rope_theta is 10000.0, which mean the same",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
            "rope_theta is 0.0, expected a positive finite number",
        ),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a positive finite number"),
        ({"num_hidden_layers": 9}, "has 9 layers, but there are no weights of layer 4"),
        (
            {"num_hidden_layers": 3},
            "weight(s) that a qwen3_moe model with this config.json does not",
        ),
        ({"vocab_size": 64}, "vocab_size x hidden_size 64 x 64, but the weights"),
        (
            {"hidden_size": 128},
            "128 x 128, but the weights 'model.embed_tokens.weight' are 128 x 64",
        ),
    ],
)
def test_a_config_of_another_model(folder: Path, config: dict[str, Any], reason: str):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(InputError) as caught:
        read(folder)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("model.safetensors", "", "model.safetensors is no whole safetensors file"),
        ("tokenizer.json", "{}", "no usable tokenizer (KeyError: 'added_tokens')"),
        ("tokenizer.json", None, "no usable tokenizer (ValueError: "),
        ("tokenizer*", None, "no usable tokenizer (its vocabulary is empty)"),
    ],
)
def test_a_file_that_is_not_whole(folder: Path, name: str, text: str | None, reason: str):
    for file in list(folder.glob(name)):
        file.unlink()
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(InputError) as caught:
        read(folder)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


FILE, EXPERT = "model.safetensors", "model.layers.1.mlp.experts.0.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (FILE, 200_000, "is no whole safetensors file"),  # cut in the numbers
        (FILE, 100, "is no whole safetensors file"),  # cut in the header
        (FILE, "/nowhere/x", "is a link to /nowhere/x, which is not there"),
        ("junk.safetensors", b"hello world, no tensor", "or remove it where it is no part"),
        (f"{FILE}.index.json", b"{", "is no index of safetensors files"),
        (f"{FILE}.index.json", b"[]", "is no index of safetensors files"),
        (f"{FILE}.index.json", b'{"weight_map": {"a": 3}}', "is no index of safetensors files"),
        (f"{FILE}.index.json", b'{"weight_map": {"a": "../x"}}', "lists '../x', expected names"),
        (f"{FILE}.index.json", b'{"weight_map": {"a": "x"}}', "lists x, which is not there"),
    ],
)
def test_a_file_of_the_weights(folder: Path, name: str, content: int | str | bytes, reason: str):
    file = folder / name
    if isinstance(content, int):
        content = file.read_bytes()[:content]
    file.unlink(missing_ok=True)
    if isinstance(content, str):
        file.symlink_to(content)
    else:
        file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read(folder)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def poke(tensor: Tensor, place: int, value: float) -> Tensor:
    tensor.view(-1)[place] = value
    return tensor


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: None, f"has no tensor {EXPERT}, which config.json means"),
        (lambda t: t[:, :-2].contiguous(), f"{EXPERT} is 32 x 62, but config.json means 32 x 64"),
        (lambda t: t.to(torch.int8), f"{EXPERT} is stored as I8, expected one of F64"),
        (lambda t: poke(t, 5, torch.nan), f"{EXPERT} holds nan, expected finite numbers"),
        (lambda t: poke(t, -1, -torch.inf), f"{EXPERT} holds -inf, expected finite numbers"),
    ],
)
def test_a_tensor_of_the_weights(
    folder: Path, change: Callable[[Tensor], Tensor | None], reason: str
):
    tensors = load_file(folder / FILE)
    new = change(tensors.pop(EXPERT))
    save_file(tensors | ({} if new is None else {EXPERT: new}), folder / FILE)
    with pytest.raises(InputError) as caught:
        read(folder)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("config", "tensor"),
    [
        (
            {"num_attention_heads": 8},
            "self_attn.q_proj.weight is 64 x 64, but config.json means 128",
        ),
        (
            {"num_key_value_heads": 4},
            "self_attn.k_proj.weight is 32 x 64, but config.json means 64",
        ),
        (
            {"moe_intermediate_size": 16},
            "gate_proj.weight is 32 x 64, but config.json means 16 x 64",
        ),
    ],
)
def test_sizes_of_another_model(folder: Path, config: dict[str, Any], tensor: str):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(InputError) as caught:
        read(folder)
    assert tensor in str(caught.value)
    assert "tensors are of another shape" in str(caught.value)


def test_deep_finds_the_number_that_a_sample_misses(folder: Path):
    tensors = load_file(folder / FILE)
    name = "model.embed_tokens.weight"
    for wide in (name, "lm_head.weight"):
        tensors[wide] = tensors[wide].repeat(20, 1)
    poke(tensors[name], 64 * 500, torch.nan)  # between the first, the middle and the last rows
    save_file(tensors, folder / FILE)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": len(tensors[name])}))
    read(folder)
    with pytest.raises(InputError, match=f"{name} holds nan"):
        check_weights(HfModel.read(folder), deep=True)


def test_a_path_that_is_closed(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the system's answer is made up."""
    closed, is_dir = tmp_path / "closed", Path.is_dir

    def refused(path: Path) -> bool:
        if path == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", refused)
    recipe = load_recipe(TOY_RECIPE, toy.overrides(tmp_path / "run", f"model.path={closed}"))
    with pytest.raises(InputError, match=r"closed: Permission denied; ask its owner"):
        check(recipe, 1)


def test_a_file_in_the_place_of_a_folder(folder: Path):
    with pytest.raises(InputError, match=r"config\.json is a file; give the folder"):
        read(folder / "config.json")
