"""Record each collective of this rank in the rank's heartbeat page (`mrl.system.heartbeat`), for
the report about a rank that hangs.

The methods of torch's ProcessGroup are replaced, because every collective calls one of them. Replacing
the functions of torch.distributed would miss some calls, because Megatron keeps references to these
functions.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from mrl.system.heartbeat import note_collective, note_collective_end
from mrl.system.torch_names import TORCH

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
"""The methods of ProcessGroup that are replaced, by the name of the collective. A version of torch
may lack some of the methods."""


@contextmanager
def noting_collectives() -> Iterator[None]:
    """Record the collectives of this process in its heartbeat page during the block.

    A collective is recorded as over when `wait` has returned and the collective is done. On GPUs,
    torch's `wait` only makes the stream wait. So it can happen that the collective is not done when
    `wait` returns; then the collective is recorded as queued. Calls of `wait` in a thread that has
    begun no collective, such as a thread that sends weights, are ignored.
    """
    process_group, work = TORCH.take("ProcessGroup"), TORCH.take("Work")
    groups: dict[Any, bytes] = {}
    own = threading.local()
    with ExitStack() as undo:
        for name, methods in METHODS.items():
            for method in methods:
                if method in vars(process_group):
                    call = _replace(process_group, method, undo)
                    setattr(process_group, method, _noted(call, name.encode(), groups, own))
        work.wait = _noting_end(_replace(work, "wait", undo), own)
        yield


def _replace(owner: type, method: str, undo: ExitStack) -> Callable[..., Any]:
    """Return the method that the caller is about to replace. Closing `undo` restores the method.

    `undo` restores the entry of the class's `__dict__`, because the function that pybind11 returns
    for the attribute would not be bound to instances.
    """
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
