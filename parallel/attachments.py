"""What a model puts into the modules of its base, and can take out again: adapter, hooks, replays."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar


class Attachment(Protocol):
    """An `Attachment` is in the modules when it is made, until `detach`."""

    def attach(self) -> None: ...
    def detach(self) -> None: ...


Part = TypeVar("Part", bound=Attachment)


class Attachments:
    """These are all attachments of one model, in the order in which they were made."""

    def __init__(self) -> None:
        self._parts: list[Attachment] = []

    def add(self, part: Part) -> Part:
        """Note and return one that has just been made."""
        self._parts.append(part)
        return part

    def attach(self) -> None:
        """Put all back into the modules. Hooks run in the same order as before."""
        for part in self._parts:
            part.attach()

    def detach(self) -> None:
        """Take all out of the modules."""
        for part in reversed(self._parts):
            part.detach()


class GatherHooks:
    """The hooks of Megatron's DDP that wait for gathered weights, with `overlap_param_gather` alone."""

    def __init__(self, chunks: list[Any]) -> None:
        """`chunks`: wrapped, with their hooks on."""
        self._chunks = [chunk for chunk in chunks if chunk.use_forward_hook]

    def attach(self) -> None:
        for chunk in self._chunks:
            chunk.enable_forward_pre_hook()

    def detach(self) -> None:
        for chunk in self._chunks:
            chunk.disable_forward_pre_hook(param_sync=False)
