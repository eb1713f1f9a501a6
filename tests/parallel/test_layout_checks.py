"""What `make layouts` checks holds for a model with buffers too: DeepSeek-V3's bias of the experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.parallel.layouts import Layout, agreement, check_cast, train_layout
from tests.parallel.models import tiny_samples, write_tiny
from tests.ranks import run_ranks


def test_a_model_with_buffers_passes_the_checks_of_a_layout(tmp_path: Path) -> None:
    model = write_tiny("deepseek_v3", tmp_path / "model")
    samples = tiny_samples(model)
    out = run_ranks(1, train_layout, model, Layout(1), samples, folder=tmp_path / "out")[0]
    assert agreement(out, out, load_file(model / "model.safetensors")).loaded_bitwise


def test_a_buffer_that_is_cast_fails_the_check() -> None:
    loaded = {"weight": torch.randn(2), "bias": torch.randn(2)}
    half = torch.bfloat16
    check_cast({**loaded, "weight": loaded["weight"].to(half)}, loaded, half, {"bias"})
    for buffers in (set(), {"bias", "weight"}):
        with pytest.raises(AssertionError):
            check_cast({**loaded, "weight": loaded["weight"].to(half)}, loaded, half, buffers)
