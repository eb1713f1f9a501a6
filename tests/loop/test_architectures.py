"""Architectures other than the toy's in the whole loop: the engine and the trainer agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import InputError
from mrl.toy_model import build_tokenizer
from tests.loop.conftest import Toy, adapter_bytes, trained
from tests.parallel.models import LLAMA3, write_tiny
from tests.ranks import run_ranks
from tests.release import release

TIED = {"tie_word_embeddings": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**TIED, "rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {**TIED, "rope_parameters": LLAMA3}),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {"rope_parameters": LLAMA3}),
    "glm4_moe": ("glm4_moe", {"use_qk_norm": True}),
    "gpt_oss": ("gpt_oss", {}),
    "qwen2_moe": ("qwen2_moe", {"decoder_sparse_step": 1, "rope_parameters": LLAMA3}),
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": [], "rope_parameters": LLAMA3}),
}
DENSE = ("llama", "qwen2", "qwen3")


def write_model(name: str, folder: Path) -> Toy:
    model_type, changes = MODELS[name]
    tokenizer = build_tokenizer()
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    write_tiny(
        model_type,
        folder,
        vocab_size=128,
        intermediate_size=64,
        max_position_embeddings=512,
        **special,
        **changes,
    )
    tokenizer.save_pretrained(folder)
    return Toy(folder)


# In `make test` a dense model with an adapter, and an MoE beside the toy of other runs;
# tests/parallel/architectures compares the layers of all.
@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("qwen2", True),
        release("llama", False),
        release("qwen2", False),
        release("qwen3", False),
        release("mixtral", False),
        release("olmoe", False),
        release("glm4_moe", False),
        ("qwen2_moe", False),
        release("gpt_oss", False),
        release("qwen3_moe", False),
        release("mixtral", True),
        release("olmoe", True),
        release("glm4_moe", True),
        release("qwen2_moe", True),
        release("gpt_oss", True),
    ],
)
def test_engine_and_trainer_agree(name: str, lora: bool, tmp_path: Path) -> None:
    model = write_model(name, tmp_path / "model")
    more = ["train.num_steps=2", f"moe.routing_replay={'off' if name in DENSE else 'r3'}"]
    if lora:
        targets = "q_proj,v_proj,o_proj" + (",gate_proj,up_proj,down_proj" if name in DENSE else "")
        more += ["lora.rank=4", f"lora.targets=[{targets}]"]
    overrides = model.overrides(tmp_path / "run", *more)
    run_ranks(1, trained, overrides, folder=tmp_path / "out")
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert 0 < row["mismatch/logprob_abs_max"] < 1e-4
        assert row["rollout/canary_abs_mean"] < 1e-5
        if name in DENSE:
            assert not any(key.startswith("routing/") for key in row)
        else:
            assert row["routing/replay_coverage"] == 1.0
    assert any(row["grad_norm"] > 0 for row in rows)
    if lora:  # the engine is sent the adapter alone
        sent = adapter_bytes(model, tmp_path / "run")
        assert [row["rollout/sync_bytes"] for row in rows] == [sent, sent]


def test_replay_of_a_dense_model_is_refused(tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model")
    with pytest.raises(InputError, match=r"routing_replay is r3, but .* has no MoE layers"):
        trained(model.overrides(tmp_path / "run"))
