"""Sampling masks in packed micro-batches: each loss token with its own set, and in every layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe.routes import Replay
from mrl.errors import InputError
from mrl.kernels import Chunked, oracle
from mrl.sampling_mask import SamplingMask, join_masks
from mrl.types import Sample
from parallel.context import ContextSlice
from parallel.heads import HeadInput
from parallel.logprobs import LogprobHead, chunked_logprobs
from parallel.packing import WeightedSample, pack
from parallel.pass_output import PassOutput
from tests.parallel.few_samples import few_samples
from tests.parallel.layouts import CHUNK, TOLERANCE, build, distance, exported, join_mesh, loss
from tests.parallel.layouts import ready_batch as ready
from tests.ranks import run_ranks
from tests.release import release

VOCAB = 64


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return few_samples()


def masked(sample: Sample, vocab: int, seed: int) -> Sample:
    """The sample with a set of 1 to 6 tokens, its own among them, for each loss token."""
    rng = torch.Generator().manual_seed(seed)
    sets = []
    for token, is_drawn in zip(sample.token_ids.tolist(), sample.loss_mask.tolist(), strict=True):
        more = torch.randperm(vocab, generator=rng)[: int(torch.randint(6, (1,), generator=rng))]
        sets.append(list({token, *more.tolist()}) if is_drawn else [])
    return dataclasses.replace(sample, sampling_mask=SamplingMask.of(sets))


def with_masks(samples: list[Sample], vocab: int = VOCAB) -> list[Sample]:
    return [masked(sample, vocab, i) for i, sample in enumerate(samples)]


def test_masks_are_cut_joined_and_laid_out_in_rows() -> None:
    mask = SamplingMask.of([[], [4, 5], [], [7]])
    assert (mask.num_tokens, mask.counts.tolist()) == (4, [0, 2, 0, 1])
    assert mask.rows(torch.tensor([3, 1])).tolist() == [[7, -1], [4, 5]]
    assert mask.rows(torch.tensor([0])).shape == (1, 0)
    assert mask.cut(3).token_ids.tolist() == [4, 5]
    joined = join_masks([(None, 2), (mask.cut(2), 2), (SamplingMask.of([[9]]), 1)])
    assert joined is not None
    assert (joined.counts.tolist(), joined.token_ids.tolist()) == ([0, 0, 0, 2, 1], [4, 5, 9])
    assert join_masks([(None, 2), (None, 1)]) is None
    with pytest.raises(ValueError, match="got 4 tokens, expected 3"):
        join_masks([(mask, 3)])
    with pytest.raises(ValueError, match="add up to 2, but there are 1"):
        SamplingMask(torch.tensor([1], dtype=torch.int32), torch.tensor([2], dtype=torch.int32))


def test_each_loss_token_is_normalised_over_its_own_set(samples: list[Sample]) -> None:
    chosen = with_masks(samples[:4])
    packed = [WeightedSample(sample, 1.0, 1.0) for sample in chosen]
    batch = pack(packed, 16, sequence_multiple=4)
    rng = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(n, 12, generator=rng) for n in (batch.num_tokens, VOCAB))
    projection: Any = SimpleNamespace(
        gathered=lambda states: states, weight=weight, chunked=lambda t: Chunked(7, t, None)
    )
    alone: Any = None
    got, _ = chunked_logprobs(hidden, batch, batch, 0.8, projection, ContextSlice(alone, []))
    for start, sample in zip(batch.cu_seqlens.tolist(), chosen, strict=False):
        mask = sample.sampling_mask
        assert mask is not None
        for t in range(len(sample.token_ids)):
            wanted = 0.0
            if sample.loss_mask[t] and t:
                row = hidden[start + t - 1 : start + t] @ weight.t()
                (kept,) = mask.rows(torch.tensor([t])).tolist()
                sets = [[token for token in kept if token >= 0]]
                label = sample.token_ids[t : t + 1]
                wanted = float(oracle.truncated_logprob(row, label, sets, temperature=0.8))
            assert float(got[start + t]) == pytest.approx(wanted, abs=5e-6), (start, t)


def test_samples_with_and_without_masks_do_not_mix(samples: list[Sample]) -> None:
    mixed = [masked(samples[0], VOCAB, 0), samples[1]]
    with pytest.raises(ValueError, match="loss tokens without a sampling mask"):
        pack([WeightedSample(sample, 1.0, 1.0) for sample in mixed])


def test_whole_logits_are_refused(samples: list[Sample]) -> None:
    batch = pack([WeightedSample(masked(samples[0], VOCAB, 0), 1.0, 1.0)])
    alone: Any = None
    states = torch.zeros(1, batch.num_tokens, VOCAB)
    given = HeadInput(states, batch, batch, ContextSlice(alone, []))
    with pytest.raises(InputError, match="logprob_chunk_tokens is 0"):
        LogprobHead(1.0, alone)(given, PassOutput())


def updated(
    model_path: Path, sizes: dict[str, Any], samples: list[Sample], recompute: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """The weights after two updates, and the sum of the old log-probs over all samples."""
    mesh = join_mesh(model_path, sizes)
    policy = build(model_path, mesh, recompute, logprob_chunk_tokens=CHUNK)
    for _ in range(2):
        batch, _ = ready(policy, mesh, samples)
        policy.train_step(batch, loss, Replay.rollout)
    total = torch.zeros(())
    if mesh.reports_loss:
        total += sum(float(b.old_logprobs.sum()) for b in batch.micro_batches)  # pyright: ignore
    if mesh.dims.world > 1:
        dist.all_reduce(total)
    return exported(policy), total


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (2, {"tensor": 2}),
        release(2, {"context": 2}),
        release(2, {"pipeline": 2}),
        release(2, {}),
        release(4, {"tensor": 2, "context": 2}),
    ],
    ids=str,
)
def test_the_same_update(
    world: int, sizes: dict[str, int], model_path: Path, samples: list[Sample], tmp_path: Path
) -> None:
    own = with_masks(samples)
    ((one, total),) = run_ranks(1, updated, model_path, {}, own, folder=tmp_path / "one")
    ((whole, other),) = run_ranks(1, updated, model_path, {}, samples, folder=tmp_path / "whole")
    assert distance(one, whole) > 100 * TOLERANCE  # or the sets made no difference
    assert float(total) > float(other)
    ranks = run_ranks(world, updated, model_path, sizes, own, folder=tmp_path / "ours")
    for ours, _ in ranks:
        assert distance(ours, one) < TOLERANCE
    assert float(ranks[0][1]) == pytest.approx(float(total), rel=1e-5)
