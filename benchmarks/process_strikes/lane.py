"""Goes through the trials of one placement, in as few starts as they allow."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from benchmarks.process_strikes.phases import EARLY, ENDING, MEETING, PHASES, START, Phase
from benchmarks.process_strikes.roles import FORK, LAUNCHER
from benchmarks.process_strikes.strike import KILL, STOP, WATCHDOG, Row, Striker, Trial
from benchmarks.process_strikes.subjects import Subject
from mrl.drill.job import Job, Unexpected, is_alive
from mrl.errors import ExitCode, InputError

ORDER = (START, "rollout", "sync", "train", "save", ENDING, MEETING)
"""The order in which phases are tried."""
LATE = (ENDING, MEETING)
"""Phases that are tried last: their strikes end the job, and may take long."""
MOST_WATCHDOGS = 3
"""The watchdog is replaced so often in one start."""
BRIEF_S = 1.0
"""Processes that are there for less are not struck, forks of a rank aside, which write checkpoints."""
WATCHED_STEPS = 4
MASKED = ("reward worker", "environment worker")
"""Processes of user code: what they had not scored is masked, so that the run has other bits."""
Write = Callable[[Row], None]


def observed(subject: Subject, steps: int = WATCHED_STEPS) -> dict[str, dict[str, float]]:
    """Start the job without a fault, and let it save and end after some steps.

    Return how long each role is there in each phase, in seconds.
    """
    job, striker = subject.start(), Striker(subject)
    phase, found = Phase(job), {}
    last, there, is_told = time.monotonic(), subject.rows(), False
    while job.process.poll() is None:
        if not is_told and job.has_begun() and subject.rows() >= there + steps:
            job.send(signal.SIGUSR1)
            is_told = True
        at, now = phase.now(), time.monotonic()
        for role in striker.victims(job):
            seconds = found.setdefault(role, {})
            seconds[at] = seconds.get(at, 0.0) + now - last
        last = now
        time.sleep(0.01)
    if job.end() != ExitCode.SAVED:
        raise Unexpected(f"ended with code {job.end()} without a fault; see {job.log}")
    return found


def trials_of(placement: str, found: dict[str, dict[str, float]]) -> list[Trial]:
    """Return the trials of a placement: every role in every phase in which it was seen."""
    trials = []
    for role, seconds in found.items():
        for phase in ORDER:
            of_phase = sum(seconds.get(name, 0.0) for name in PHASES.get(phase, (phase,)))
            if not of_phase or is_brief(role, seconds):
                continue
            if phase == MEETING and not (role == LAUNCHER or "rank" in role):
                continue
            trials += [Trial(placement, role, phase, signal) for signal in (STOP, KILL)]
    return sorted(trials, key=_when)


def _when(trial: Trial) -> tuple[bool, bool, bool, str, int]:
    """Order trials: first, role by role, what a job survives: it is struck again in one start."""
    is_end = "rank" in trial.role or (trial.role == LAUNCHER and trial.signal == KILL)
    role = "" if is_end else trial.role
    return (trial.phase in LATE, is_end, trial.signal == STOP, role, ORDER.index(trial.phase))


def is_brief(role: str, seconds: dict[str, float]) -> bool:
    """Whether a process comes and goes too fast to be struck."""
    return sum(seconds.values()) < BRIEF_S and role != "fork of rank"


class Lane:
    """Strikes one subject, trial after trial."""

    def __init__(self, subject: Subject, write: Write) -> None:
        self.subject, self.write = subject, write
        self.striker = Striker(subject)
        self.owed: list[Row] = []
        """The rows of trials that ended the job, which has not been continued yet."""
        self._asked: set[tuple[str, str]] = set()
        """Roles and signals after which a job that went on was asked to save and end."""
        self._struck: list[str] = []
        """The roles that were struck in this start."""

    def run(self, trials: Sequence[Trial]) -> None:
        """Do all trials."""
        left = list(trials)
        while left:
            trial = left.pop(0)
            try:
                row = self._tried(trial)
            except (Unexpected, InputError, OSError, psutil.Error) as error:
                row = Row(*trial, happened="other", problems=[f"{type(error).__name__}: {error}"])
                self.owed = []
                self._begin_anew("unexpected")
            self.write(row)
        self._settle()

    def _tried(self, trial: Trial) -> Row:
        job = self._started(trial)
        row, victim = self.striker.strike(trial, job)
        if victim is None:
            return row
        row.struck_before = len(self._struck)
        self._struck.append(trial.role)
        if row.happened == "ended":
            if row.exit_code != ExitCode.SAVED:
                self.owed.append(row)
            self._close()
        elif row.happened == "waits":
            self._close()
            self.owed = []
        else:
            self._went_on(row, job, victim)
        return row

    def _started(self, trial: Trial) -> Job:
        """Return the job in which a trial can strike."""
        if any(row.phase not in EARLY for row in self.owed) or trial.phase not in EARLY:
            self._settle()
        if trial.phase in EARLY or self._struck.count(WATCHDOG) >= MOST_WATCHDOGS:
            self._close()
        if trial.phase in EARLY:
            return self.subject.start()
        job = self.subject.running()
        if trial.phase == ENDING:
            job.send(signal.SIGUSR1)
        return job

    def _settle(self) -> None:
        """Continue a job that trials have ended; add to their rows what is not as without the fault."""
        rows, self.owed = self.owed, []
        if not rows:
            return
        try:
            problems = self.subject.continued(self.subject.rows(), "")
        except Unexpected as error:
            problems = [f"not continued: {error}"]
        if problems:
            self._begin_anew(f"{rows[-1].role}_{rows[-1].phase}_{rows[-1].signal}")
        for row in rows:
            row.problems += problems
            if not problems:
                row.then = "started again, it went on"
                row.then += " with the same bits" if self.subject.judges_bits else ""
            self.write(row)

    def _went_on(self, row: Row, job: Job, victim: psutil.Process) -> None:
        found = self.subject.differences()
        if found and row.role in MASKED:
            row.then = "what was not scored was masked"
        elif found and row.happened == "replaced" and not self.subject.keeps_bits:
            row.then = "other bits from then on, within the bound"
        else:
            row.problems += found
            row.then = "the same bits" if self.subject.judges_bits and not found else ""
        row.then = "; ".join(filter(None, (*self.subject.paused(), row.then)))
        is_there = is_alive(victim)
        if row.happened == "replaced" and is_there:
            row.problems.append("the struck process is left")
        asked = (row.role, row.signal)
        is_first = asked not in self._asked
        if (
            row.happened != "replaced"
            and not row.role.startswith(FORK)
            and (is_first or not is_there)
        ):
            self._asked.add(asked)
            then = row.then  # what is stopped or gone stays so until the job ends
            self.striker.end_on_request(row, job)
            row.then = "; ".join(filter(None, (then, row.then)))
            self._close()
        if is_there:
            with suppress(psutil.Error):
                victim.resume()
        if found:
            self._begin_anew(f"{row.role}_{row.phase}_{row.signal}")

    def _begin_anew(self, name: str) -> None:
        self._struck.clear()
        self.subject.begin_anew(name.replace(" ", "_"))

    def _close(self) -> None:
        self._struck.clear()
        if self.subject.job is not None:
            self.subject.job.kill()
