"""Checks the weights of a model folder: files, names, shapes, types, and that numbers are finite."""

from __future__ import annotations

from collections.abc import Collection

from parallel.expected_tensors import check_tensors
from parallel.finite_tensors import check_finite_tensors
from parallel.hf_config import HfModel
from parallel.hf_tensors import HfTensors, check_names, check_sizes


def check_weights(model: HfModel, *, deep: bool, may_lack: Collection[str] = ()) -> None:
    """Read the headers of all files and a sample of the numbers; `deep`: every number.

    `may_lack`: tensors that the folder need not have; it may then have others, too, as a critic's may.
    Raises InputError with the first thing that is wrong.
    """
    with HfTensors(model) as tensors:
        if not may_lack:
            check_names(model, tensors.names)
        check_sizes(model, tensors)
        check_tensors(model, tensors, may_lack)
        check_finite_tensors(model, tensors, whole=deep)
