"""rollouts/*.jsonl holds the advantages that the update gets, and is on file when the update fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe import provenance
from mrl.algorithms.corrections import token_advantages
from mrl.errors import RunFailed
from mrl.learn import learner, step_data
from mrl.types import MicroBatch, TrainBatch
from tests.loop.conftest import Toy
from tests.loop.test_guards import made_trainer, spoilt
from tests.ranks import run_ranks
from tests.release import release

TRAINED = {
    "sequence": ["algorithm.name=gspo"],
    "KL in the reward": ["algorithm.name=grpo", "algorithm.kl_coef=0.5", "algorithm.kl_in=reward"],
    "KL in the reward of tokens": [
        *("algorithm.name=reinforce_pp", "algorithm.kl_coef=0.5", "algorithm.kl_in=reward")
    ],
    "critic": ["algorithm.name=ppo"],
}
"""The sources that the advantages of a sample come from."""
NOISE = 0.3
"""Added to the reference's log-probs: at step 0 they are the policy's, and the KL would be 0."""


def of_samples(batches: list[MicroBatch]) -> dict[int, float]:
    """Return for each sample the mean of what the loss takes of its loss tokens."""
    found = {}
    for batch in batches:
        assert batch.sample_ids is not None
        lengths = batch.cu_seqlens.diff().tolist()
        parts = zip(
            batch.sample_ids.tolist(),
            token_advantages(batch).split(lengths),
            batch.loss_mask.split(lengths),
            strict=True,
        )
        found |= {i: float(own[mask].double().mean()) for i, own, mask in parts if i >= 0}
    return found


def step_that_fails_in_its_update(overrides: list[str]) -> dict[str, Any]:
    """A step whose first optimizer step raises -> what that was to train with, and what is on file."""
    trainer = made_trainer(overrides)
    seen: dict[int, float] = {}

    def fails(batch: TrainBatch, *args: Any, **options: Any) -> None:
        seen.update(of_samples(batch.micro_batches))
        raise RuntimeError("the update failed")

    trainer.policy.train_step = fails
    trainer.policy.forward_only = noisy(trainer.policy.forward_only)
    with pytest.raises(RuntimeError, match="the update failed"):
        trainer.run_step()
    rows = trainer.folder.read_rollouts(0) if trainer.is_main else []
    return {"trained": seen, "rows": rows}


def noisy(compute: Any) -> Any:
    """Passes whose log-probs are shifted from the second pass on, which is the reference's."""

    def computed(*args: Any, **options: Any) -> Any:
        result = compute(*args, **options)
        computed.calls += 1
        if computed.calls > 1:
            for values in result.logprobs:
                values.add_(NOISE * torch.sin(torch.arange(len(values))))
        return result

    computed.calls = 0
    return computed


def overrides_of(toy: Toy, recorded: Path, output: Path, *more: str) -> list[str]:
    saved = f"debug.load_rollouts={recorded / 'rollouts'}"
    return toy.overrides(output, saved, "train.num_steps=4", *more)


@pytest.mark.parametrize(
    ("source", "world"),
    [
        *(("KL in the reward of tokens", 1), ("critic", 1)),
        *(release(each, 1) for each in ("sequence", "KL in the reward")),
        *(release(each, 2) for each in TRAINED),
    ],
)
def test_the_file_holds_what_was_trained_with_also_when_the_update_fails(
    toy: Toy, recorded: Path, tmp_path: Path, source: str, world: int
) -> None:
    overrides = overrides_of(toy, recorded, tmp_path / "run", *TRAINED[source])
    ranks = run_ranks(world, step_that_fails_in_its_update, overrides, folder=tmp_path / "out")
    trained = {i: mean for rank in ranks for i, mean in rank["trained"].items()}
    rows = ranks[0]["rows"]
    assert sorted(trained) == list(range(len(rows)))
    written = [row["advantage"] for row in rows]
    assert written == pytest.approx([trained[i] for i in range(len(rows))], abs=1e-6)
    assert any(written)
    assert written != [row["reward"] for row in rows]


def step_with_a_pass_that_fails(overrides: list[str], what: str) -> dict[str, Any]:
    """A step whose first pass raises, or whose reference is not finite -> the error and the file."""
    trainer = made_trainer(overrides)

    def fails(*args: Any, **options: Any) -> None:
        raise MemoryError("no memory for the pass")

    outputs: Callable[[Any], Any] = lambda result: result.logprobs  # noqa: E731
    passes = trainer.policy.forward_only
    trainer.policy.forward_only = fails if what == "pass" else spoilt(passes, outputs, first=1)
    try:
        trainer.run_step()
        error = ""
    except (MemoryError, RunFailed) as failed:
        error = str(failed)
    return {"error": error, "rows": trainer.folder.read_rollouts(0)}


def test_advantages_of_rewards_alone_are_on_file_before_any_pass(
    toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    overrides = overrides_of(toy, recorded, tmp_path / "run")
    args = overrides, "pass"
    (rank,) = run_ranks(1, step_with_a_pass_that_fails, *args, folder=tmp_path / "out")
    assert rank["error"] == "no memory for the pass"
    assert any(row["advantage"] for row in rank["rows"])


def test_a_rollout_whose_advantages_nobody_can_compute_is_on_file_without_them(
    toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    """The message names its lines."""
    overrides = overrides_of(toy, recorded, tmp_path / "run", *TRAINED["KL in the reward"])
    args = overrides, "reference"
    (rank,) = run_ranks(1, step_with_a_pass_that_fails, *args, folder=tmp_path / "out")
    assert "the reference's log-probs are not finite in samples 4, 6" in rank["error"]
    assert len(rank["rows"]) == 16
    assert {row["advantage"] for row in rank["rows"]} == {None}


def step_that_counts(overrides: list[str]) -> dict[str, int]:
    """Run a step -> the calls of what each step is to compute once, for a sample or for all."""
    trainer, calls = made_trainer(overrides), Counter()

    def counted(room: Any, name: str) -> None:
        compute = getattr(room, name)

        def called(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return compute(*args, **options)

        setattr(room, name, called)

    for room, name in ((provenance, "stale_rows"), (step_data, "shaped_rewards")):
        counted(room, name)
    counted(learner, "compare_rewards")
    metrics = trainer.run_step()
    assert metrics["tokens/train"] > 0
    return dict(calls)


def test_a_step_computes_stale_rows_rewards_and_advantages_once(
    toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    overrides = overrides_of(toy, recorded, tmp_path / "run", "algorithm.name=grpo")
    (calls,) = run_ranks(1, step_that_counts, overrides, folder=tmp_path / "out")
    assert calls == {"stale_rows": 16, "shaped_rewards": 4, "compare_rewards": 1}
