"""This module writes each collective of this rank into its page, for the report of a rank that hangs.

The methods of torch's ProcessGroup are replaced for that, through which every call goes: Megatron keeps
references to functions of torch.distributed, so that replacing these would miss some.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch._C import _distributed_c10d as c10d

from mrl.system.heartbeat import note_collective, note_collective_end

METHODS = {
    "all_reduce": ("allreduce", "allreduce_coalesced"),
    "all_gather": (
        *("allgather", "_allgather_base", "allgather_coalesced", "all_gather_single"),
        *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    ),
    "reduce_scatter": (
        *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
        *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    ),
    "all_to_all": ("alltoall", "alltoall_base", "all_to_all_single"),
    "broadcast": ("broadcast",),
    "reduce": ("reduce",),
    "gather": ("gather",),
    "scatter": ("scatter",),
    "barrier": ("barrier", "monitored_barrier"),
    "send": ("send",),
    "recv": ("recv", "recv_anysource"),
}
"""The methods of ProcessGroup by the name of the collective; a version of torch has some of them."""


@contextmanager
def noting_collectives() -> Iterator[None]:
    """Note the collectives of this process in its page during the block.

    In the page a collective is over when somebody has waited for it and it is done. On GPUs torch's
    `wait` only lets the stream wait: what the device has not done by then is noted as queued. A thread
    that has begun no collective, such as one that sends weights, ends none.
    """
    groups: dict[Any, bytes] = {}
    own = threading.local()
    with ExitStack() as undo:
        for name, methods in METHODS.items():
            for method in methods:
                if method in vars(c10d.ProcessGroup):
                    call = _replace(c10d.ProcessGroup, method, undo)
                    setattr(c10d.ProcessGroup, method, _noted(call, name.encode(), groups, own))
        wait = _replace(c10d.Work, "wait", undo)
        setattr(c10d.Work, "wait", _noting_end(wait, own))  # noqa: B010, as the stub of torch forbids it
        yield


def _replace(owner: type, method: str, undo: ExitStack) -> Callable[..., Any]:
    """Return the method, which `undo` puts back: what the class holds, not what it gives out, as
    pybind11 gives out a function that would not be bound to an object any more."""
    undo.callback(setattr, owner, method, vars(owner)[method])
    return getattr(owner, method)


def _noted(
    call: Callable[..., Any], name: bytes, groups: dict[Any, bytes], own: threading.local
) -> Callable[..., Any]:
    @functools.wraps(call)
    def noted(self: Any, *args: Any, **options: Any) -> Any:
        group = groups.get(self)
        if group is None:
            text = f"{self.group_desc or self.group_name} of {self.size()} ranks"
            group = groups[self] = text.encode(errors="replace")
        own.has_begun = True
        note_collective(name, group)
        return call(self, *args, **options)

    return noted


def _noting_end(wait: Callable[..., Any], own: threading.local) -> Callable[..., Any]:
    @functools.wraps(wait)
    def waited(self: Any, *args: Any, **options: Any) -> Any:
        result = wait(self, *args, **options)
        if getattr(own, "has_begun", False):
            note_collective_end(is_queued=not self.is_completed())
        return result

    return waited
