"""A run that trains multi-token-prediction layers: the engine ignores them, the export has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mrl.cli import main
from mrl.toy_model import build_tokenizer
from tests.loop.conftest import Toy, trained
from tests.parallel.mtp_models import FILE, write_mtp
from tests.ranks import run_ranks


@pytest.mark.release
def test_a_run_trains_and_exports_them(tmp_path: Path) -> None:
    tokenizer, folder = build_tokenizer(), tmp_path / "model"
    write_mtp(
        "glm4_moe", folder, vocab_size=128, intermediate_size=64, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    more = ["train.num_steps=3", "train.mtp_loss_scaling_factor=0.2"]
    overrides = Toy(folder).overrides(tmp_path / "run", *more)
    run_ranks(1, trained, overrides, folder=tmp_path / "out")
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert 0 < row["mismatch/logprob_abs_max"] < 1e-4
        assert row["rollout/canary_abs_mean"] < 1e-5
        assert row["routing/replay_coverage"] == 1.0
        assert row["loss/total"] == row["loss/policy"]
    assert rows[0]["loss/mtp"] > rows[2]["loss/mtp"] > 0

    main(["export", str(tmp_path / "run/checkpoints/iter_0000003"), str(tmp_path / "hf")])
    found = load_file(next((tmp_path / "hf").glob("*.safetensors")))
    given = load_file(folder / "model.safetensors") | load_file(folder / FILE)
    assert found.keys() == given.keys()
    name = "model.layers.4.eh_proj.weight"
    assert not torch.equal(found[name], given[name])
