"""The heartbeat of a rank: what it is doing now, in a page of memory that other processes read.

A rank marks its phases with `phase(name)` and its progress within a phase with `beat()`. These
functions write a few numbers to the page, which is a memfd. They do nothing if no page is open, so
any package may call them. They never wait and need no thread. The monitor (mrl/watch/) reads the
page from another process, even while the rank hangs or is suspended.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

PHASES = (
    *("start", "load", "sync", "rollout", "score", "logprobs", "train", "save", "evaluate", "log"),
)
"""Names of the phases of a rank. A rank that is in no other phase is in `start` before the first step,
and in `log` from the first step on. In `log` it writes metrics and calls trackers and callbacks.

A name may have a suffix after a colon, as in `load:checkpoint`. The watchdog then learns separately
how long this kind of work takes. Time limits in a recipe apply to the name before the colon.
"""
SUPERVISE = "supervise"
"""The only phase of a rollout rank once it supervises an engine."""
LEFT = "left"
"""The phase of a rank that has finished the run."""
_FORM = struct.Struct("=32sqqq64s")
_COLLECTIVE = struct.Struct("=16s64sqq")
_COLLECTIVE_AT = 128
_END = struct.Struct("=q")
_END_AT = _COLLECTIVE_AT + _COLLECTIVE.size - _END.size
_OVER, _QUEUED = 1, 2
"""How the rank's wait for a collective ended: the collective was complete, or still queued on a
GPU. The value is 0 until the wait ends."""
_WRITER = struct.Struct("=q")
_WRITER_AT = 256
_SAMPLES = struct.Struct("=qq")
_SAMPLES_AT = 272
SIZE = mmap.PAGESIZE
_STRIDE = 1000
"""In a service, the amount that a step of one tenant adds to a rank's position (`Pulse.position`),
however many phases the step had. It is larger than the number of phases of any step."""


class Pulse(NamedTuple):
    """The phase and the progress of a rank, as read from its page."""

    phase: str
    step: int
    """0-based number of the step; -1 before the first step."""
    position: int
    """A number that grows whenever the rank begins or leaves a phase. All ranks go through the same
    phases, so the rank with the lowest position is furthest behind."""
    beats: int
    """Number of times that the rank has recorded progress."""
    tenant: str = ""
    """In a service, the tenant whose step the rank works on; empty if it works for no tenant."""

    @property
    def where(self) -> str:
        """The phase, the step and the tenant in words."""
        of_tenant = f" of tenant {self.tenant}" if self.tenant else ""
        return f"{self.phase} of step {max(self.step, 0)}{of_tenant}"


class Collective(NamedTuple):
    """The last collective that a rank has begun."""

    name: str = ""
    """The name of the collective operation; empty if the rank has begun no collective yet."""
    group: str = ""
    """The collective's process group in words: the name that torch or Megatron gave to the group,
    and the number of its ranks, such as `TENSOR_MODEL_PARALLEL_GROUP of 2 ranks`."""
    number: int = 0
    """Number of collectives that the rank has begun."""
    is_over: bool = True
    is_queued: bool = False
    """Whether the rank's wait ended while the collective was still queued on a GPU. The rank then
    continues, and the page does not show when the GPU completes the collective."""

    def text(self) -> str:
        """Describe the collective for a report; empty before the first collective."""
        if not self.name:
            return ""
        over = "over" if self.is_over else "queued on the GPU" if self.is_queued else "not over"
        return f"{self.name} over {self.group} (number {self.number}, {over})"


class _Page:
    """The heartbeat page of this process, which is in a memfd."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("mrl-heartbeat")
        os.ftruncate(self.fd, SIZE)
        self.memory = mmap.mmap(self.fd, SIZE)
        self.phase, self.outside, self.step, self.position, self.beats = "start", "start", -1, 0, 0
        self.tenant = ""
        self.collectives = 0
        self.finished, self.wanted = 0, 0
        self.counting = threading.Lock()
        self.write()

    def count(self, *, finished: int = 0, wanted: int = 0) -> None:
        """Add to the numbers of samples. Threads of several tenants or leases may do so at once."""
        with self.counting:
            self.finished, self.wanted = self.finished + finished, self.wanted + wanted
            _SAMPLES.pack_into(self.memory, _SAMPLES_AT, self.finished, self.wanted)

    def write(self) -> None:
        name, tenant = self.phase.encode(), self.tenant.encode()
        _FORM.pack_into(self.memory, 0, name, self.step, self.position, self.beats, tenant)

    def go_to(self, phase: str) -> None:
        self.phase = phase
        self.position += 1
        self.beats += 1
        self.write()


_pages: list[_Page] = []
"""Contains this process's page, if it is open."""


def open_page() -> str:
    """Create this process's page. Returns the path at which processes of this user can read it."""
    close_page()
    _pages.append(_Page())
    return f"/proc/{os.getpid()}/fd/{_pages[0].fd}"


