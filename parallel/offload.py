"""Give the device back to the rollout engine: weights, gradients and optimizer state to the host.

Two stages, because the engine needs room for its weights while the trainer still holds the ones to
send: optimizer state and gradients leave before the sync, parameters after it.

Storages are emptied and filled in place. Assigning to `parameter.data` would move the bytes too, but
across devices it also replaces the parameter's gradient accumulator, on which Megatron's DDP hangs
its hooks: training would go on with gradients of zero, silently.

None of this has run on a GPU yet; that nothing is lost or unhooked is tested on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage


class HostOffload:
    """Empties the storages of a policy's tensors into host memory and back, in place.

    Gradient buffers hold nothing between steps: they are freed and made again.
    """

    def __init__(self) -> None:
        self._moved: list[tuple[UntypedStorage, Tensor]] = []
        self._freed: list[tuple[Tensor, int]] = []

    def offload_optimizer(self, chunks: list[Any], optimizer: Any) -> None:
        """Moments, fp32 main parameters and gradients; what has left already is left alone."""
        parameters = {id(p) for chunk in chunks for p in chunk.parameters()}
        self._move(t for t in _optimizer_tensors(optimizer) if id(t) not in parameters)
        for buffer in _gradient_buffers(chunks):
            storage = buffer.grad_data.untyped_storage()
            if storage.nbytes():
                self._freed.append((buffer.grad_data, storage.nbytes()))
                storage.resize_(0)

    def offload_parameters(self, chunks: list[Any]) -> None:
        """The weights that train; what has left already is left alone."""
        self._move(parameter for chunk in chunks for parameter in chunk.parameters())

    def onload(self) -> None:
        """Everything back; does nothing where nothing has left."""
        for storage, host in self._moved:
            storage.resize_(host.numel())
            storage.copy_(host.untyped_storage())
        for grads, num_bytes in self._freed:
            grads.untyped_storage().resize_(num_bytes)
            grads.zero_()
        self._moved.clear()
        self._freed.clear()

    def _move(self, tensors: Iterable[Tensor]) -> None:
        pinned = torch.cuda.is_available()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not storage.nbytes() or (pinned and tensor.device.type == "cpu"):
                continue
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            host.untyped_storage().copy_(storage)
            self._moved.append((storage, host))
            storage.resize_(0)
        if pinned:
            torch.cuda.empty_cache()


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
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
