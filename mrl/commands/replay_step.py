"""Train one step of a run again from its saved rollouts, and compare its metrics bit by bit.

The newest checkpoint at or before the step is loaded, or the initial weights if there is no such
checkpoint. All steps from there to the requested step are trained again from
rollouts/step_*.safetensors, and the metrics of the requested step are compared with those in
metrics.jsonl. By default the replay is written to the folder replay/ of the run; nothing else in the
run changes.

Metrics of the engine are not compared, because the replay starts no engine. Times, memory,
throughput and `async/` metrics are not compared either.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.config import Recipe, load_recipe
from mrl.errors import InputError
from mrl.run.compare import MACHINE, Pair, differences, open_run
from mrl.run.folder import RunFolder, saved_step
from mrl.run.json_lines import finite_or_null
from mrl.run.source import is_run, load_run
from parallel.checkpoint.manifest import candidates, damage, folder_name, step_of

if TYPE_CHECKING:
    from mrl.trainer import Trainer

ENGINE = ("rollout/", "eval/", "routing/wire_bytes_per_token")
"""Prefixes of metrics that come from the engine, or depend on which rank generated which samples."""


@dataclass(frozen=True)
class Source:
    """The run and the step to replay, and the checkpoint or initial weights from which to train."""

    run: RunFolder
    step: int
    start: int
    """Number of steps that the run had done at the checkpoint; 0 for the initial weights."""
    checkpoint: bool
    """Whether the replay starts from a checkpoint. Otherwise it starts from the initial weights and
    repeats the recipe's SFT, if any."""

    @property
    def name(self) -> str:
        """The name of the checkpoint, or `the initial weights`."""
        if self.checkpoint:
            return folder_name(self.start)
        return "the initial weights"


@dataclass(frozen=True)
class Replayed:
    """The result of a replay, which is the same on every rank."""

    source: Source
    folder: RunFolder
    num_keys: int
    """Number of metrics that were compared."""
    pairs: list[Pair]
    """The metrics that differ, each with its value in metrics.jsonl and its value in the replay."""
    missing: list[str]
    """Names of metrics that metrics.jsonl has for the step and the replay does not."""


def find_source(run: Path, step: int) -> Source:
    """Return the starting point from which the step can be replayed.

    Raises InputError if the step cannot be replayed; the message lists the steps that can be
    replayed.
    """
    folder = open_run(run)
    if load_recipe(folder.config).debug.rollout_only:
        raise InputError(f"{run} was a run with debug.rollout_only; no step of it was trained")
    if not any(row["step"] == step for row in folder.read_metrics()):
        raise InputError(f"{run} has no metrics of step {step}; {_replayable(folder)}")
    whole = (path for path in candidates(folder.checkpoints) if damage(path, digests=False) is None)
    starts = [(step_of(path), True) for path in whole] + [(0, False)]
    start, checkpoint = max(each for each in starts if each[0] <= step)
    missing = [s for s in range(start, step + 1) if not saved_step(folder.rollouts, s).is_file()]
    if missing:
        raise InputError(
            f"{run}: step {step} needs the saved rollouts of steps {start} to {step}, and there is no "
            f"{saved_step(folder.rollouts, missing[0]).name}; {_replayable(folder)}"
        )
    return Source(folder, step, start, checkpoint)


def check_replay_folder(source: Source, output: Path) -> None:
    """Raise InputError if `output` holds a run that is not a replay, because a replay sets aside the
    steps that it finds in its folder."""
    is_itself = output.resolve() == source.run.root.resolve()
    if is_itself or (is_run(output) and load_run(output).debug.load_rollouts is None):
        raise InputError(
            f"--output {output} holds a run, whose steps the replay would set aside; give a new "
            f"folder, or leave --output out for {source.run.root / 'replay'}"
        )


def _replayable(folder: RunFolder) -> str:
    """Return a text for error messages that lists the steps that can be replayed."""
    starts = {0, *(step_of(path) for path in candidates(folder.checkpoints))}
    last = max((row["step"] for row in folder.read_metrics()), default=-1)
    steps, reachable = [], False
    for step in range(last + 1):
        reachable = (reachable or step in starts) and saved_step(folder.rollouts, step).is_file()
        if reachable:
            steps.append(step)
    if not steps:
        return "no step of it can be replayed: train with debug.save_rollouts=true"
    return f"can be replayed: {_ranges(steps)}"


