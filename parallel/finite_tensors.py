"""Looks for NaN and infinity in the tensors of a model folder: a sample of each, or every number.

A part of a file that was never written, or was written by a run that had diverged, has them in long
stretches, which a few rows of many tensors find.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mrl.errors import InputError
from parallel.hf_config import HfModel
from parallel.hf_tensors import HfTensors

MAX_SAMPLED = 400
"""How many of the experts' tensors, and of the others, are sampled: the disk may be slow."""
NUM_PARTS = 3
"""Parts of a sampled tensor: its first rows, its middle ones and its last ones."""
PART_ELEMENTS = 4096
WHOLE_ELEMENTS = 1 << 24
"""Elements that are in memory at once where everything is read."""


def check_finite_tensors(model: HfModel, tensors: HfTensors, *, whole: bool = False) -> None:
    """Raise InputError that names the first tensor in which a NaN or an infinity was found.

    `whole`: read every number, which takes as long as the disk does; otherwise a sample.
    """
    for name in _chosen(sorted(tensors.names), whole=whole):
        for part in _parts(tensors, name, whole=whole):
            if part.is_floating_point() and not bool(part.isfinite().all()):
                number = part[~part.isfinite()][0].item()
                raise InputError(
                    f"model.path: {model.path}: {name} holds {number}, expected finite numbers; "
                    "download the weights again, or take an earlier checkpoint (mrl check --deep reads "
                    "every number)"
                )


def _chosen(names: list[str], *, whole: bool) -> list[str]:
    """Return the tensors to look at: of the experts' and of all others each a part, evenly spaced."""
    if whole:
        return names
    kinds = [[n for n in names if (".experts." in n) == is_expert] for is_expert in (False, True)]
    return [n for kind in kinds for n in kind[:: max(1, -(-len(kind) // MAX_SAMPLED))]]


def _parts(tensors: HfTensors, name: str, *, whole: bool) -> Iterator[Tensor]:
    """Yield rows of a tensor; all of them, or those at its start, in its middle and at its end."""
    shape = tensors.shape(name)
    if not shape or 0 in shape:
        yield tensors[name]
        return
    row = max(1, torch.Size(shape).numel() // shape[0])
    if whole:
        step = max(1, WHOLE_ELEMENTS // row)
        starts = range(0, shape[0], step)
    else:
        step = max(1, PART_ELEMENTS // row)
        last = max(0, shape[0] - step)
        starts = sorted({last * part // (NUM_PARTS - 1) for part in range(NUM_PARTS)})
    for start in starts:
        yield tensors.rows(name, start, min(start + step, shape[0]))
