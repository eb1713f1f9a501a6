"""Folders whose weights are stored in fp8 blocks are read and written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mrl.cli import main
from mrl.errors import InputError
from mrl.quantization import SCHEMES, fake_quantize, fp8_config, is_quantized, quantized_tensors
from parallel.checkpoint.hf_export import _unquantized
from parallel.hf_config import HfModel
from parallel.hf_tensors import HfTensors, check_finite_tensors, check_names
from tests.parallel.models import write_tiny

UE8M0 = SCHEMES["fp8_block_ue8m0"]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def in_fp8(folder: Path, **changes: object) -> Path:
    """Rewrite a folder with one file of weights in fp8 blocks."""
    tensors = dict(quantized_tensors(tensors_of(folder).items(), UE8M0))
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**fp8_config("fp8_block_ue8m0"), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "deepseek_v32"])
def test_weights_are_dequantised_as_they_are_read(model_type: str, tmp_path: Path) -> None:
    folder = write_tiny(model_type, tmp_path)
    original = tensors_of(folder)
    model = HfModel.read(in_fp8(folder))
    with HfTensors(model) as tensors:
        check_names(model, tensors.names)
        check_finite_tensors(model, tensors, whole=True)
        assert tensors.names == set(original)
        for name, tensor in original.items():
            assert torch.equal(tensors[name].to(tensor.dtype), fake_quantize(UE8M0, name, tensor))
            assert tensors.shape(name) == tuple(tensor.shape)
    chosen = {name for name, tensor in original.items() if is_quantized(name, tensor.dim())}
    left = {name.split(".")[-2] for name in original if name not in chosen and "layers" in name}
    # The head weights of an indexer are bf16 in the published checkpoint, too.
    assert {part for part in left if part.endswith("_proj")} <= {"weights_proj"}


def test_quantised_again_they_have_the_same_values(tmp_path: Path) -> None:
    """A block whose largest weight is just above 448 times a power of two may get half the scale."""
    model = HfModel.read(in_fp8(write_tiny("qwen3_moe", tmp_path)))
    with HfTensors(model) as tensors:
        for name in tensors.names:
            assert torch.equal(fake_quantize(UE8M0, name, tensors[name]), tensors[name])


@pytest.mark.parametrize(
    "changes",
    [{"quant_method": "gptq"}, {"weight_block_size": [64, 64]}, {"weight_block_size": None}],
)
def test_other_formats_are_refused(changes: dict[str, object], tmp_path: Path) -> None:
    folder = in_fp8(write_tiny("qwen3_moe", tmp_path), **changes)
    with pytest.raises(InputError, match=r"expected none, or 'fp8' with \[128, 128\]"):
        HfModel.read(folder)


def test_readers_are_told_which_layers_are_not_quantised(tmp_path: Path) -> None:
    names = dict(quantized_tensors(tensors_of(write_tiny("qwen2_moe", tmp_path)).items(), UE8M0))
    left = {name.rpartition(".")[2] for name in _unquantized(names)}
    assert left == {"lm_head", "gate", "shared_expert_gate"}


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (torch.ones(3, 3), "one for each 128 x 128 block"),
        (torch.full((1, 1), torch.nan), "finite, positive scales"),
        (-torch.ones(1, 1), "finite, positive scales"),
    ],
)
def test_wrong_scales_are_refused(scales: Tensor, message: str, tmp_path: Path) -> None:
    folder = in_fp8(write_tiny("qwen3_moe", tmp_path))
    tensors = tensors_of(folder)
    name = next(name for name in tensors if name.endswith("_scale_inv"))
    save_file({**tensors, name: scales}, folder / "model.safetensors")
    with pytest.raises(InputError, match=message):
        HfTensors(HfModel.read(folder))


def test_a_weight_without_its_scales_is_refused(tmp_path: Path) -> None:
    """Its numbers, up to 448, would be taken for weights."""
    folder = in_fp8(write_tiny("qwen3_moe", tmp_path))
    tensors = tensors_of(folder)
    name = next(name for name in tensors if name.endswith("_scale_inv"))
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=f"is F8_E4M3, expected scales '{name}' .*download"):
        HfTensors(HfModel.read(folder))


def test_fp8_weights_without_a_quantization_config_are_refused(tmp_path: Path) -> None:
    folder = in_fp8(write_tiny("qwen3_moe", tmp_path))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"config\.json has no quantization_config"):
        HfTensors(HfModel.read(folder))


def test_a_dense_model_in_fp8_is_not_upcycled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, target = in_fp8(write_tiny("llama", tmp_path / "dense")), tmp_path / "moe"
    with pytest.raises(SystemExit):
        main(["upcycle", str(folder), str(target), "--experts", "4", "--top-k", "2"])
    assert "stored in fp8" in capsys.readouterr().err
