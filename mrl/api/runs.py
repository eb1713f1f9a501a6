"""Train and evaluate in this process, any number of times.

Each call releases the process groups, threads and memory that it has created. Under torchrun every
rank must make the same calls in the same order.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mrl.api.recipes import load_recipe
from mrl.config import Recipe
from mrl.errors import InputError
from mrl.jobs.evaluate import evaluate_recipe
from mrl.jobs.train import train as run_train
from mrl.run.callbacks import Callback
from mrl.run.folder import RunFolder
from mrl.system.processes import die_with_torchrun
from mrl.system.threads import MARK, compute_with_one_thread
from parallel.mesh import destroy_mesh, world_size


@dataclass(frozen=True)
class TrainResult:
    """The result of `train`."""

    folder: Path
    """The run folder, with `metrics.jsonl`, `rollouts/`, `checkpoints/` and more."""
    stopped: str
    """Why the run stopped before its last step, for example because of a callback or a signal;
    empty if all steps are done."""
    metrics: list[dict[str, Any]]
    """The rows of metrics.jsonl, one per step, including the steps before this call. Values that
    are not finite are None."""


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`."""

    step: int
    """The number of steps that the weights were trained for; 0 for the untrained model."""
    metrics: dict[str, float]
    """The metrics `eval/NAME/...`; see docs/evaluation.md."""
    samples: Path
    """The JSON Lines file with every sample and its reward."""


def train(
    recipe: Recipe | str | Path | Mapping[str, Any],
    *,
    callbacks: Sequence[Callback] = (),
    allow: Sequence[str] = (),
) -> TrainResult:
    """Train a recipe as `mrl train` does. If `output_dir` contains a run, that run is continued.

    `allow` lists keys whose values may differ from the values in the continued run, as with
    `--allow`. Raises InputError for bad input, and RunFailed if the run cannot continue. Each error
    message is one line, and no process is left running.
    """
    loaded = load_recipe(recipe)
    _check_callbacks(callbacks)
    if isinstance(allow, str):
        raise InputError(f"allow: got {allow!r}, expected a list such as [{allow!r}]")
    with _session():
        stopped = run_train(loaded, world_size(), callbacks, allow)
    folder = RunFolder(loaded.output_dir)
    return TrainResult(folder.root, stopped, folder.read_metrics())


def evaluate(
    recipe: Recipe | str | Path | Mapping[str, Any], *, step: int | None = None
) -> Evaluation:
    """Evaluate on the recipe's `eval.sets` as `mrl eval` does.

    `step` selects the checkpoint in `output_dir` that was saved after that many steps. If `step` is
    None, the newest checkpoint is evaluated, or the model itself if there is no checkpoint. Raises
    InputError and RunFailed as `train` does.
    """
    loaded = load_recipe(recipe)
    with _session():
        done, metrics, samples = evaluate_recipe(loaded, world_size(), step)
    return Evaluation(done, metrics, samples)


@contextmanager
def _session() -> Iterator[None]:
    """Set this process up as the command line does, and clean up at the end of the `with` block.

    Raises InputError outside the main thread, because signal handlers and Megatron's CPU mode need
    that thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise InputError("mrl: train and evaluate in the main thread, one call after the other")
    die_with_torchrun()
    hook = sys.excepthook  # torch puts another around it each time that it joins process groups
    with _one_thread():
        try:
            yield
        except BaseException:
            if world_size() == 1:  # with more ranks, this would wait for ranks that failed
                destroy_mesh()
            raise
        else:
            destroy_mesh()
        finally:
            if not dist.is_initialized():
                sys.excepthook = hook
            gc.collect()  # the policy is in reference cycles
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one CPU thread inside the `with` block, unless OMP_NUM_THREADS is set. A run
    inside the block may still choose another number of threads (mrl/system/threads.py). At the end
    of the block, the previous number of threads is restored."""
    before = torch.get_num_threads()
    changed = compute_with_one_thread()
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if changed:
            del os.environ["OMP_NUM_THREADS"], os.environ[MARK]


def _check_callbacks(callbacks: Sequence[Callback]) -> None:
    if not isinstance(callbacks, Sequence):
        raise InputError(f"callbacks: got {callbacks!r}, expected a list such as [MyCallback()]")
    for number, callback in enumerate(callbacks):
        for name in ("on_step", "on_evaluation"):
            if isinstance(callback, type) or not callable(getattr(callback, name, None)):
                raise InputError(
                    f"callbacks[{number}]: {callback!r} is not an object with a method {name}; derive "
                    "a class from mrl.Callback, and give an instance of it"
                )
