"""A real run whose engine has quantised weights: canaries pass, and the gap is explained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.weight_sync.load import TOLERANCE_FLOAT32
from tests.loop.conftest import Toy

KEYS = ("rollout.quantization=fp8_block", "diagnosis.decompose_every=1", "train.num_steps=1")


@pytest.mark.release  # rollout/test_quantized_engine.py and run/test_gap_parts.py have the parts
def test_replay_and_the_engines_weights_explain_the_gap(toy: Toy, tmp_path: Path) -> None:
    """Without a limit that is derived from the format, the canaries would end the run."""
    done = toy.run(tmp_path / "run", *KEYS)
    assert done.returncode == 0, done.stderr
    (row,) = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert row["rollout/canary_abs_mean"] > 10 * TOLERANCE_FLOAT32
    gaps = [row[f"decompose/{level}/logprob_abs_mean"] for level in ("none", "ids", "quantized")]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[2] < 0.8 * gaps[1]
    assert gaps[2] > 1e-3, "the engine quantises the inputs of its layers too"
    assert "from the engine's quantised weights (quantization)" in " ".join(done.stdout.split())


@pytest.mark.release
def test_a_merged_model_is_decomposed_without_its_quantised_weights(
    toy: Toy, tmp_path: Path
) -> None:
    merged = toy.run(tmp_path / "lora", *KEYS, "lora.rank=2", "lora.rollout=merged")
    assert merged.returncode == 0, merged.stderr
    text = (tmp_path / "lora/metrics.jsonl").read_text()
    assert "decompose/ids/k3" in text
    assert "decompose/quantized" not in text
