"""A dense model with tied embeddings comes out of `mrl export` as transformers and PEFT read it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mrl.cli import main
from mrl.config import LoraConfig
from mrl.toy_model import build_tokenizer
from mrl.types import Sample
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.export import export_buckets
from parallel.hf_config import HfModel
from parallel.lora.rules import read_adapter
from parallel.lora.weights import LoraSetup
from tests.parallel.checkpoint.test_hf_export import read
from tests.parallel.layouts import build, drained, exported, join_mesh, train
from tests.parallel.lora.exchange import ALPHA, RANK, assert_same
from tests.parallel.models import LLAMA3, tiny_samples, write_tiny
from tests.ranks import run_ranks

TARGETS = ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of the form of Llama 3.2: tied, with scaled RoPE."""
    folder = tmp_path_factory.mktemp("base") / "toy-llama"
    write_tiny("llama", folder, vocab_size=128, tie_word_embeddings=True, rope_parameters=LLAMA3)
    build_tokenizer(128).save_pretrained(folder)
    return folder


def saves(path: Path, root: Path, samples: list[Sample]) -> list[dict[str, Tensor]]:
    """Train all weights, and an adapter, for a step each -> their weights, the adapter merged."""
    mesh = join_mesh(path, {})
    config = LoraConfig(rank=RANK, alpha=ALPHA, targets=TARGETS)
    adapter = LoraSetup(read_adapter(config, HfModel.read(path)))
    weights = []
    for name, lora in (("full", None), ("lora", adapter)):
        policy = build(path, mesh, lora=lora)
        train(policy, mesh, samples, 2)
        (root / name).mkdir()
        Checkpoints(root / name / "checkpoints", mesh, keep=1).save(2, policy, {})
        merged = lora is not None
        buckets = export_buckets(policy.weights, 0, 4096, merged=True) if merged else None
        weights.append(exported(policy) if buckets is None else drained(buckets))
    return weights


def test_a_dense_model_with_tied_embeddings_is_exported(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full, merged = run_ranks(1, saves, base, tmp_path, tiny_samples(base), folder=tmp_path / "out")[
        0
    ]
    given = load_file(base / "model.safetensors")
    for name, weights, flags in (("full", full, []), ("lora", merged, ["--merged"])):
        target = tmp_path / f"{name}_hf"
        main(["export", str(tmp_path / name), str(target), *flags])
        found = read(target)
        assert_same(found, weights)
        assert found.keys() == given.keys()
        assert "lm_head.weight" not in found
        changed = {key for key in found if not torch.equal(found[key], given[key])}
        assert ("model.embed_tokens.weight" in changed) == (name == "full")
        assert "model.layers.0.mlp.down_proj.weight" in changed
        card = (target / "README.md").read_text()
        assert "tags:\n- reinforcement-learning\n" in card
        assert "experts" not in card
    capsys.readouterr()

    main(["export", str(tmp_path / "lora"), str(tmp_path / "adapter")])
    assert "wrote the adapter after 2 steps" in capsys.readouterr().out
    card = (tmp_path / "adapter/README.md").read_text()
    assert f"| adapted modules | {', '.join(TARGETS)} |" in card
    assert "experts" not in card

    matrices = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert len(matrices) == 2 * 4 * len(TARGETS)
    for name in {name.rpartition(".lora_")[0] for name in matrices}:
        first, second = (matrices[f"{name}.lora_{each}.weight"] for each in "AB")
        weight = f"{name.removeprefix('base_model.model.')}.weight"
        updated = given[weight] + ALPHA / RANK * second @ first
        assert (updated - merged[weight]).abs().max() < 1e-6
        assert not torch.equal(merged[weight], given[weight])

    for name in ("full_hf", "lora_hf"):
        model, report = AutoModelForCausalLM.from_pretrained(
            tmp_path / name, dtype=torch.float32, output_loading_info=True
        )
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert model.lm_head.weight is model.model.embed_tokens.weight
