"""One step of a run again, from its saved rollouts: the same bits, or what differs.

The newest checkpoint at or before the step is loaded (the initial weights, before the first one), the
steps from there on are trained again from rollouts/step_*.safetensors, and the metrics of the step are
compared with those on file. Nothing is written into the run but, by default, its folder replay/.

What the engine measured is not measured again, and times and memory are the machine's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.algorithms import load_algorithm, traits
from mrl.config import Recipe, load_recipe
from mrl.errors import InputError
from mrl.preflight.roles import as_colocated
from mrl.run.compare import MACHINE, Pair, differences, open_run
from mrl.run.folder import RunFolder, saved_step
from mrl.run.json_lines import finite_or_null
from mrl.run.rollouts import load_groups
from mrl.run.source import load_run
from parallel.checkpoint.manifest import candidates, damage, folder_name, step_of

if TYPE_CHECKING:
    from mrl.trainer import Trainer

ENGINE = ("rollout/", "eval/", "routing/wire_bytes_per_token")
"""Metrics of the engine, and of which rank rolled out what."""


@dataclass(frozen=True)
class Source:
    """The checkpoint and the files that a replay of a step reads."""

    run: RunFolder
    step: int
    start: int
    """Steps done in the checkpoint that is loaded; 0 without one."""
    checkpoint: bool
    """False: from the initial weights (and SFT)."""

    @property
    def name(self) -> str:
        if self.checkpoint:
            return folder_name(self.start)
        return "the initial weights"


@dataclass(frozen=True)
class Replayed:
    """A `Replayed` is the result of a replay, the same on every rank."""

    source: Source
    folder: RunFolder
    num_keys: int
    """Metrics compared."""
    pairs: list[Pair]
    """Those that differ: on file, and again."""
    missing: list[str]
    """Metrics on file that the replay does not have."""


def find_source(run: Path, step: int) -> Source:
    """Raises InputError where the step cannot be done again, with those that can."""
    folder = open_run(run)
    if load_recipe(folder.config).debug.rollout_only:
        raise InputError(f"{run} only rolled out (debug.rollout_only); no step of it was trained")
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


def _replayable(folder: RunFolder) -> str:
    """Which steps can be done again, in words."""
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
    """[0, 1, 2, 5] -> `0-2, 5`."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts)


def replay_recipe(source: Source, output: Path) -> Recipe:
    """Return the run's recipe, changed to train from its saved rollouts into a folder of its own.

    Token records are written, but for an algorithm without a pass before the update: that of the record
    would be one that the run may not have had, and the mismatch is measured on it.
    """
    run = source.run
    recipe = as_colocated(load_run(run.root, config=run.history.config_at(source.step)))
    tree = recipe.model_dump()
    tree["output_dir"] = str(output)
    tree["train"]["num_steps"] = max(recipe.train.num_steps, source.step + 1)
    tree["checkpoint"] |= {"save_every": 0, "async_save": False}
    tree["debug"] |= {
        "load_rollouts": str(source.run.rollouts), "save_rollouts": False, "rollout_only": False
    }  # fmt: skip
    tree["eval"] = {}  # it needs an engine
    if traits(load_algorithm(recipe.algorithm.name)).needs_old_logprobs:
        tree["diagnosis"]["save_tokens_every"] = 1
    return Recipe.model_validate(tree)


def replay(source: Source, output: Path, world: int) -> Replayed:
    """Do it, on this rank of `world`. Raises InputError where the recipe cannot start here."""
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
    """Raise InputError if saved rollouts hold a token that the model does not have."""
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
    """All that the run had before step `source.start`: models, optimizers, random states, and what one
    step keeps for the next."""
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
    """Metrics that both have, those of them that differ as a file holds them, and those that only the
    file has."""
    (old,) = (r for r in source.run.read_metrics() if r["step"] == source.step)
    again = finite_or_null(row)
    keys = [key for key in old if not key.startswith((*MACHINE, *ENGINE))]
    both = [key for key in keys if key in again]
    pairs = differences({k: old[k] for k in both}, {k: again[k] for k in both})
    return len(both), pairs, sorted(set(keys) - set(both))
