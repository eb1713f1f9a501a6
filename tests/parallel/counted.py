"""Count what the real torch.distributed collectives send, and what a real forward keeps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode


class SentBytes(TorchDispatchMode):
    """Bytes that this rank sends in floating-point tensors, by the convention of `communication`."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self.total += _sent(func.name().split("::")[1], args)
        return func(*args, **(kwargs or {}))


def _sent(name: str, args: tuple) -> float:
    group = next((a for a in args if isinstance(a, torch.ScriptObject)), None)
    if group is None or name in ("recv_", "barrier"):
        return 0.0
    size = ProcessGroup.unbox(group).size()
    ring = (size - 1) / size
    if name in ("_allgather_base_", "_reduce_scatter_base_"):
        return ring * max(num_bytes([args[0]]), num_bytes([args[1]]))
    if name in ("alltoall_base_",):
        return ring * num_bytes([args[1]])
    if name.startswith("allreduce"):
        return 2 * ring * num_bytes(args[0])
    if name == "send":
        return num_bytes(args[0])
    raise AssertionError(f"no rule for the collective {name}")


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Of floating-point vectors: token counts, shapes, losses and norms are not counted."""
    floats = [t for t in tensors if t.is_floating_point() and t.numel() > 1]
    return sum(t.numel() * t.element_size() for t in floats)


class KeptBytes:
    """Bytes of the distinct storages that a forward saves for its backward, without `known` ones."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {t.untyped_storage().data_ptr() for t in known}
        self._kept: dict[int, Tensor] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda t: t)

    def _keep(self, tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in self._known:
            self._kept[place] = tensor  # alive, so that its place is not used again
        return tensor

    @property
    def total(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self._kept.values())
