"""Truncated distributions in the real loop: SGLang and the trainer agree over the kept tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.run.rollouts import load_groups
from mrl.types import Sample, SampleGroup
from tests.loop.conftest import REPOSITORY, Toy, trained
from tests.ranks import run_ranks

pytestmark = [pytest.mark.release, pytest.mark.timeout(600)]

TOP_K = 4
CUT = ("rollout.top_p=0.1", f"rollout.top_k={TOP_K}", "train.num_steps=3", "algorithm.name=grpo")
MASK = "rollout.sampling_mask=true"
MOVES = ("algorithm.entropy_coef=0.1", "optimizer.lr=1e-2")  # also where no reward differs
MULTI_TURN = REPOSITORY / "launch/recipes/multi_turn.yaml"


def rows_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def saved(output: Path, step: int = 0) -> list[SampleGroup]:
    return load_groups(output / f"rollouts/step_{step:06d}.safetensors")


@pytest.fixture(scope="module")
def runs(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One with the masks and one without: their first steps draw the same tokens."""
    folder = tmp_path_factory.mktemp("masks")
    made = {"masks": folder / "masks", "whole": folder / "whole"}
    for name, output in made.items():
        mask = (MASK,) if name == "masks" else ()
        done = toy.run(output, *CUT, *MOVES, *mask, "debug.save_rollouts=true")
        assert done.returncode == 0, done.stdout + done.stderr
    return made


def test_engine_and_trainer_agree_in_every_step(runs: dict[str, Path]) -> None:
    for output in runs.values():
        for row in rows_of(output):
            assert row["mismatch/logprob_abs_max"] < 1e-5
            assert row["ratio/mean"] == pytest.approx(1, abs=1e-5)
            assert row["grad_norm"] > 0


def test_the_engine_returns_the_set_of_every_token(runs: dict[str, Path]) -> None:
    counts = []
    for step in range(3):
        for sample in (s for g in saved(runs["masks"], step) for s in g.samples):
            mask = sample.sampling_mask
            assert mask is not None
            assert torch.equal(mask.counts > 0, sample.loss_mask)
            kept = mask.rows(sample.loss_mask.nonzero().flatten())
            assert bool((kept == sample.response_ids.unsqueeze(1)).any(1).all())
            counts += mask.counts[sample.prompt_len :].tolist()
    assert max(counts) == TOP_K  # top_k cuts some, and top_p others
    assert min(counts) < TOP_K


def test_log_probs_are_those_of_the_whole_distribution_less_what_was_kept(
    runs: dict[str, Path],
) -> None:
    """log p(S) is one number for all samples of a prompt at their first token, and never above 0."""
    for masked, whole in zip(saved(runs["masks"]), saved(runs["whole"]), strict=True):
        first: list[float] = []
        for sample, other in zip(masked.samples, whole.samples, strict=True):
            assert torch.equal(sample.token_ids, other.token_ids)
            assert other.sampling_mask is None
            kept = of_kept(sample, other)
            assert bool((kept < -0.05).any())
            assert float(kept.max()) < 1e-6
            first.append(float(kept[0]))
        assert first == pytest.approx([first[0]] * len(first), abs=1e-6)


def of_kept(sample: Sample, whole: Sample) -> Tensor:
    """f32[C]: log p(S) of each token."""
    return (whole.rollout_logprobs - sample.rollout_logprobs)[sample.prompt_len :]


def test_two_ranks_that_share_the_vocabulary_train_saved_rollouts_alike(
    runs: dict[str, Path], toy: Toy, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    load = f"debug.load_rollouts={runs['masks'] / 'rollouts'}"
    layout = ("parallel.tensor_model_parallel_size=2", load)
    keys = toy.overrides(output, *CUT, *MOVES, MASK, *layout)
    run_ranks(2, trained, keys, folder=tmp_path / "ranks")
    rows = rows_of(output)
    for ours, theirs in zip(rows, rows_of(runs["masks"]), strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    assert rows[0]["mismatch/logprob_abs_max"] < 1e-5  # the same weights as the engine had


def test_two_engines_and_continued_samples(toy: Toy, tmp_path: Path) -> None:
    """Pieces of two steps in one sample, and sets that travel from rank to rank."""
    output = tmp_path / "run"
    late = (
        "rollout.over_sampling=2",
        "rollout.partial_rollouts=resume",
        "algorithm.importance=tis",
    )
    more = ("rollout.max_response_len=40", "rollout.max_running_requests=5", "optimizer.lr=1e-12")
    ends = f"rollout.stop_token_ids={list(range(10, 20))}"  # else all are of one length
    cut = (*CUT, "rollout.top_k=60", "rollout.top_p=0.9", ends)
    keys = toy.overrides(output, *cut, MASK, *late, *more, "debug.save_rollouts=true")
    run_ranks(2, trained, keys, folder=tmp_path / "ranks")
    rows = rows_of(output)
    assert sum(row["rollout/resumed_samples"] for row in rows) > 0
    for step, row in enumerate(rows):
        assert row["mismatch/logprob_abs_max"] < 1e-5  # the weights hardly move
        for sample in (s for g in saved(output, step) for s in g.samples):
            assert sample.sampling_mask is not None
            assert torch.equal(sample.sampling_mask.counts > 0, sample.loss_mask)


def test_conversations(toy: Toy, tmp_path: Path) -> None:
    output = tmp_path / "run"
    data = tmp_path / "chats.jsonl"
    chat = {"prompt": [{"role": "user", "content": "guess"}]}
    data.write_text((json.dumps(chat) + "\n") * 8)
    keys = ("train.num_steps=2", f"data.path={data}", f"rollout.top_k={TOP_K}", MASK)
    done = toy.run(output, *keys, recipe=MULTI_TURN)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in rows_of(output):
        assert row["episode/num_turns"] == 3
        assert row["mismatch/logprob_abs_max"] <= 1e-5
        assert row["ratio/mean"] == 1.0
