"""Give the device back to the rollout engine: weights, gradients and optimizer state to the host.

On a machine without CUDA there is one memory, and nothing moves. This has not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class HostOffload:
    """Moves what a policy keeps on `device` to pinned host memory and back, in place.

    Gradient buffers hold nothing between steps: they are freed and made again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host: dict[int, tuple[Tensor, Tensor]] = {}
        self._freed: list[tuple[Tensor, int]] = []

    def offload(self, chunks: list[Any], optimizer: Any) -> None:
        """Empty the device; a second call does nothing."""
        if self.device.type != "cuda" or self._host:
            return
        for tensor in _kept(chunks, optimizer):
            if tensor.device.type == "cuda" and tensor.untyped_storage().nbytes():
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host.copy_(tensor, non_blocking=True)
                self._host[id(tensor)] = (tensor, host)
        torch.cuda.synchronize()
        for tensor, host in self._host.values():
            tensor.data = host
        for buffer in _gradient_buffers(chunks):
            storage = buffer.grad_data.untyped_storage()
            self._freed.append((buffer.grad_data, storage.nbytes()))
            storage.resize_(0)
        torch.cuda.empty_cache()

    def onload(self) -> None:
        """Bring everything back; a second call does nothing."""
        for tensor, host in self._host.values():
            tensor.data = host.to(self.device, non_blocking=True)
        for grads, num_bytes in self._freed:
            grads.untyped_storage().resize_(num_bytes)
            grads.zero_()
        if self._host:
            torch.cuda.synchronize()
        self._host.clear()
        self._freed.clear()


def _kept(chunks: list[Any], optimizer: Any) -> Iterator[Tensor]:
    """Every tensor that must survive: parameters, fp32 main parameters, moments."""
    for chunk in chunks:
        yield from chunk.parameters()
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))


def _gradient_buffers(chunks: list[Any]) -> Iterator[Any]:
    for chunk in chunks:
        yield from chunk.buffers
        yield from chunk.expert_parallel_buffers
