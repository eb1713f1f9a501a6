"""A job of a drill: a process of `mrl.launch` with all of its children, observed from outside."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from mrl.run.failure import Failure, newest_step, read_failure
from mrl.run.folder import RunFolder
from mrl.system.scratch import SHARED_MEMORY
from parallel.checkpoint.manifest import partial_folder

POLL_S = 0.02
GONE_WITHIN_S = 30.0
"""Seconds after the end of the launcher within which all of its processes must have ended."""
KILLED_WITHIN_S = 30.0
"""Seconds that a process may take to end after SIGKILL."""
ENGINE = "sglang"
"""A word that the command line of every engine process contains."""


class Unexpected(Exception):
    """The job did not behave as the drill expects. The message has the details and names the log."""


class Job:
    """One start of a run, with all of its processes, ports and shared-memory files."""

    def __init__(
        self, command: Sequence[str], run: Path, log: Path, scratch: Path, limit_s: float
    ) -> None:
        """Start `command`, which trains the run in the folder `run` and prints to the file `log`.

        `scratch` is the temporary directory of the job. `limit_s` is the longest time in seconds
        that the job's methods wait for an event.
        """
        self.run, self.log, self.limit_s = run, log, limit_s
        self.command = list(command)
        self.scratch, self._there = scratch, set(scratch.iterdir())
        self.before_s = time.time()
        """When the job was started, in seconds since 1970."""
        self.seen: set[psutil.Process] = set()
        self._read: set[psutil.Process] = set()
        self.ports: set[int] = set()
        self.shared: set[Path] = set()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as sink:
            self.process = psutil.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(self.scratch)},
            )

    def look(self, *, closely: bool = False) -> list[psutil.Process]:
        """Find all processes of the job, remember them, and return those that are alive.

        `closely`: also inspect each process once, and remember its ports and shared memory. This
        takes a second if there are many processes.
        """
        with suppress(psutil.Error):
            tree = [self.process, *self.process.children(recursive=True)]
            self.seen |= {psutil.Process(each.pid) for each in tree if is_alive(each)}
        new = set(self.known()) - self._read if closely else set()
        self._read |= new
        for each in new:
            with suppress(psutil.Error, OSError):
                self.ports |= _listening(each)
                if ENGINE in _words(each):
                    self.shared |= _shared_memory(each)
        return self.known()

    def known(self) -> list[psutil.Process]:
        """Return the processes that `look` has seen and that are still alive; cheaper than `look`."""
        return [each for each in self.seen if is_alive(each)]

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of this node's ranks, ordered by local rank."""
        found: dict[int, psutil.Process] = {}
        with suppress(psutil.Error):
            for child in self.process.children():
                with suppress(psutil.Error, KeyError):
                    found[int(child.environ()["LOCAL_RANK"])] = child
        return [found[number] for number in sorted(found)]

    def engines(self) -> list[psutil.Process]:
        """Return the live processes of all engines that `look` has seen."""
        return [each for each in self.known() if ENGINE in _words(each)]

    def engine_of(self, rank: psutil.Process) -> list[psutil.Process]:
        """Return the processes of the engine that a rank started; [] if the rank has ended."""
        with suppress(psutil.Error):
            return [each for each in rank.children(recursive=True) if ENGINE in _words(each)]
        return []

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until `condition()` is true.

        `what` names the awaited event in error messages. Raises Unexpected if the job ends first,
        or if `limit_s` seconds pass.
        """
        deadline = time.monotonic() + self.limit_s
        while not condition():
            code = self.process.poll()
            if code is not None:
                raise Unexpected(f"ended with code {code} before {what}; see {self.log}")
            if time.monotonic() > deadline:
                raise Unexpected(f"{self.limit_s:.0f} s passed without {what}; see {self.log}")
            time.sleep(POLL_S)

    def wait_for_rows(self, number: int) -> None:
        """Wait until metrics.jsonl has `number` rows, at least one of them from this job.

        Raises Unexpected if the job ends first, or if `limit_s` seconds pass.
        """
        self.wait(
            lambda: self.has_begun() and num_rows(self.run) >= number, f"step {number - 1} was done"
        )

    def has_begun(self) -> bool:
        """Return whether the last row of metrics.jsonl is from this job."""
        with suppress(OSError, ValueError, KeyError, IndexError):
            last = (self.run / "metrics.jsonl").read_bytes().splitlines()[-1]
            return json.loads(last)["time/timestamp"] >= self.before_s
        return False

    def wait_for_phase(self, phase: str) -> None:
        """Wait until the files of the run show that it has reached `phase`.

        For `rollout`, this returns about a third of the way through a rollout; for `train`, when
        the rollouts of a step have been written; for `save`, when a checkpoint is being written.
        Raises Unexpected if the job ends first, or if `limit_s` seconds pass.
        """
        done = num_rows(self.run)
        if phase == "rollout":
            self.wait_for_rows(done + 1)
            last = RunFolder(self.run).read_metrics()[-1]
            time.sleep(last["time/sync_s"] + 0.33 * last["time/rollout_s"])
        elif phase == "train":
            folder = RunFolder(self.run)
            file = folder.rollout_file(done)
            self.wait(lambda: is_younger(file, self.before_s), f"the rollouts of step {done}")
        else:
            checkpoints = self.run / "checkpoints"
            steps = range(done, done + 3)
            self.wait(
                lambda: any(partial_folder(checkpoints, step).exists() for step in steps),
                f"the checkpoint with {done + 1} steps was being written",
            )

    def end(self, limit_s: float | None = None) -> int:
        """Wait until the launcher has ended, and return its exit code.

        Raises Unexpected after `limit_s` seconds, by default the limit of the job.
        """
        try:
            return self.process.wait(limit_s or self.limit_s)
        except psutil.TimeoutExpired:
            raise Unexpected(
                f"{limit_s or self.limit_s:.0f} s passed without an end; see {self.log}"
            ) from None

    def left(self) -> list[str]:
        """Return a phrase for each process, open port and file that the job has left behind.

        Waits up to GONE_WITHIN_S seconds for the processes and ports to disappear.
        """
        deadline = time.monotonic() + GONE_WITHIN_S
        while (
            self.known() or open_ports(self.ports, self.scratch)
        ) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        found = [f"process {each.pid} is left" for each in self.known()]
        found += [f"port {port} is left" for port in open_ports(self.ports, self.scratch)]
        return found + [f"{file} is left" for file in self.files()]

    def files(self) -> list[Path]:
        """Return the files that the job has left in shared memory and in the temporary directory."""
        new = set(self.scratch.iterdir()) - self._there
        return [file for file in sorted(self.shared | new) if file.exists()]

    def failure(self) -> Failure | None:
        """Return the record in RUN/failure.json, or None if this job has not written one."""
        found = read_failure(self.run)
        return found if found is not None and found.time >= self.before_s else None

    def printed(self) -> str:
        return self.log.read_text(errors="replace")

    def send(self, number: int) -> None:
        """Send a signal to the launcher."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill all processes of the job and remove its shared memory. May be called again."""
        for each in self.look():
            with suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(self.known(), timeout=KILLED_WITHIN_S)
        for file in self.shared:
            file.unlink(missing_ok=True)