def _ranges(steps: list[int]) -> str:
    """Write ascending steps as ranges: [0, 1, 2, 5] -> `0-2, 5`."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts)


def replay_recipe(source: Source, output: Path) -> Recipe:
    """Return the run's recipe, changed to train from its saved rollouts and to write to `output`.

    Token records (tokens/step_*.safetensors) are written only if the algorithm computes log-probs
    in a separate pass before the update. With other algorithms, a record would need such a pass.
    The replay would then compute the mismatch metrics from that pass, but the run may have computed
    these metrics from the forward pass of the first update.
    """
    from mrl.algorithms import load_algorithm, traits
    from mrl.preflight.roles import as_colocated

    run = source.run
    recipe = as_colocated(load_run(run.root, config=run.history.config_at(source.step)))
    tree = recipe.model_dump()
    tree["output_dir"] = str(output)
    tree["train"]["num_steps"] = max(recipe.train.num_steps, source.step + 1)
    tree["checkpoint"] |= {"save_every": 0, "async_save": False}
    tree["debug"] |= {
        "load_rollouts": str(source.run.rollouts), "save_rollouts": False, "rollout_only": False
    }  # fmt: skip
    tree["eval"] = {}  # an evaluation needs an engine
    if traits(load_algorithm(recipe.algorithm.name)).needs_old_logprobs:
        tree["diagnosis"]["save_tokens_every"] = 1
    return Recipe.model_validate(tree)


def replay(source: Source, output: Path, world: int) -> Replayed:
    """Replay a step on this rank, which is one of `world` ranks. A collective.

    Raises InputError if the recipe cannot run on `world` ranks here, or if the saved rollouts are
    damaged.
    """
    from mrl.preflight import check
    from parallel import prepare
    from parallel.connections import set_connections
    from parallel.mesh import init_mesh

    recipe = replay_recipe(source, output)
    set_connections(recipe.parallel)
    saved = range(source.start, source.step + 1)
    plan = check(recipe, world, saved_steps=saved, allowed=None)
    _check_tokens(source, plan.model.sizes.vocab_size)
    folder = RunFolder(output)
    if os.environ.get("RANK", "0") == "0":
        folder.open(recipe, plan.update)
        folder.rewind(0)
    prepare()
    from mrl.trainer import Trainer

    mesh = init_mesh(plan.dims, recipe.seed, timeout_s=600)
    trainer = Trainer(plan, mesh, folder)
    try:
        _load(trainer, source)
        row: dict[str, Any] = {}
        while trainer.step <= source.step:
            row = trainer.run_step()
            if trainer.is_main:
                folder.add_metrics(row)
    finally:
        trainer.collector.close()
    return Replayed(source, folder, *_compare(source, row))


def _check_tokens(source: Source, vocab_size: int) -> None:
    """Raise InputError if the rollouts to train on hold a token id outside the model's vocabulary."""
    from mrl.run.rollouts import load_groups

    for step in range(source.start, source.step + 1):
        file = saved_step(source.run.rollouts, step)
        for sample in (sample for group in load_groups(file) for sample in group.samples):
            low, high = int(sample.token_ids.min()), int(sample.token_ids.max())
            if low < 0 or high >= vocab_size:
                raise InputError(
                    f"{file}: the file is damaged: a sample of group {sample.group_id} has tokens from "
                    f"{low} to {high}, expected 0 to {vocab_size - 1}; restore the file"
                )


def _load(trainer: Trainer, source: Source) -> None:
    """Restore the state that the run had before step `source.start`.

    The state is loaded from the checkpoint. Without a checkpoint, the weights stay at their initial
    values, and the recipe's SFT, if any, is repeated.
    """
    from mrl.learn.sft import run_sft
    from parallel.checkpoint.checkpoints import Checkpoints

    recipe = trainer.plan.recipe
    trainer.collector.start(trainer.policy)
    if source.checkpoint:
        saved = Checkpoints(source.run.checkpoints, trainer.mesh, keep=1, seed=recipe.seed)
        trainer.resume(saved.load(source.start, trainer.policy, trainer.critic))
    elif recipe.sft is not None:
        run_sft(trainer.plan.sft_examples, recipe.sft, recipe, trainer.policy, trainer.mesh)


def _compare(source: Source, row: dict[str, Any]) -> tuple[int, list[Pair], list[str]]:
    """Compare the metrics `row` of the replayed step with the step's metrics in metrics.jsonl.

    Returns the number of compared metrics, the metrics whose values differ after conversion to
    JSON, and the names of metrics that are only in metrics.jsonl.
    """
    old = {row["step"]: row for row in source.run.read_metrics()}[source.step]
    new = finite_or_null(row)
    keys = [key for key in old if not key.startswith((*MACHINE, *ENGINE))]
    both = [key for key in keys if key in new]
    pairs = differences({k: old[k] for k in both}, {k: new[k] for k in both})
    return len(both), pairs, sorted(set(keys) - set(both))
