"""One run of the stability study: an arm, a seed, and what it measures beside the loop's own metrics.

The start is a model folder after SFT, the same for all runs. The engine records routes in every
run, also where the arm does not replay them: so log-probs of each rollout can be computed both ways.

d = trainer's log-prob before the update - engine's, of one token. A token is *extreme* where one of the
two probabilities is more than TAU times the other.
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from moe.routes import Replay
from mrl.algorithms.base import Algorithm
from mrl.config import AlgorithmConfig, load_recipe
from mrl.engines.base import RolloutEngine
from mrl.errors import RunFailed
from mrl.learn.batching import make_train_batch
from mrl.learn.learner import Learner, Record
from mrl.preflight import check
from mrl.run.folder import RunFolder
from mrl.system.clock import Clock
from mrl.types import LossOutput, Mean, MicroBatch, SampleGroup
from parallel.mesh import Mesh, init_mesh
from studies.stability_study.arms import Job
from tests.loop.stepped import SteppedRun

TAU = 2.0
"""Our choice: ratios outside of [1/2, 2]."""
KEYS = (
    "reward/mean", "response_len/mean", "entropy", "grad_norm", "loss/policy", "ratio/max",
    "ratio/clip_frac", "mismatch/k3", "mismatch/logprob_abs_mean", "mismatch/logprob_abs_max",
    "study/mismatch_extreme", "study/ratio_extreme", "time/sync_s", "time/rollout_s",
    "time/logprob_s", "time/train_s", "time/step_s",
)  # fmt: skip
"""The loop's metrics that are kept of each step."""


class Watched:
    """A watched algorithm also counts extreme tokens: of the update, and against the engine."""

    def __init__(self, inner: Algorithm) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def loss(self, logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
        output = self.inner.loss(logprobs, batch, config)
        old, mask = batch.old_logprobs, batch.loss_mask
        assert old is not None
        shares = {
            "study/ratio_extreme": (logprobs.detach() - old)[mask],
            "study/mismatch_extreme": (old - batch.rollout_logprobs)[mask],
        }
        more = {
            key: Mean(is_extreme(d).sum().double(), mask.sum().double())
            for key, d in shares.items()
        }
        return LossOutput(output.loss_sum, {**output.stats, **more})


def is_extreme(difference: Tensor) -> Tensor:
    """Tell which log-prob differences are extreme: bool of the same shape. NaN is extreme."""
    return ~(difference.abs() <= math.log(TAU))


class PairedLearner(Learner):
    """A learner that first computes log-probs of each rollout twice: with its routes and natively."""

    paired: dict[str, dict[str, float]]

    def learn(
        self, step: int, groups: list[SampleGroup], clock: Clock, record: Record
    ) -> dict[str, float]:
        self.paired = self.both_ways(groups)
        return super().learn(step, groups, clock, record)

    def both_ways(self, groups: list[SampleGroup]) -> dict[str, dict[str, float]]:
        """Return, for `native` and `replayed`, the mismatch of the same tokens under the same
        weights. A dense model has `native` alone.
        """
        self.policy.onload()
        samples = [sample for group in groups for sample in group.samples]
        limit = self.recipe.train.micro_batch_tokens
        batch = make_train_batch(samples, [0.0] * len(samples), self.algorithm, self.mesh, limit)
        found: dict[str, dict[str, float]] = {}
        ways = {"native": Replay.off}
        if self.num_moe_layers:
            ways["replayed"] = Replay.rollout
        for name, replay in ways.items():
            output = self.policy.forward_only(batch.micro_batches, replay)
            d = torch.cat([
                (old - micro.rollout_logprobs)[micro.loss_mask]
                for old, micro in zip(output.logprobs, batch.micro_batches, strict=True)
            ])  # fmt: skip
            found[name] = mismatch(d)
            if name == "replayed":
                found["routes"] = {
                    key.removeprefix("routing/"): float(value.total / value.count)
                    for key, value in output.routing.items()
                    if key in ("routing/disagreement", "routing/token_any_layer")
                    and isinstance(value, Mean)
                }
        return found


def mismatch(d: Tensor) -> dict[str, float | int]:
    """Summarize the differences f32[n] of all loss tokens of a step."""
    d = d.double()
    return {
        "k3": float((d.expm1() - d).mean()),
        "abs_mean": float(d.abs().mean()),
        "abs_max": float(d.abs().max()),
        "num_extreme": int(is_extreme(d).sum()),
        "num_tokens": d.numel(),
    }


class Run(SteppedRun):
    """A run that takes its rollouts from an engine that others use too, and watches itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        plain = self.learner
        self.learner = PairedLearner(
            plain.recipe,
            plain.algorithm,
            plain.num_moe_layers,
            self.mesh,
            self.policy,
            self.exchange,
            plain.diagnosis,
            plain.critic,
        )

    def both_ways(self, groups: list[SampleGroup]) -> dict[str, dict[str, float]]:
        """Compare engine and trainer on the groups (`PairedLearner.both_ways`)."""
        assert isinstance(self.learner, PairedLearner)
        return self.learner.both_ways(groups)

    @property
    def paired(self) -> dict[str, dict[str, float]]:
        assert isinstance(self.learner, PairedLearner)
        return self.learner.paired


def make_run(job: Job, mesh: Mesh | None) -> Run:
    """The run before its start; its engine, if it is to have one of its own, is not started."""
    recipe = load_recipe(
        Path(job.recipe),
        [
            f"model.path={job.start}", f"output_dir={job.folder}", f"seed={job.seed}",
            f"train.num_steps={job.num_steps}", "sft=null", "guards.max_nonfinite_steps=1",
            *job.more,
        ],
    )  # fmt: skip
    plan = check(recipe, 1)
    watched = cast(Algorithm, Watched(plan.algorithm))
    plan = dataclasses.replace(plan, algorithm=watched)
    folder = RunFolder(recipe.output_dir)
    folder.open(recipe)
    return Run(plan, mesh or init_mesh(plan.dims, recipe.seed), folder)


def start_engine(job: Job) -> tuple[RolloutEngine, Mesh]:
    """Start the engine for all runs of this process; of a MoE it records routes, whatever the arm of
    `job`."""
    more = (*job.more, f"moe.routing_replay={'r3' if job.is_moe else 'off'}")
    run = make_run(dataclasses.replace(job, more=more, folder=f"{job.folder}_engine"), None)
    return run.begin(None), run.mesh


def result_of(run: Run, job: Job) -> dict[str, Any]:
    """Run all steps, or those up to where a number is not finite, and return what was measured."""
    start, steps, ended = time.perf_counter(), [], "done"
    for _ in range(job.num_steps):
        try:
            metrics = run.run_step()
        except (RuntimeError, RunFailed) as error:
            if "finite" not in str(error):
                raise
            ended = f"not finite: {error}"
            break
        steps.append({**{key: metrics.get(key) for key in KEYS}, "paired": run.paired})
    return {
        "arm": job.arm,
        "seed": job.seed,
        "ended": ended,
        "seconds": round(time.perf_counter() - start, 1),
        "steps": steps,
    }
