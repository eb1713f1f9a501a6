"""This module holds the heartbeat of a rank: what it does now, in a page of memory that others read.

A rank marks its phases with `phase(name)` and its progress within one with `beat()`. Both write some
numbers into a memfd and do nothing where no page is open, so that any room may call them. Nothing here
waits, and no thread is needed: the monitor (mrl/watch/) reads the page from outside, also while
the rank hangs or is stopped.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

PHASES = (
    *("start", "load", "sync", "rollout", "score", "logprobs", "train", "save", "evaluate", "log"),
)
"""What a rank may be doing. `start` is everything before the first step without a name of its own,
`log` everything between the phases of a step: metrics, trackers, callbacks.

A name may have a part after a colon, as in `load:checkpoint`: another kind of work, whose times the
watchdog learns separately. Limits in a recipe are set for the name before the colon."""
SUPERVISE = "supervise"
"""The phase of a rank that leads engines: it goes through none of the others."""
LEFT = "left"
"""What the page of a rank says that is through with the run."""
_FORM = struct.Struct("=32sqqq64s")
_COLLECTIVE = struct.Struct("=16s64sqq")
_COLLECTIVE_AT = 128
_END = struct.Struct("=q")
_END_AT = _COLLECTIVE_AT + _COLLECTIVE.size - _END.size
_OVER, _QUEUED = 1, 2
"""How a collective ended; 0 until somebody has waited for it."""
_WRITER = struct.Struct("=q")
_WRITER_AT = 256
SIZE = mmap.PAGESIZE
_STRIDE = 1000
"""Positions that belong to the work for one tenant: more than it passes phases."""


class Pulse(NamedTuple):
    """A `Pulse` is what a page says."""

    phase: str
    step: int
    """The number of the step, from 0; -1 before the first."""
    position: int
    """How many phases the rank has begun and left. All ranks pass the same ones, so that the lowest
    number is the rank that is furthest behind."""
    beats: int
    """How often it has shown progress."""
    tenant: str = ""
    """Whom a service works for now; the step is that tenant's. Empty where it is nobody's work."""

    @property
    def where(self) -> str:
        """The phase, the step and the tenant in words."""
        of_tenant = f" of tenant {self.tenant}" if self.tenant else ""
        return f"{self.phase} of step {max(self.step, 0)}{of_tenant}"


class Collective(NamedTuple):
    """A `Collective` is the last one that a rank has begun."""

    name: str = ""
    """Empty before the first one."""
    group: str = ""
    """The name that torch or Megatron gave to its process group, and the number of its ranks."""
    number: int = 0
    """How many the rank has begun."""
    is_over: bool = True
    is_queued: bool = False
    """The rank has waited for it, and a GPU had not done it by then: the rank goes on, and nothing that
    it shows says whether the collective is over."""

    def text(self) -> str:
        """Say it for a report; empty where there was none."""
        if not self.name:
            return ""
        over = "over" if self.is_over else "queued on the GPU" if self.is_queued else "not over"
        return f"{self.name} over {self.group} (number {self.number}, {over})"


class _Page:
    """The page of this process."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("mrl-heartbeat")
        os.ftruncate(self.fd, SIZE)
        self.memory = mmap.mmap(self.fd, SIZE)
        self.phase, self.outside, self.step, self.position, self.beats = "start", "start", -1, 0, 0
        self.tenant = ""
        self.collectives = 0
        self.write()

    def write(self) -> None:
        name, tenant = self.phase.encode(), self.tenant.encode()
        _FORM.pack_into(self.memory, 0, name, self.step, self.position, self.beats, tenant)

    def go_to(self, phase: str) -> None:
        self.phase = phase
        self.position += 1
        self.beats += 1
        self.write()


_pages: list[_Page] = []
"""The page of this process, where one is open."""


def open_page() -> str:
    """Make this process's page and return the path by which processes of this user can read it."""
    close_page()
    _pages.append(_Page())
    return f"/proc/{os.getpid()}/fd/{_pages[0].fd}"


