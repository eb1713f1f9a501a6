"""A model folder that is not whole, or that has the config.json of another model, is refused."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mrl.config import load_recipe
from mrl.errors import InputError
from mrl.preflight import check
from mrl.preflight.check import load_tokenizer
from parallel.hf_config import HfModel
from parallel.hf_tensors import HfTensors, check_names, check_sizes
from tests.loop.conftest import TOY_RECIPE, Toy


def read(folder: Path) -> None:
    model = HfModel.read(folder)
    with HfTensors(model) as tensors:
        check_names(model, tensors.names)
        check_sizes(model, tensors)
    load_tokenizer(model)


@pytest.fixture
def folder(toy, tmp_path):
    read(toy.model)
    return Path(shutil.copytree(toy.model, tmp_path / "model"))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"hidden_size": "big"}, "hidden_size is 'big', expected a positive number"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, expected a positive number"),
        ({"num_experts_per_tok": 99}, "routes a token to 99 experts, but has 8"),
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
