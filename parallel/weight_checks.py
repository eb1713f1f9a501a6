"""Check the weights in a model folder: files, names, shapes, dtypes and finite values."""

from __future__ import annotations

from collections.abc import Collection

from parallel.expected_tensors import check_tensors
from parallel.hf_config import HfModel
from parallel.hf_tensors import HfTensors, check_finite_tensors, check_names, check_sizes


def check_weights(model: HfModel, *, deep: bool, may_lack: Collection[str] = ()) -> None:
    """Check the headers of all files, and that the weights are finite.

    Only a sample of the weights is tested for finite values, or all of them if `deep`. `may_lack`
    has the names of tensors that a critic's folder may lack. If `may_lack` is not empty, the folder
    may also have unknown tensors. Raises InputError for the first fault.
    """
    with HfTensors(model) as tensors:
        if not may_lack:
            check_names(model, tensors.names)
        check_sizes(model, tensors)
        check_tensors(model, tensors, may_lack)
        check_finite_tensors(model, tensors, whole=deep)
