"""The frozen reference model: this rank's shard of another set of weights, kept on the host.

There is no second model. For a pass, the reference weights are copied into the storages of the policy's
weights; afterwards the policy's weights are copied back, bit for bit. This takes two copies of the
weights on the host, one for the reference and one for the displaced policy, and none on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class HostCopy:
    """Host memory for copies of a list of tensors, in one buffer per dtype. The memory is pinned if
    a tensor is on a GPU."""

    def __init__(self, tensors: list[Tensor]) -> None:
        pinned = any(tensor.is_cuda for tensor in tensors)
        sizes: dict[torch.dtype, int] = {}
        for tensor in tensors:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
        self.buffers = {
            dtype: torch.empty(size, dtype=dtype, pin_memory=pinned)
            for dtype, size in sizes.items()
        }
        starts = dict.fromkeys(sizes, 0)
        self._views = []
        for tensor in tensors:
            start = starts[tensor.dtype]
            starts[tensor.dtype] = start + tensor.numel()
            self._views.append(
                self.buffers[tensor.dtype][start : starts[tensor.dtype]].view(tensor.shape)
            )

    def fits(self, tensors: list[Tensor]) -> bool:
        return [v.dtype for v in self._views] == [t.dtype for t in tensors]

    # On a GPU copies in both directions run in order on the current stream, so nothing has to wait.

    def take(self, tensors: list[Tensor]) -> None:
        """Copy the contents of `tensors` to the host."""
        for view, tensor in zip(self._views, tensors, strict=True):
            view.copy_(tensor, non_blocking=True)

    def put(self, tensors: list[Tensor]) -> None:
        """Copy the contents from the host to `tensors`, in place."""
        for view, tensor in zip(self._views, tensors, strict=True):
            tensor.copy_(view, non_blocking=True)


class ReferenceWeights:
    """A host copy of the weights that `tensors` returns when this object is made. The copy can
    replace the weights later."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        # Called each time: Megatron replaces the data of a half-precision expert bias by fp32.
        self._tensors = lambda: [tensor.detach() for tensor in tensors()]
        present = self._tensors()
        self._frozen = HostCopy(present)
        self._frozen.take(present)
        self._stash: HostCopy | None = None
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the caller may free the tensors' memory next

    def host_tensors(self) -> list[Tensor]:
        """Return all tensors that this object keeps on the host, for the memory ledger."""
        stash = self._stash.buffers.values() if self._stash else ()
        return [*self._frozen.buffers.values(), *stash]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context manager. Replaces the current weights with the reference weights, and restores the
        replaced weights when the `with` statement ends, even after an error."""
        with torch.no_grad():
            present = self._tensors()
            if self._stash is None or not self._stash.fits(present):
                self._stash = HostCopy(present)
            self._stash.take(present)
            self._frozen.put(present)
        try:
            yield
        finally:
            with torch.no_grad():
                self._stash.put(self._tensors())
