"""Strikes one process of a job with one signal, and follows what comes of it."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import psutil

from benchmarks.process_strikes.phases import EARLY, EARLY_POLL_S, ENDING, MEETING, PHASES, Phase
from benchmarks.process_strikes.roles import FORK, LAUNCHER, last_of_each, looks_of, roles
from benchmarks.process_strikes.subjects import MEETING_WAIT_S, WAIT_S, Subject
from mrl.drill.chain import problems_of_end
from mrl.drill.job import Job, Unexpected, is_alive
from mrl.errors import ExitCode

KILL, STOP = "SIGKILL", "SIGSTOP"
SIGNALS = {KILL: signal.SIGKILL, STOP: signal.SIGSTOP}
LOOK_S = 0.5
TRIES = 8
"""Times that a phase is waited for in which a process was not there."""
WATCHDOG, WATCHDOG_S, MOST_STEPS = "watchdog", 45.0, 12
"""The watchdog holds up nothing: seconds, and at most how many steps, to wait for another one."""
FORK_S = 20.0
"""Seconds in which a process must come."""
Happened = Literal["went on", "replaced", "ended", "waits", "was not there", "other"]
"""What came of a strike; `other` where the job did not even come so far, or not as expected."""
CODES = tuple(code for code in ExitCode if code in range(70, 80) and code not in (ExitCode.SAVED,))
"""Exit codes with which a struck run may end: those of a failure with a code of its own."""


class Trial(NamedTuple):
    """What is struck, when, and with which signal."""

    placement: str
    role: str
    phase: str
    signal: str

    def __str__(self) -> str:
        return f"{self.placement}: {self.signal} of {self.role} at {self.phase}"


@dataclass
class Row:
    """What came of a trial."""

    placement: str
    role: str
    phase: str
    signal: str
    happened: Happened
    noticed_s: float | None = None
    """Seconds until anything said so: a line of the log, the report, or a process in its place."""
    seconds: float = 0.0
    """Seconds until the command had ended and nothing was left, or two more steps were done."""
    exit_code: int | None = None
    cause: str = ""
    """The first line of the report."""
    then: str = ""
    """What came afterwards: the end of a job that went on, the next start of one that ended."""
    problems: list[str] = field(default_factory=list)
    struck_before: int = 0
    """Strikes that the same start had survived before this one."""
    commit: str = ""

    @property
    def trial(self) -> Trial:
        return Trial(self.placement, self.role, self.phase, self.signal)

    @property
    def passed(self) -> bool:
        return not self.problems


class Striker:
    """Strikes the processes of one subject."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    def victims(self, job: Job) -> dict[str, int]:
        """Return the process of each role that lives now."""
        return last_of_each(self.roles(job))

    def roles(self, job: Job) -> dict[int, str]:
        """Return the role of each process that lives now, by its number."""
        return roles(looks_of(job.process.pid), job.process.pid, self.subject.num_trainers)

    def strike(self, trial: Trial, job: Job) -> tuple[Row, psutil.Process | None]:
        """Strike, and follow the job until its state is clear; return the row and the process."""
        row = Row(*trial, happened="was not there")
        if trial.phase not in EARLY:
            job.look(closely=True)
        log_at = job.log.stat().st_size
        victim = self._caught(trial, job)
        if victim is None:
            return row, None
        self._follow(row, job, victim, log_at)
        return row, victim

    def _caught(self, trial: Trial, job: Job) -> psutil.Process | None:
        """Send the signal in the phase; return the process, or None where it is not there then."""
        phase, is_fork = Phase(job), trial.role.startswith(FORK)
        for _ in range(TRIES):
            known = None  # what is there already is struck without another look at the tree
            if not is_fork and trial.phase not in EARLY:
                known = self.victims(job).get(trial.role)
            if not is_fork:
                phase.wait(trial.phase)
            if (victim := self._struck(trial, job, phase, known)) is not None:
                return victim
            if trial.phase in (*EARLY, ENDING):
                return None
            if job.process.poll() is not None:
                raise Unexpected(f"ended by itself before the strike; see {job.log}")
        return None

    def _struck(
        self, trial: Trial, job: Job, phase: Phase, known: int | None
    ) -> psutil.Process | None:
        """Strike as soon as the process is there; None where the phase, or the job, ends before."""
        is_fork = trial.role.startswith(FORK)
        deadline = time.monotonic() + (job.limit_s if trial.phase in EARLY else FORK_S)
        while job.process.poll() is None and time.monotonic() < deadline:
            pid = known or self.victims(job).get(trial.role)
            if self._is_in(phase, trial.phase) and pid is not None:
                with suppress(psutil.Error):
                    victim = psutil.Process(pid)
                    job.seen.add(victim)
                    victim.send_signal(SIGNALS[trial.signal])
                    return victim
                known = None
            elif not is_fork and not self._is_in(phase, trial.phase):
                return None
            time.sleep(EARLY_POLL_S if trial.phase in EARLY else 0.0)
        return None

    @staticmethod
    def _is_in(phase: Phase, wanted: str) -> bool:
        return phase.now() in PHASES.get(wanted, (wanted,))

    def _follow(self, row: Row, job: Job, victim: psutil.Process, log_at: int) -> None:
        began, looked = time.monotonic(), 0.0
        there, before = self.subject.rows(), set(self.roles(job))
        limit_s = MEETING_WAIT_S if row.phase == MEETING else WAIT_S
        is_replaced = False
        while True:
            now = time.monotonic() - began
            if job.process.poll() is not None:
                self._ended(row, job, began)
                return
            is_gone = not is_alive(victim)
            if row.noticed_s is None and (said(job, log_at) or (is_gone and row.signal == STOP)):
                row.noticed_s = round(now, 1)
            if now - looked > LOOK_S:
                looked = now
                if len(job.look()) == 1 and row.role == LAUNCHER:
                    job.process.resume()  # the rest has ended: nothing waits but what was stopped
                new = {role for pid, role in self.roles(job).items() if pid not in before}
                is_replaced = is_replaced or (is_gone and row.role in new)
                if is_replaced and row.noticed_s is None:
                    row.noticed_s = round(now, 1)
            done = self.subject.rows() if job.has_begun() else 0
            is_awaited = row.role == WATCHDOG and not is_replaced and now < WATCHDOG_S
            is_late = row.role.startswith(FORK)  # what became of it is read at the next save
            if done >= there + (MOST_STEPS if is_awaited else 4 if is_late else 2):
                break
            if now > limit_s:
                row.happened = "waits"
                row.seconds = round(now, 1)
                row.problems.append(self._waiting(job, now))
                return
            time.sleep(0.02)
        row.happened = "replaced" if is_replaced and not row.role.startswith(FORK) else "went on"
        row.seconds = round(time.monotonic() - began, 1)
        if row.happened == "replaced" and row.role.startswith("rank"):
            row.problems.append("a rank was replaced under a running job")

    def _ended(self, row: Row, job: Job, began: float) -> None:
        code = job.end()
        failure = job.failure()
        is_launcher = row.role == LAUNCHER
        codes = (-signal.SIGKILL,) if is_launcher and row.signal == KILL else CODES
        codes = (*codes, ExitCode.SAVED) if row.phase == ENDING else codes
        found = problems_of_end(job, code, codes)
        if (
            is_launcher and row.signal == KILL
        ):  # nobody is left to remove files; the next start does
            files = {f"{file} is left" for file in job.files()}
            found = [text for text in found if text not in files]
        row.problems += found
        row.happened, row.exit_code = "ended", code
        row.seconds = round(time.monotonic() - began, 1)
        if failure is not None:
            row.cause = failure.what.splitlines()[0]
            row.noticed_s = row.noticed_s or row.seconds

    def _waiting(self, job: Job, seconds: float) -> str:
        """Say what a job that still waits consists of."""
        root = job.process.pid
        found = sorted(roles(looks_of(root), root, self.subject.num_trainers).values())
        return (
            f"still waiting after {seconds:.0f} s; rank 0 is in phase {Phase(job).now()}; there are: "
            f"{', '.join(found)}"
        )

    def end_on_request(self, row: Row, job: Job) -> None:
        """Ask a job that went on to save and end, while the process is stopped or gone."""
        began = time.monotonic()
        if row.role == LAUNCHER:
            job.process.resume()
        job.send(signal.SIGUSR1)
        try:
            code = job.end(WAIT_S)
        except Unexpected:
            row.problems.append(f"asked to save and end: {self._waiting(job, WAIT_S)}")
            return
        row.problems += problems_of_end(job, code, (ExitCode.SAVED, *CODES))
        seconds = time.monotonic() - began
        row.then = f"asked to save and end, it left with code {code} after {seconds:.0f} s"


def said(job: Job, since: int) -> bool:
    """Whether the log has a line of a fault since a byte of it."""
    with suppress(OSError), job.log.open("rb") as log:
        log.seek(since)
        text = log.read().decode(errors="replace").lower()
        return any(word in text for word in ("mrl: ", "warning", "traceback"))
    return False
