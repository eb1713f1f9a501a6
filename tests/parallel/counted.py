"""Count what the real torch.distributed collectives send, and what a real forward keeps."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

OBJECT_COLLECTIVES = ("all_gather_object", "broadcast_object_list", "gather_object",
                      "scatter_object_list")  # fmt: skip
"""They travel by gloo on GPU machines too."""


class SentBytes(TorchDispatchMode):
    """Bytes that this rank sends in floating-point tensors, by the convention of `communication`."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0
        self.groups: set[tuple[str, int]] = set()
        """(Megatron's description, size) of every group that sent a tensor: on GPUs, a communicator."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func.name().split("::")[1]
            self.total += _sent(name, args)
            if name != "barrier" and not any(_locals(function) for function in OBJECT_COLLECTIVES):
                boxed = next(a for a in args if isinstance(a, torch.ScriptObject))
                group = ProcessGroup.unbox(boxed)
                self.groups.add((group.group_desc, group.size()))
        return func(*args, **(kwargs or {}))


def _sent(name: str, args: tuple) -> float:
    group = next((a for a in args if isinstance(a, torch.ScriptObject)), None)
    if group is None or name in ("recv_", "barrier") or _locals("broadcast_object_list"):
        return 0.0  # what is pickled are names and shapes
    size = ProcessGroup.unbox(group).size()
    ring = (size - 1) / size
    # gloo has no uneven gather and scatter: what parallel.cpu_mode sends instead is padded, or an
    # all-reduce. Counted is what it stands for, and what NCCL sends: the rows that there are.
    for stand_in in ("_gather_uneven", "_reduce_scatter_uneven"):
        if found := _locals(stand_in):
            row = found["values"][:1].numel() if len(found["values"]) else 0
            width = row or args[1][0][:1].numel()
            return ring * sum(found["sizes"]) * width * found["values"].element_size()
    if name in ("_allgather_base_", "_reduce_scatter_base_"):
        return ring * max(num_bytes([args[0]]), num_bytes([args[1]]))
    if name in ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"):
        return ring * max(num_bytes(args[0]), num_bytes(args[1]))
    if name == "allgather_":
        return ring * sum(num_bytes(parts) for parts in args[0])
    if name in ("alltoall_base_",):
        return ring * num_bytes([args[1]])
    if name.startswith("allreduce"):
        return 2 * ring * num_bytes(args[0])
    if name == "send":
        return num_bytes(args[0])
    if name == "broadcast_":  # counted where it arrives
        is_root = ProcessGroup.unbox(group).rank() == args[2]
        return 0.0 if is_root else sum(t.numel() * t.element_size() for t in args[0])
    raise AssertionError(f"no rule for the collective {name}")


def _locals(function: str) -> dict[str, Any] | None:
    """The variables of the nearest caller of that name; None where nobody of that name calls."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return None if frame is None else frame.f_locals


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Count floating-point vectors, masks and the keys that indexers chose (i32 [rows, K]), but no
    token counts, shapes, losses and norms."""
    kept = [
        t
        for t in tensors
        if (t.numel() > 1 and (t.is_floating_point() or t.dtype is torch.bool))
        or (t.dtype is torch.int32 and t.dim() == 2)
    ]
    return sum(t.numel() * t.element_size() for t in kept)


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
