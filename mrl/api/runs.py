"""Trains and evaluates in this process, and leaves it as it was: as often as you like.

Under torchrun every rank makes the same calls in the same order, as it would start the same commands.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mrl.api.recipes import load_recipe
from mrl.commands.evaluate import evaluate_recipe
from mrl.commands.train import train as run_train
from mrl.config import Recipe
from mrl.errors import InputError
from mrl.run.callbacks import Callback
from mrl.run.folder import RunFolder
from mrl.system.processes import die_with_torchrun
from parallel.mesh import destroy_mesh, world_size


@dataclass(frozen=True)
class TrainResult:
    """A `TrainResult` says what `train` left in the run folder."""

    folder: Path
    """The run folder: `metrics.jsonl`, `rollouts/`, `checkpoints/` ..."""
    stopped: str
    """Why the run stopped before its last step (a callback, SIGUSR1); empty where it is done."""
    metrics: list[dict[str, Any]]
    """The lines of metrics.jsonl, one a step, also of steps that were done before this call. A number
    that is not there is None."""


@dataclass(frozen=True)
class Evaluation:
    """An `Evaluation` holds what `evaluate` measured."""

    step: int
    """The number of steps that the weights were trained; 0 for the model itself."""
    metrics: dict[str, float]
    """`eval/NAME/...`, see docs/evaluation.md."""
    samples: Path
    """The JSON Lines file with every sample and its reward."""


def train(
    recipe: Recipe | str | Path | Mapping[str, Any],
    *,
    callbacks: Sequence[Callback] = (),
    allow: Sequence[str] = (),
) -> TrainResult:
    """Train a recipe as `mrl train` does; a run that `output_dir` has already is continued.

    `allow`: the keys that may differ from those of that run, as `--allow` names them.
    Raises InputError for bad input and RunFailed for a run that cannot continue; both have one clear
    line, and nothing is left running.
    """
    loaded = load_recipe(recipe)
    _check_callbacks(callbacks)
    with _session():
        stopped = run_train(loaded, world_size(), callbacks, allow)
    folder = RunFolder(loaded.output_dir)
    return TrainResult(folder.root, stopped, folder.read_metrics())


def evaluate(
    recipe: Recipe | str | Path | Mapping[str, Any], *, step: int | None = None
) -> Evaluation:
    """Evaluate on the recipe's `eval.sets` as `mrl eval` does.

    It takes the checkpoint after `step` steps in `output_dir`, by default the newest, or the model
    where there is none. Raises InputError and RunFailed as `train` does.
    """
    loaded = load_recipe(recipe)
    with _session():
        done, metrics, samples = evaluate_recipe(loaded, world_size(), step)
    return Evaluation(done, metrics, samples)


@contextmanager
def _session() -> Iterator[None]:
    """Compute as the command line does, and clear up: process groups, threads, memory.

    Signals and Megatron's CPU mode are for the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise InputError("mrl: train and evaluate in the main thread, one call after the other")
    die_with_torchrun()
    with _one_thread():
        try:
            yield
        except BaseException:
            if world_size() == 1:  # the peers of a rank that failed may never come to leave
                destroy_mesh()
            raise
        else:
            destroy_mesh()
        finally:
            gc.collect()  # the policy is part of reference cycles
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread as `mrl` does (mrl/cli.py says why), unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    before = torch.get_num_threads()
    os.environ["OMP_NUM_THREADS"] = "1"  # of child processes
    torch.set_num_threads(1)
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        torch.set_num_threads(before)


def _check_callbacks(callbacks: Sequence[Callback]) -> None:
    for number, callback in enumerate(callbacks):
        for name in ("on_step", "on_evaluation"):
            if isinstance(callback, type) or not callable(getattr(callback, name, None)):
                raise InputError(
                    f"callbacks[{number}]: {callback!r} is no object with a method {name}; make a "
                    "class from mrl.Callback, and give an object of it"
                )
