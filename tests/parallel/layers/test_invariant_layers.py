"""The trainer's half of rollout.true_on_policy: a token's bits are its own, training is as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.routes import Replay
from mrl.types import Sample
from parallel.packing import pack
from tests.parallel.conftest import weighted
from tests.parallel.layouts import (
    LAYOUTS,
    TOLERANCE,
    Layout,
    agreement,
    build,
    join_mesh,
    train_layout,
)
from tests.ranks import run_ranks


def logprobs(
    model_path: Path, layout: dict[str, Any], samples: list[Sample], packings: list[list[int]]
) -> dict[str, Tensor]:
    """Return log-probs by sample and packing on the last stage; nothing on the others."""
    mesh = join_mesh(model_path, layout)
    policy = build(model_path, mesh, true_on_policy=True)
    # Pipeline stages need micro-batches of one length; padding is one more sequence of each.
    longest = max(sum(len(samples[i].token_ids) for i in packing) for packing in packings)
    least = longest if mesh.dims.equal_micro_batches else 1
    batches = [
        pack([weighted(samples[i]) for i in packing], min_rows=least) for packing in packings
    ]
    found = policy.forward_only(batches, Replay.off).logprobs
    if mesh.dims.equal_micro_batches:
        with pytest.raises(ValueError, match="this layout takes one length"):
            policy.forward_only([batches[0], pack([weighted(samples[3])])], Replay.off)
    tables = {}
    for number, (packing, row) in enumerate(zip(packings, found, strict=False)):
        lengths = [len(samples[i].token_ids) for i in packing]
        parts = row[: sum(lengths)].split(lengths)
        tables |= {f"{i} in {number}": x.clone() for i, x in zip(packing, parts, strict=True)}
    return tables


PACKINGS = [[3], [0, 3, 6, 1], [1, 3], [2, 4, 5, 6, 3]]


@pytest.fixture(scope="module")
def alone(model_path: Path, samples: list[Sample], tmp_path_factory: Any) -> dict[str, Tensor]:
    folder = tmp_path_factory.mktemp("alone")
    return run_ranks(1, logprobs, model_path, {}, samples, PACKINGS, folder=folder)[0]


def test_packing_does_not_change_a_bit(alone: dict[str, Tensor]) -> None:
    assert alone["3 in 0"].abs().max() > 1
    for number in range(1, len(PACKINGS)):
        assert torch.equal(alone[f"3 in {number}"], alone["3 in 0"])
    assert torch.equal(alone["1 in 1"], alone["1 in 2"])


@pytest.mark.parametrize("layout", ["EP2", "PP2"])
def test_ranks_do_not_change_a_bit(
    layout: str,
    alone: dict[str, Tensor],
    model_path: Path,
    samples: list[Sample],
    tmp_path: Path,
) -> None:
    world, sizes = LAYOUTS[layout]
    ranks = run_ranks(world, logprobs, model_path, sizes, samples, PACKINGS, folder=tmp_path)
    for name, values in alone.items():
        assert torch.equal(ranks[-1][name], values), name


def test_training_is_that_of_the_plain_layers(
    model_path: Path, samples: list[Sample], tmp_path: Path
) -> None:
    """Loss, gradient norm and weights after some steps; recompute runs the layers twice."""
    runs = [
        run_ranks(
            1,
            train_layout,
            model_path,
            Layout(1, true_on_policy=on),
            samples,
            folder=tmp_path / str(on),
        )[0]
        for on in (False, True)
    ]
    assert agreement(runs[1], runs[0], runs[0]["loaded"]).worst < TOLERANCE
    assert agreement(runs[1], runs[0], runs[0]["loaded"]).worst > 0  # the layers are others