def kill(processes: Sequence[psutil.Process]) -> None:
    """Send SIGKILL to processes; a process that no longer exists is skipped."""
    for each in processes:
        with suppress(psutil.Error):
            each.send_signal(signal.SIGKILL)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process is still running.

    A zombie counts as ended. So does a process whose pid now belongs to another process.
    """
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def open_ports(ports: Iterable[int], scratch: Path) -> list[int]:
    """Return those of `ports` on which a process of the job still listens.

    A process belongs to the job if its TMPDIR is `scratch`. Other processes are ignored, because
    another program may have taken over a port.
    """
    answering = set()
    for port in ports:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                answering.add(port)
    held: set[int] = set()
    for process in psutil.process_iter() if answering else ():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(scratch):
                held |= _listening(process)
    return sorted(answering & held)


def num_rows(run: Path) -> int:
    """Return the number of complete lines in a run's metrics.jsonl; 0 if the file does not exist."""
    with suppress(OSError):
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def saved(run: Path) -> int:
    """Return the number of steps in the newest checkpoint; 0 without a checkpoint."""
    return newest_step(run) or 0


def is_younger(file: Path, than_s: float) -> bool:
    """Return whether a file was last written after `than_s`, a time in seconds since 1970.

    The result is False if the file does not exist.
    """
    with suppress(OSError):
        return file.stat().st_mtime > than_s
    return False


def _words(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _listening(process: psutil.Process) -> set[int]:
    found = process.net_connections(kind="inet")
    return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}


def _shared_memory(process: psutil.Process) -> set[Path]:
    mapped = {Path(each.path) for each in process.memory_maps()}
    return {file for file in mapped if file.parent == SHARED_MEMORY and file.exists()}
