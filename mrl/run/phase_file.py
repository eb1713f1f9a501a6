"""The file RUN/phase.json: what a run, or a service, is doing now. The page of `mrl view --follow`
shows it.

The watchdog's monitor on the node of rank 0 writes the file, which costs the ranks nothing. The file
is replaced as a whole, so a reader never sees a part of it, and it is not synced to the disk: after a
crash of the machine it may be old. It is written at most every MIN_GAP_S seconds while something
changes, and otherwise every SIGN_S seconds, so a file that is older shows that its writer is gone.
This module does not import torch, because the monitor runs without it.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mrl.system.files import write_whole
from mrl.system.heartbeat import Pulse, Samples
from mrl.system.json_text import check_kinds, parse_row
from mrl.system.proc import kernel_and_namespace, stat_of

FILE = "phase.json"
MIN_GAP_S, SIGN_S = 0.4, 5.0
MAX_SPANS = 40
"""The largest number of phases of the present step that the file lists. The oldest are left out."""
MAX_BYTES = 1 << 16
ENDED = "ended"
"""The phase of a run that has ended, whether it failed or not."""
_LAST_WRITE_S = 2.0
_KINDS = {
    "phase": "text",
    "step": "whole",
    "tenant": "text",
    "since": "number",
    "time": "number",
    "finished": "whole",
    "wanted": "whole",
    "spans": "list",
    "host": "text",
    "pid": "whole",
    "began": "text",
}
"""The types of the file's values. `phase` and `step` are those of rank 0 (mrl/system/heartbeat.py),
`since` and `time` are seconds since 1970: when the phase began, and when the file was written.
`finished` and `wanted` count samples over all ranks. `spans` has [phase, begin, end] for the phases of
the present step, the last of which has no end. `pid` is rank 0 on `host`, and `began` its start time,
which distinguishes it from a later process with the same number."""


class PhaseFile:
    """Writes the file from a thread of its own, because a disk may hang."""

    def __init__(self, folder: Path, pid: int) -> None:
        stat = stat_of(pid)
        self._file = folder / FILE
        self._fixed = {"host": _host(), "pid": pid, "began": "" if stat is None else stat.started}
        self._spans: list[list[Any]] = []
        self._work: tuple[int, str] = (-1, "")
        """The step and the tenant to which `_spans` belong."""
        self._written_at = 0.0
        self._content: dict[str, Any] = {}
        self._wakes = threading.Condition()
        self._to_write: bytes | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def note(self, pulse: Pulse, samples: Sequence[Samples]) -> None:
        """Record what rank 0 is doing, and the numbers of samples of all ranks. Call this often; it
        never waits."""
        now = time.time()
        if (pulse.step, pulse.tenant) != self._work:
            self._work, self._spans = (pulse.step, pulse.tenant), []
        if not self._spans or self._spans[-1][0] != pulse.phase:
            if self._spans:
                self._spans[-1][2] = round(now, 2)
            self._spans = [*self._spans, [pulse.phase, round(now, 2), None]][-MAX_SPANS:]
        content = {
            "phase": pulse.phase,
            "step": pulse.step,
            "tenant": pulse.tenant,
            "since": self._spans[-1][1],
            "finished": sum(each.finished for each in samples),
            "wanted": sum(each.wanted for each in samples),
        }
        gap_s = MIN_GAP_S if content != self._content else SIGN_S
        if time.monotonic() - self._written_at >= gap_s:
            self._put(content, now)

    def close(self) -> None:
        """Record that the run has ended, and wait a moment for the file to be written."""
        self._put({**self._content, "phase": ENDED, "since": round(time.time(), 2)}, time.time())
        with self._wakes:
            self._is_over = True
            self._wakes.notify()
        self._thread.join(_LAST_WRITE_S)

    def _put(self, content: dict[str, Any], now: float) -> None:
        self._content, self._written_at = content, time.monotonic()
        whole = {**content, "time": round(now, 2), "spans": self._spans, **self._fixed}
        with self._wakes:  # the thread writes outside of it
            self._to_write = json.dumps(whole).encode() + b"\n"
            self._wakes.notify()

    def _write(self) -> None:
        while True:
            with self._wakes:
                self._wakes.wait_for(lambda: self._to_write is not None or self._is_over)
                data, self._to_write = self._to_write, None
            if data is None:
                return
            with suppress(OSError):  # a full disk, or a folder that was moved
                write_whole(self._file, data)


def read_phase(folder: Path) -> dict[str, Any] | None:
    """Return the content of the file; None if there is none, or it is damaged."""
    with suppress(OSError, ValueError):
        with (folder / FILE).open("rb") as stream:
            row = parse_row(stream.read(MAX_BYTES))
        check_kinds(row, _KINDS, tuple(_KINDS))
        return row
    return None


def is_gone(phase: dict[str, Any]) -> bool:
    """Return whether the rank 0 that `phase` names ran on this machine, and is no longer alive."""
    if phase["host"] != _host():
        return False
    stat = stat_of(phase["pid"]) if 0 < phase["pid"] < 1 << 31 else None
    return stat is None or stat.has_ended or stat.started != phase["began"]


def _host() -> str:
    """Return the name of this machine with a digest of the kernel's boot id and the PID namespace.
    Within the same value, a process id means the same process."""
    kernel = f" {kernel_and_namespace('pid')}"
    return f"{socket.gethostname()} {hashlib.sha256(kernel.encode()).hexdigest()[:12]}"