def leave() -> None:
    """Say that this rank is through with the run, so that its end is no fault."""
    for page in _pages:
        page.go_to(LEFT)


def close_page() -> None:
    """Let go of the page; does nothing where there is none."""
    for page in _pages:
        page.memory.close()
        os.close(page.fd)
    _pages.clear()


def num_beats() -> int:
    """Return how often this process has shown progress."""
    return sum(page.beats for page in _pages)


def read_page(memory: mmap.mmap) -> Pulse:
    """Return what a page says that was mapped with `SIZE` bytes."""
    name, step, position, beats, tenant = _FORM.unpack_from(memory, 0)
    return Pulse(_text(name), step, position, beats, _text(tenant))


def read_collective(memory: mmap.mmap) -> Collective:
    """Return the last collective that a page names."""
    name, group, number, end = _COLLECTIVE.unpack_from(memory, _COLLECTIVE_AT)
    return Collective(_text(name), _text(group), number, end == _OVER, end == _QUEUED)


def read_writer(memory: mmap.mmap) -> int:
    """Return the number of the process that writes for this rank; 0 if there was none."""
    return _WRITER.unpack_from(memory, _WRITER_AT)[0]


def register_writer() -> None:
    """Record, in a fork of a rank, that this process writes for it: the bytes that it reads and writes
    count as progress of the rank while it loads or saves."""
    for page in _pages:
        _WRITER.pack_into(page.memory, _WRITER_AT, os.getpid())


def kind_of(phase: str) -> str:
    """Return the name of a phase without the part after the colon."""
    return phase.partition(":")[0]


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def note_collective(name: bytes, group: bytes) -> None:
    """Say that this rank begins a collective over a group; what is too long is cut."""
    for page in _pages:
        page.collectives += 1
        _COLLECTIVE.pack_into(page.memory, _COLLECTIVE_AT, name, group, page.collectives, 0)


def note_collective_end(*, is_queued: bool = False) -> None:
    """Say that this rank has waited for the last collective; `is_queued`: a GPU has still to do it."""
    for page in _pages:
        _END.pack_into(page.memory, _END_AT, _QUEUED if is_queued else _OVER)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark what this rank does in the block; as a decorator, in each call of the function.

    Every rank must come through the same phases in the same order, also where it has nothing to do. In
    a phase within a phase the inner one counts, but `save` within `save:snapshot` stays the latter.
    """
    before = ""
    for page in _pages:
        before = page.phase
        page.go_to(before if kind_of(before) == name else name)
    try:
        yield
    finally:
        for page in _pages:
            page.go_to(page.outside if before in ("", "start", "log") else before)


@contextmanager
def working_for(tenant: str, step: int) -> Iterator[None]:
    """Mark that this rank works for one tenant of a service in the block, which is at `step`.

    The ranks have the same position again when all have left the block, also where it raised on some
    of them only, and these came through fewer phases. An error that leaves it gets the attributes
    `tenant` and `step`, for the report.
    """
    before = [(page, page.step, page.position) for page in _pages]
    for page in _pages:
        page.tenant, page.step = tenant, step
        page.go_to(page.phase)
    try:
        yield
    except Exception as error:
        setattr(error, "tenant", tenant)  # noqa: B010
        setattr(error, "step", step)  # noqa: B010
        raise
    finally:
        for page, step_before, position in before:
            page.tenant, page.step, page.position = "", step_before, position + _STRIDE
            page.go_to(page.phase)


def begin_step(step: int) -> None:
    """Say which step this rank is in."""
    for page in _pages:
        page.step, page.outside = step, "log"
        page.go_to("log")


def supervise() -> None:
    """Record that this rank leads engines from now on; it sends heartbeats whatever its engines do."""
    for page in _pages:
        page.phase = page.outside = SUPERVISE
        page.write()


def beat() -> None:
    """Record progress of this rank: a micro-batch, a finished sample, a bucket or a tensor of weights.
    Bytes that its main thread reads or writes in `load` and `save` count without it."""
    for page in _pages:
        page.beats += 1
        page.write()
