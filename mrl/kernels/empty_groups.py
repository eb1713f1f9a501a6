"""`mrl::zero_empty_groups_`, which zeroes the results that CUDA's grouped matrix product leaves out.

A grouped product that sums over the rows of each group computes, for example, the gradient of
expert weights. Its result for a group without rows should be zero, but CUDA's grouped product does
not write this part of the output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.kernels import backend


def zero_empty_groups_(values: Tensor, ends: Tensor) -> Tensor:
    """Zero the groups of `values` that have no rows, in place, and return `values`.

    Groups with rows are neither read nor written. The call does not wait for the device.

    Args:
        values: contiguous [E, ...] of any dtype, one part per group.
        ends: i32[E], the end (exclusive) of each group's rows. The first group begins at row 0, and
            every other group where the group before it ends.

    Raises:
        ValueError: `values` is not contiguous, or `ends` has the wrong shape, dtype or device.
    """
    torch.ops.mrl.zero_empty_groups_(values, ends)
    return values


def _check(values: Tensor, ends: Tensor) -> None:
    if values.dim() < 1 or not values.is_contiguous():
        raise ValueError(
            f"values: got shape {list(values.shape)} with strides {list(values.stride())}, expected a "
            "contiguous tensor [E, ...]"
        )
    num_groups = values.shape[0]
    legend = f"E = {num_groups} groups"
    backend.check_tensor("ends", ends, (num_groups,), (torch.int32,), values.device, legend)


torch.library.define("mrl::zero_empty_groups_", "(Tensor(a!) values, Tensor ends) -> ()")


@torch.library.impl("mrl::zero_empty_groups_", ("cpu", "cuda"))
def _zero_empty_groups(values: Tensor, ends: Tensor) -> None:
    _check(values, ends)
    num_groups = values.shape[0]
    backend.run(
        "zero_empty_groups",
        values.device,
        values=values,
        ends=ends.contiguous(),
        num_groups=num_groups,
        group_bytes=values.nbytes // max(1, num_groups),
    )


@torch.library.register_fake("mrl::zero_empty_groups_")
def _zero_empty_groups_fake(values: Tensor, ends: Tensor) -> None:
    _check(values, ends)
