"""Faults during a run: killed processes, signals, and a second start."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from mrl.config import Recipe
from mrl.drill.chain import Drill, done_of, problems_of_end
from mrl.drill.faults import FAULTS, Row, fault
from mrl.drill.job import Job, Unexpected, is_alive, is_younger, kill, num_rows, saved
from mrl.errors import ExitCode
from mrl.run.failure import Failure
from mrl.run.folder import RunFolder

SECOND_START_S = 120.0
"""Seconds within which a second start of the run must be refused. If `rollout.start_timeout_s` is
larger, it is used instead. Imports alone may take 20 s on a cluster."""


def ended(
    drill: Drill,
    name: str,
    job: Job,
    strike: Callable[[], object],
    codes: Sequence[int],
    *,
    is_tidy: bool = True,
    found: Callable[[Failure], object] = lambda failure: None,
) -> Row:
    """Provoke a fault that ends a job, continue the run in a new job; return the fault's `Row`.

    Args:
        drill: the drill.
        name: the name of the fault.
        job: the job in which the fault is provoked.
        strike: provokes the fault.
        codes: the exit codes that the job may have.
        is_tidy: whether the job must remove its own files. If not, the next job must remove them.
        found: called with the record in RUN/failure.json, if the job has written it.
    """
    began = time.monotonic()
    strike()
    code = job.end()
    alive = job.known()
    problems = problems_of_end(job, code, codes)
    files = [] if is_tidy else job.files()
    problems = [text for text in problems if text not in {f"{file} is left" for file in files}]
    seconds = time.monotonic() - began
    failure = job.failure()
    if failure is not None:
        found(failure)
    what = f": {failure.what.splitlines()[0]}" if failure else ""
    done, kept = done_of(job), saved(job.run)
    problems += drill.continued(done, failure.command if failure else "")
    problems += [f"the next start left {file}" for file in files if file.exists()]
    assert drill.job is not None
    bits = "the same bits as without the fault" if drill.judges_bits else "bits not compared"
    text = f"exit code {code}{what}; continued from step {kept} of {done}, {bits}"
    if alive:
        text = f"{len(alive)} processes briefly outlived the launcher; {text}"
    return Row(name, FAULTS[name].did, text, seconds, "recovered", code, tuple(problems))


@fault("kill-rank-start", "kill -9 of the last rank that trains while it starts")
def kill_rank_start(drill: Drill) -> Row:
    """Kill the last trainer rank before the run's first step; return the fault's `Row`.

    A faulty GPU, for example, may also kill a rank while the job starts.
    """
    drill.close()
    drill.job = job = drill.start()
    job.wait(lambda: len(job.ranks()) == drill.ranks, "all ranks had started")
    has_engine = drill.recipe.debug.load_rollouts is None
    begun = drill.run / ("logs/engine_00.log" if has_engine else "config.yaml")
    job.wait(lambda: is_younger(begun, job.before_s), "an engine had started")
    job.look()
    return ended(
        drill, "kill-rank-start", job, lambda: kill_last_trainer(drill, job), (ExitCode.LOST_RANK,)
    )


def kill_last_trainer(drill: Drill, job: Job) -> None:
    """Send SIGKILL to the last rank that trains."""
    kill([job.ranks()[drill.last_trainer]])


def _kill_rank(drill: Drill, name: str, phase: str) -> Row:
    job = drill.running()
    job.wait_for_phase(phase)
    return ended(drill, name, job, lambda: kill_last_trainer(drill, job), (ExitCode.LOST_RANK,))


@fault("kill-rank-rollout", "kill -9 of the last rank that trains in the rollout")
def kill_rank_rollout(drill: Drill) -> Row:
    """Kill the last trainer rank during a rollout; return the fault's `Row`."""
    return _kill_rank(drill, "kill-rank-rollout", "rollout")


@fault(
    "kill-rank-train", "kill -9 of the last rank that trains in the log-probs or the training pass"
)
def kill_rank_train(drill: Drill) -> Row:
    """Kill the last trainer rank during a log-prob or training pass; return the fault's `Row`.

    The other ranks then wait for the killed rank in a collective.
    """
    return _kill_rank(drill, "kill-rank-train", "train")


@fault("kill-rank-save", "kill -9 of the last rank that trains while a checkpoint is written")
def kill_rank_save(drill: Drill) -> Row:
    """Kill the last trainer rank during a checkpoint save; return the fault's `Row`.

    The run must continue from the previous checkpoint.
    """
    return _kill_rank(drill, "kill-rank-save", "save")


@fault("kill-launcher", "kill -9 of mrl.launch, as of torchrun")
def kill_launcher(drill: Drill) -> Row:
    """Kill the launcher, the parent of all ranks; return the fault's `Row`.

    The ranks must end within 30 s, and the next start of the run must remove the files that the
    killed launcher has left.
    """
    job = drill.running()
    job.wait_for_phase("train")
    return ended(
        drill,
        "kill-launcher",
        job,
        lambda: kill([job.process]),
        (-signal.SIGKILL,),
        is_tidy=False,
    )


@fault("kill-tree", "kill -9 of everything at once: mrl.launch, ranks, engines, workers")
def kill_tree(drill: Drill) -> Row:
    """Kill all processes of a job at once; return the fault's `Row`.

    The next job must remove the files that the killed job has left.
    """
    job = drill.running()
    job.wait_for_phase("rollout")
    return ended(
        drill, "kill-tree", job, lambda: kill(job.look()), (-signal.SIGKILL,), is_tidy=False
    )


