"""Weights are replaced by those of a quantised engine in every layout, and restored bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.quantization import SCHEMES, fake_quantize
from tests.parallel.layouts import build, exported, join_mesh
from tests.ranks import run_ranks
from tests.release import release

QUANTIZE = partial(fake_quantize, SCHEMES["fp8_block"])


def fails_in_the_last_layer(name: str, weight: Tensor) -> Tensor:
    """Some weights have been replaced by then."""
    if "layers.3.mlp" in name:
        raise KeyError(name)
    return QUANTIZE(name, weight)


def inside_and_after(model_path: Path, sizes: dict[str, int]) -> tuple[dict[str, Tensor], ...]:
    policy = build(model_path, join_mesh(model_path, sizes))
    before = exported(policy)
    with policy.fake_quantized(QUANTIZE, None):
        inside = exported(policy)
    with pytest.raises(KeyError):  # noqa: SIM117
        with policy.fake_quantized(QUANTIZE, None):
            raise KeyError("of the caller")
    with pytest.raises(KeyError):  # noqa: SIM117
        with policy.fake_quantized(fails_in_the_last_layer, None):
            pass
    return before, inside, exported(policy)


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (1, {}),
        (2, {"tensor": 2}),
        release(2, {"pipeline": 2}),
        release(2, {"expert": 2}),
        release(2, {"tensor": 2, "expert_tensor": 1, "expert": 2}),
    ],
)
def test_each_rank_gets_its_shard(
    world: int, sizes: dict[str, Any], model_path: Path, tmp_path: Path
) -> None:
    for before, inside, after in run_ranks(
        world, inside_and_after, model_path, sizes, folder=tmp_path
    ):
        expected = {name: QUANTIZE(name, tensor) for name, tensor in before.items()}
        assert sum(not torch.equal(expected[name], before[name]) for name in before) > 20
        for name, tensor in expected.items():
            assert torch.equal(inside[name], tensor), name
            assert torch.equal(after[name], before[name]), name
