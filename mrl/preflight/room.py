"""Check that the disk of a run has space for two checkpoints: the newest and the one being written."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from mrl.errors import InputError
from mrl.planner.adapter import count_adapter
from mrl.planner.shape import read_shape
from mrl.planner.stages import Stage, stages
from mrl.preflight.plan import Plan
from mrl.system.disk import existing, free_bytes
from mrl.system.files import bytes_in_words
from parallel.checkpoint.manifest import Damaged, candidates, read_manifest
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from parallel.hf_tensors import HfTensors
from parallel.implementation import choose_dtype

MOMENT_BYTES = 4
"""Bytes per parameter of one moment. Adam has two; Muon, for the matrices that it updates, one."""
ONE_RANK = ParallelDims(world=1, tp=1, pp=1, vpp=1, cp=1, ep=1, etp=1)


def check_room(plan: Plan, warn: Callable[[str], None]) -> str:
    """Return in words how large a checkpoint is and how much space is free.

    The result is empty if the free space is unknown or the recipe writes no checkpoints. Quotas of
    the file system are not considered. Raises InputError if there is not enough space for two
    checkpoints, or for one more if the run folder contains any. Calls `warn(text)` if there is not
    enough space for `checkpoint.keep` + 1 checkpoints, including those that exist already.
    """
    recipe = plan.recipe
    root = Path(recipe.output_dir) / "checkpoints"
    free = free_bytes(root)
    if free is None or recipe.debug.rollout_only:
        return ""
    there = candidates(root)
    size = _size_of(there) or checkpoint_bytes(plan)
    about = "" if there else "about "
    needed = size * (1 if there else 2)
    what = f"a checkpoint takes {about}{bytes_in_words(size)}"
    left = f"{bytes_in_words(free)} are free in {existing(root)}"
    if free < needed:
        also = "; one exists already" if there else ""
        raise InputError(
            f"output_dir {recipe.output_dir}: {what}, and a run needs room for two (the newest and "
            f"the one being written{also}), {bytes_in_words(needed)} more; {left}; make room "
            "there, or put the run folder elsewhere"
        )
    keep = recipe.checkpoint.keep
    if free < size * (keep + 1 - min(len(there), keep)):
        warn(
            f"checkpoint.keep={keep}: {what}, {left}, which is too little for {keep} and another one"
        )
    return f"{what}; {left}"


def checkpoint_bytes(plan: Plan) -> int:
    """Estimate the bytes of a checkpoint.

    A checkpoint holds the weights of the policy (or only of its adapter) and of the critic, and the
    optimizer's moments for these weights. If the weights are not float32, it also holds a float32 copy
    of them (the optimizer's main parameters). Of weights that are never trained, such as those of
    indexers, it holds neither.
    """
    dtype = choose_dtype(plan.recipe.model.dtype)
    state = 2 * MOMENT_BYTES + (0 if dtype == torch.float32 else 4)
    each = dtype.itemsize + state
    if plan.adapter:  # has no Muon
        critic = _num_parameters(plan.critic) if plan.critic else 0
        return (count_adapter(plan.model, plan.adapter).num_parameters + critic) * each
    models = [plan.model, *([plan.critic] if plan.critic else [])]
    total = each * sum(map(_num_parameters, models))
    for stage in map(_whole, models):
        total -= state * stage.frozen
        if plan.recipe.optimizer.name == "muon":
            total -= MOMENT_BYTES * sum(part.num for part in stage.trained if part.is_muons)
    return total


def _whole(model: HfModel) -> Stage:
    """Return all layers of a model as one pipeline stage on one rank."""
    (stage,) = stages(read_shape(model.config, model.architecture), ONE_RANK)
    return stage


def _num_parameters(model: HfModel) -> int:
    """Return the number of elements of the weights that are read: without those that
    `Architecture.unread` names, and without copies for MTP layers."""
    unread, mtp = tuple(model.architecture.unread(model.config)), model.architecture.mtp
    copies = mtp.copies(model.config) if mtp is not None else {}
    with HfTensors(model) as tensors:
        read = (n for n in tensors.names if not n.startswith(unread) and n not in copies)
        return sum(math.prod(tensors.shape(name)) for name in read)


def _size_of(folders: list[Path]) -> int:
    """Return the bytes of the newest checkpoint whose manifest can be read; 0 if none can be read."""
    for folder in folders:
        try:
            return sum(file["bytes"] for file in read_manifest(folder)["files"].values())
        except (Damaged, InputError, OSError):
            continue
    return 0