def leave() -> None:
    """Record that this rank has finished the run, so that the monitor does not report its exit."""
    for page in _pages:
        page.go_to(LEFT)


def close_page() -> None:
    """Close this process's page, if it is open."""
    for page in _pages:
        page.memory.close()
        os.close(page.fd)
    _pages.clear()


def num_beats() -> int:
    """Return how often this process has recorded progress."""
    return sum(page.beats for page in _pages)


def read_page(memory: mmap.mmap) -> Pulse:
    """Return the phase and the progress recorded in a page that is mapped with `SIZE` bytes."""
    name, step, position, beats, tenant = _FORM.unpack_from(memory, 0)
    return Pulse(_text(name), step, position, beats, _text(tenant))


class Samples(NamedTuple):
    """How many samples a rank has generated of those that it is to generate now."""

    finished: int = 0
    wanted: int = 0


def read_samples(memory: mmap.mmap) -> Samples:
    """Return the numbers of samples recorded in a page."""
    return Samples(*_SAMPLES.unpack_from(memory, _SAMPLES_AT))


def num_samples() -> Samples:
    """Return the numbers of samples that this process has recorded."""
    return Samples(sum(page.finished for page in _pages), sum(page.wanted for page in _pages))


def expect_samples(number: int) -> None:
    """Record that this rank is to generate `number` samples, besides those that it generates now. If
    all samples so far are finished, a new count begins."""
    for page in _pages:
        if page.finished >= page.wanted:
            page.count(finished=-page.finished, wanted=-page.wanted)
        page.count(wanted=number)


def finish_samples(number: int = 1) -> None:
    """Record that `number` samples of those that `expect_samples` announced are generated."""
    for page in _pages:
        page.count(finished=number)


def drop_samples(number: int) -> None:
    """Record that `number` of the expected samples will not be generated now."""
    for page in _pages:
        page.count(wanted=-number)


def show_samples(finished: int, wanted: int) -> None:
    """Record the numbers of samples of other processes, which generate for this rank."""
    for page in _pages:
        page.count(finished=finished - page.finished, wanted=wanted - page.wanted)


def read_collective(memory: mmap.mmap) -> Collective:
    """Return the last collective recorded in a page."""
    name, group, number, end = _COLLECTIVE.unpack_from(memory, _COLLECTIVE_AT)
    return Collective(_text(name), _text(group), number, end == _OVER, end == _QUEUED)


def read_writer(memory: mmap.mmap) -> int:
    """Return the PID of the process that last wrote a checkpoint for the rank; 0 if there was none."""
    return _WRITER.unpack_from(memory, _WRITER_AT)[0]


def register_writer() -> None:
    """Record that this process, a fork of a rank, writes a checkpoint for the rank.

    While the rank loads or saves, the bytes that this process reads and writes count as the rank's
    progress.
    """
    for page in _pages:
        _WRITER.pack_into(page.memory, _WRITER_AT, os.getpid())


def kind_of(phase: str) -> str:
    """Return the name of a phase without the suffix after the colon."""
    return phase.partition(":")[0]


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def note_collective(name: bytes, group: bytes) -> None:
    """Record that this rank begins a collective over a group. Long names are truncated."""
    for page in _pages:
        page.collectives += 1
        _COLLECTIVE.pack_into(page.memory, _COLLECTIVE_AT, name, group, page.collectives, 0)


def note_collective_end(*, is_queued: bool = False) -> None:
    """Record that this rank no longer waits for the last collective.

    `is_queued` is true if the rank goes on while the collective is still queued on a GPU.
    """
    for page in _pages:
        _END.pack_into(page.memory, _END_AT, _QUEUED if is_queued else _OVER)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark the phase of this rank during the `with` block or, as a decorator, during each call.

    Every rank must go through the same phases in the same order, even if it has nothing to do. If
    phases are nested, the page shows the inner phase. The exception is an inner phase whose name is
    the outer name without the suffix: during `save` inside `save:snapshot`, the page still shows
    `save:snapshot`.
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
    """Mark that this rank works on step `step` of one tenant of a service during the `with` block.

    After the block all ranks have the same position (`Pulse.position`), even if an exception made
    some of them go through fewer phases. An exception that leaves the block gets the attributes
    `tenant` and `step`, for the report of the failure.
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
    """Record that this rank begins a step."""
    for page in _pages:
        page.step, page.outside = step, "log"
        page.go_to("log")


def supervise() -> None:
    """Record that this rank is a rollout rank, which from now on only supervises engines.

    The rank's heartbeats do not depend on its engines.
    """
    for page in _pages:
        page.phase = page.outside = SUPERVISE
        page.write()


def beat() -> None:
    """Record progress of this rank, such as a micro-batch, a finished sample or a bucket of weights.

    In the phases `load` and `save`, this call is not needed, because there the bytes that the rank's
    main thread reads or writes count as progress.
    """
    for page in _pages:
        page.beats += 1
        page.write()