def _no_engine(recipe: Recipe) -> str:
    return "" if recipe.debug.load_rollouts is None else "the recipe has no engine"


@fault("kill-engine", "kill -9 of an engine's processes in the rollout", _no_engine)
def kill_engine(drill: Drill) -> Row:
    """Kill an engine while it generates; return the fault's `Row`.

    Another engine must replace the killed one.
    """
    job = drill.running()
    job.wait_for_phase("rollout")
    return engine_replaced(drill, "kill-engine", job, psutil.Process.kill)


def engine_replaced(
    drill: Drill, name: str, job: Job, strike: Callable[[psutil.Process], object]
) -> Row:
    """Call `strike` on every process of the first engine, and return the fault's `Row`.

    The engine must be replaced within the next two steps. If the job ends instead, the run must
    continue in another job. Raises Unexpected if neither happens in time.
    """
    job.look()
    engine, done = job.engine_of(job.ranks()[drill.engine_leader]), num_rows(job.run)
    began = time.monotonic()
    for each in engine:
        with suppress(psutil.Error):
            strike(each)
    there = num_rows(job.run)
    while num_rows(job.run) < there + 2 and job.process.poll() is None:  # in this step or the next
        if time.monotonic() > began + drill.limit_s:
            raise Unexpected(f"{drill.limit_s:.0f} s passed without another engine; see {job.log}")
        time.sleep(0.1)
    if job.process.poll() is not None:  # the engine hung outside of a rollout
        codes = (ExitCode.HUNG_RANK, ExitCode.LOST_ENGINE)
        return ended(drill, name, job, lambda: None, codes)
    problems = drill.check_step_after(there + 1)
    seconds = time.monotonic() - began
    rows = RunFolder(job.run).read_metrics()[done:]
    restarts = sum(row.get("rollout/engine_restarts", 0) for row in rows)
    if not restarts:
        problems.append("no engine was replaced")
    problems += [f"engine process {e.pid} is left" for e in engine if is_alive(e)]
    bits = ", with the same bits as without the fault" if drill.judges_bits else ""
    text = f"{restarts:g} engine replaced; the step was done{bits}"
    return Row(name, FAULTS[name].did, text, seconds, "recovered", None, tuple(problems))


def _signalled(drill: Drill, name: str, numbers: Sequence[int], codes: Sequence[int]) -> Row:
    job = drill.running()
    job.wait_for_phase("train")

    def strike() -> None:
        for number in numbers:
            job.send(number)
            time.sleep(0.1)

    return ended(drill, name, job, strike, codes)


def _in_time(drill: Drill, late: ExitCode) -> tuple[ExitCode, ...]:
    """Return the allowed exit codes of a run that must save within checkpoint.stop_limit_s.

    SAVED is always allowed. `late` is also allowed if some step of the run without faults took at
    least half of stop_limit_s.
    """
    longest = max(row["time/step_s"] for row in RunFolder(drill.reference).read_metrics())
    is_short = longest < drill.recipe.checkpoint.stop_limit_s / 2
    return (ExitCode.SAVED,) if is_short else (ExitCode.SAVED, late)


@fault("sigusr1", "SIGUSR1 twice, as SLURM gives it before the time limit")
def sigusr1(drill: Drill) -> Row:
    """Send SIGUSR1 to the run twice; return the fault's `Row`.

    The run must finish the step, save a checkpoint and stop. The second signal must change nothing.
    """
    return _signalled(drill, "sigusr1", (signal.SIGUSR1,) * 2, (ExitCode.SAVED,))


@fault("sigterm", "SIGTERM, as a scheduler gives it before SIGKILL")
def sigterm(drill: Drill) -> Row:
    """Send SIGTERM to the run; return the fault's `Row`.

    The run must finish the step and save a checkpoint, if checkpoint.stop_limit_s is long enough.
    """
    return _signalled(drill, "sigterm", (signal.SIGTERM,), _in_time(drill, ExitCode.TERMINATED))


@fault("sighup", "SIGHUP, as the end of a terminal gives it")
def sighup(drill: Drill) -> Row:
    """Send SIGHUP to the run; return the fault's `Row`.

    The run must finish the step and save a checkpoint, if checkpoint.stop_limit_s is long enough.
    """
    return _signalled(drill, "sighup", (signal.SIGHUP,), _in_time(drill, ExitCode.HANGUP))


@fault("second-start", "the same command again while the run works")
def second_start(drill: Drill) -> Row:
    """Start a second job for the folder of a running job; return the fault's `Row`.

    The second job must be refused, and the first job must go on unchanged.
    """
    job = drill.running()
    done = num_rows(job.run)
    began = time.monotonic()
    second = drill.start()
    try:
        code = second.end(max(SECOND_START_S, drill.recipe.rollout.start_timeout_s))
        seconds = time.monotonic() - began
        second.look()
        problems = problems_of_end(second, code, (ExitCode.BAD_INPUT,))
    finally:
        second.kill()
    lines = [line for line in second.printed().splitlines() if line.startswith("mrl: ")]
    problems += [] if lines else ["no line of mrl on the terminal"]
    problems += drill.check_step_after(max(done, num_rows(job.run)))
    text = f"exit code {code}: {lines[0] if lines else ''}; the first start continued"
    return Row(
        "second-start", FAULTS["second-start"].did, text, seconds, "refused", code, tuple(problems)
    )
