"""A model in fp8 blocks is loaded, saved, and exported in fp8 blocks again with the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.cli import main
from mrl.config import LoraConfig
from mrl.quantization import SCHEMES, fake_quantize, is_quantized
from mrl.toy_model import build_tokenizer
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.hf_config import HfModel
from parallel.hf_tensors import HfTensors
from parallel.lora.rules import read_adapter
from parallel.lora.weights import LoraSetup
from tests.parallel.checkpoint.test_fp8_folders import in_fp8, tensors_of
from tests.parallel.layouts import build, join_mesh
from tests.parallel.models import write_tiny
from tests.ranks import run_ranks
from tests.release import release


def written(model_type: str, folder: Path) -> Path:
    source = write_tiny(model_type, folder / "source", vocab_size=128)
    build_tokenizer(128).save_pretrained(source)
    return source


def saved(path: Path, run: Path, lora: bool = False) -> None:
    """Save a model as it was loaded."""
    mesh = join_mesh(path, {})
    config = LoraConfig(rank=2, targets=("q_proj", "v_proj"))
    setup = LoraSetup(read_adapter(config, HfModel.read(path))) if lora else None
    Checkpoints(run / "checkpoints", mesh, keep=1).save(1, build(path, mesh, lora=setup), {})


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def values_of(folder: Path) -> dict[str, Tensor]:
    with HfTensors(HfModel.read(folder)) as tensors:
        return {name: tensors[name] for name in tensors.names}


@pytest.mark.parametrize(
    "model_type", [release("qwen3_moe"), "deepseek_v3", release("deepseek_v32")]
)
def test_an_fp8_model_is_exported_with_the_bits_it_had(model_type: str, tmp_path: Path) -> None:
    source, run = in_fp8(written(model_type, tmp_path)), tmp_path / "run"
    given, values = tensors_of(source), values_of(source)
    run.mkdir()
    run_ranks(1, saved, source, run, folder=tmp_path / "ranks")
    for format_ in ("none", "fp8_block", "fp8_block_ue8m0"):
        target = tmp_path / format_
        main(["export", str(run), str(target), "--quantization", format_])
        found = values_of(target)
        assert found.keys() == values.keys()
        for name, value in values.items():  # those of powers of two are exact in their own format
            plain = format_ == "fp8_block"
            expected = fake_quantize(SCHEMES[format_], name, value) if plain else value
            assert torch.equal(found[name], expected), name
        stored = config_of(target).get("quantization_config")
        if format_ == "none":
            assert stored is None
            assert tensors_of(target).keys() == values.keys()
            continue
        assert stored is not None
        assert stored["quant_method"] == "fp8"
        assert stored["weight_block_size"] == [128, 128]
        assert stored.get("scale_fmt") == ("ue8m0" if format_.endswith("ue8m0") else None)
        assert "lm_head" in stored["modules_to_not_convert"]
        left = {name for name in stored["modules_to_not_convert"] if name.endswith("_proj")}
        assert all(name.endswith("indexer.weights_proj") for name in left)
    again = tensors_of(tmp_path / "fp8_block_ue8m0")
    assert again.keys() == given.keys()
    for name, tensor in given.items():
        assert again[name].dtype == tensor.dtype
        assert torch.equal(again[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_other_models_are_quantised_when_they_are_exported(tmp_path: Path) -> None:
    source, run = written("qwen3_moe", tmp_path), tmp_path / "run"
    run.mkdir()
    run_ranks(1, saved, source, run, folder=tmp_path / "ranks")
    main(["export", str(run), str(tmp_path / "fp8"), "--quantization", "fp8_block"])
    found = values_of(tmp_path / "fp8")
    given = values_of(source)
    assert found.keys() == given.keys()
    assert sum(is_quantized(name, weight.dim()) for name, weight in given.items()) > 20
    for name, weight in given.items():
        assert torch.equal(found[name], fake_quantize(SCHEMES["fp8_block"], name, weight)), name


def test_an_adapter_is_quantised_only_with_its_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, run = written("qwen3_moe", tmp_path), tmp_path / "run"
    run.mkdir()
    run_ranks(1, saved, source, run, True, folder=tmp_path / "ranks")
    words = ["export", str(run), str(tmp_path / "fp8"), "--quantization", "fp8_block"]
    with pytest.raises(SystemExit):
        main(words)
    assert "or add --merged" in capsys.readouterr().err
    assert not (tmp_path / "fp8").exists()
    main([*words, "--merged"])
    assert config_of(tmp_path / "fp8")["quantization_config"]["fmt"] == "e4m3"
