"""Tensors with the weights of all experts, taken apart and put together."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.errors import InputError
from parallel.hf_config import HfModel
from parallel.hf_tensors import HfTensors
from parallel.stacked import stored_tensors
from parallel.weight_checks import check_weights
from tests.parallel.models import checkpoint_tensors, write_tiny

EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("gpt_oss", tmp_path_factory.mktemp("stacked") / "model")


def test_each_weight_is_its_part_of_the_tensor(folder: Path) -> None:
    """As transformers' GptOssExperts reads them: gate and up in turns, and transposed."""
    stored, found = load_file(folder / "model.safetensors"), checkpoint_tensors(folder)
    for expert in range(4):
        for part, name in enumerate(("gate", "up")):
            whole = stored[f"{EXPERTS}.gate_up_proj"][expert]
            assert torch.equal(found[f"{EXPERTS}.{expert}.{name}_proj.weight"], whole[:, part::2].T)
            bias = stored[f"{EXPERTS}.gate_up_proj_bias"][expert, part::2]
            assert torch.equal(found[f"{EXPERTS}.{expert}.{name}_proj.bias"], bias)
        down = stored[f"{EXPERTS}.down_proj"][expert]
        assert torch.equal(found[f"{EXPERTS}.{expert}.down_proj.weight"], down.T)
    assert not [name for name in found if name.endswith(("gate_up_proj", "down_proj"))]


def test_what_is_put_together_has_the_bits_of_the_folder(folder: Path) -> None:
    """Whatever order the weights come in."""
    stored, found = load_file(folder / "model.safetensors"), checkpoint_tensors(folder)
    again = dict(stored_tensors(sorted(found.items(), reverse=True), HfModel.read(folder)))
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in stored.items())


def test_a_weight_that_does_not_come_is_missed(folder: Path) -> None:
    found = checkpoint_tensors(folder)
    del found[f"{EXPERTS}.2.up_proj.weight"]
    with pytest.raises(ValueError, match=r"layers\.1.*gate_up_proj: got 7 weights of its experts"):
        list(stored_tensors(found.items(), HfModel.read(folder)))


def test_rows_shapes_and_dtypes_are_those_of_the_weights(folder: Path) -> None:
    name = f"{EXPERTS}.3.up_proj.weight"
    with HfTensors(HfModel.read(folder)) as tensors:
        whole = tensors[name]
        assert tensors.shape(name) == tuple(whole.shape) == (16, 32)
        assert torch.equal(tensors.rows(name, 2, 5), whole[2:5])
        assert tensors.dtype(name) == "F32"


def test_mxfp4_is_refused_with_what_to_do(folder: Path, tmp_path: Path) -> None:
    text = (folder / "config.json").read_text().rstrip().removesuffix("}")
    quantization = '"quantization_config": {"quant_method": "mxfp4"}}'
    (tmp_path / "config.json").write_text(f"{text}, {quantization}")
    save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"'mxfp4', which mrl does not read; .*dequantize=True"):
        HfModel.read(tmp_path)


@pytest.mark.parametrize("shape", [(6, 64, 32), (2, 64, 32), (4, 64, 33), (4,)])
def test_a_tensor_that_cannot_be_taken_apart_is_refused(
    shape: tuple[int, ...], folder: Path, tmp_path: Path
) -> None:
    """The tiny model has 4 experts."""
    bad = tmp_path / "bad"
    shutil.copytree(folder, bad)
    stored = load_file(folder / "model.safetensors")
    stored[f"{EXPERTS}.gate_up_proj"] = torch.zeros(shape)
    save_file(stored, bad / "model.safetensors")
    with pytest.raises(InputError, match=rf"{EXPERTS}.gate_up_proj is \[.*, expected 4 experts"):
        HfTensors(HfModel.read(bad))


def test_a_missing_tensor_of_all_experts_has_the_name_of_the_files(
    folder: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(folder, bad)
    stored = load_file(folder / "model.safetensors")
    del stored[f"{EXPERTS}.gate_up_proj"], stored["model.norm.weight"]
    save_file(stored, bad / "model.safetensors")
    expected = (
        rf"has no tensor (model\.norm\.weight|{re.escape(EXPERTS)}\.gate_up_proj) and 1 more,"
    )
    with pytest.raises(InputError, match=expected):
        check_weights(HfModel.read(bad), deep=False)
