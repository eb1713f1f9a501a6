"""Checkpoints of the same layout: written beside, checked, renamed; resumed bit for bit.

`checkpoints/iter_0000010/` holds `rank_00000.pt` of every rank (weights, optimizer, schedule, random
states) and `manifest.json` (layout, versions, the trainer's own state, SHA-256 of every file). The
folder appears under its name only when it is whole; `latest_checkpointed_iteration.txt` names it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mrl.errors import InputError
from parallel.dims import ParallelDims
from parallel.groups import Groups

LATEST = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
FORMAT = 1


def folder_name(step: int) -> str:
    return f"iter_{step:07d}"


def save_checkpoint(
    root: Path, step: int, state: dict[str, Any], trainer: dict[str, Any], groups: Groups, keep: int
) -> Path:
    """Write this rank's `state` and, once, the JSON-able `trainer` state. A collective.

    Atomic: a crash at any moment leaves the previous checkpoint untouched and named by LATEST. The
    newest `keep` checkpoints stay.
    """
    final = root / folder_name(step)
    partial = root / f".{final.name}.partial"
    if groups.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    file = partial / f"rank_{groups.rank:05d}.pt"
    with file.open("wb") as stream:
        torch.save({**state, "random": _random_state(groups)}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    digests: list = [None] * groups.dims.world
    dist.all_gather_object(digests, (file.name, _sha256(file)))
    if groups.rank == 0:
        manifest = {
            "format": FORMAT,
            "step": step,
            "layout": dataclasses.asdict(groups.dims),
            "torch": torch.__version__,
            "trainer": trainer,
            "sha256": dict(digests),
        }
        _write_durably(partial / MANIFEST, json.dumps(manifest, indent=1))
        replaced = root / f".{final.name}.replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():  # of a run that was set back
            final.rename(replaced)
        partial.rename(final)
        _write_durably(root / LATEST, f"{step}\n")
        shutil.rmtree(replaced, ignore_errors=True)
        _prune(root, step, keep)
    dist.barrier()
    return final


def latest_step(root: Path) -> int | None:
    """The step of the newest checkpoint, or None where there is none yet."""
    file = root / LATEST
    if not file.exists():
        return None
    text = file.read_text().strip()
    if not text.isdigit():
        raise InputError(f"{file}: expected a step number, got {text!r}")
    return int(text)


def read_manifest(root: Path, step: int) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises InputError when it is missing or damaged."""
    file = root / folder_name(step) / MANIFEST
    try:
        return json.loads(file.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise InputError(f"checkpoint {file}: {error}") from None


def check_layout(root: Path, step: int, dims: ParallelDims) -> None:
    """Raise InputError where a checkpoint was written by another layout."""
    written, ours = read_manifest(root, step)["layout"], dataclasses.asdict(dims)
    if written != ours:
        raise InputError(
            f"checkpoint {root / folder_name(step)} was written by the layout {written}, this run "
            f"has {ours}; start it with the same parallel sizes, or with another output_dir"
        )


def load_checkpoint(root: Path, step: int, groups: Groups) -> tuple[dict[str, Any], dict[str, Any]]:
    """(this rank's state, trainer state) of a checkpoint; also restores the random states.

    Raises InputError for another layout, a missing or a damaged file.
    """
    manifest = read_manifest(root, step)
    folder = root / folder_name(step)
    check_layout(root, step, groups.dims)
    file = folder / f"rank_{groups.rank:05d}.pt"
    if not file.exists():
        raise InputError(f"checkpoint {folder}: {file.name} is missing")
    if _sha256(file) != manifest["sha256"][file.name]:
        raise InputError(
            f"checkpoint {file} is damaged (SHA-256 differs); put an older step into {root / LATEST}"
        )
    state = torch.load(file, map_location="cpu", weights_only=True)
    _restore_random_state(state.pop("random"), groups)
    return state, manifest["trainer"]


def _random_state(groups: Groups) -> dict[str, Any]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker: Any = get_cuda_rng_tracker()
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    return {
        "python": [version, list(words), gauss],
        "numpy": json.dumps(numpy_state, default=lambda array: array.tolist()),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if groups.device.type == "cuda" else None,
        "tracker": tracker.get_states(),
    }


def _restore_random_state(state: dict[str, Any], groups: Groups) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    numpy_state = json.loads(state["numpy"])
    numpy_state["state"]["key"] = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state(numpy_state)
    torch.set_rng_state(state["torch"].cpu())
    if groups.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu())
    tracker: Any = get_cuda_rng_tracker()
    tracker.set_states({k: v.cpu() for k, v in state["tracker"].items()})


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_durably(file: Path, text: str) -> None:
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _prune(root: Path, step: int, keep: int) -> None:
    """Remove all but the newest `keep` up to `step`; later ones belong to a run that was set back."""
    upto = sorted(f for f in root.glob("iter_*") if f.name <= folder_name(step))
    for folder in upto[:-keep]:
        shutil.rmtree(folder)
