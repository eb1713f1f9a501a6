"""The torch op `mrl::zero_empty_groups_` zeroes what a grouped product leaves undefined.

Where the sums of a product run over the rows of each group, such as the gradients of experts' weights,
the result of a group without rows is zero, and CUDA's grouped product does not write it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.kernels import backend


def zero_empty_groups_(values: Tensor, ends: Tensor) -> Tensor:
    """Zero the groups of `values` that have no rows, whatever they held; return `values`.

    Groups with rows are neither read nor written, and nothing waits for the device.

    Args:
        values: contiguous [E, ...] of any dtype, one part a group.
        ends: i32[E], where the rows of each group end; they begin where those of the group before end,
            the first ones at 0.

    Raises:
        ValueError: `values` that are not contiguous, or `ends` of another shape, type or device.
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
