"""The two runs of a drill: the run in which faults are provoked, and a reference without faults.

DRILL_FOLDER/recipe.yaml     the recipe with a checkpoint per step, few steps and no trackers
DRILL_FOLDER/reference/      the run without faults
DRILL_FOLDER/run/            the run in which the faults are provoked, one after the other
DRILL_FOLDER/broken_NAME/    a run that could not continue after the fault NAME
DRILL_FOLDER/logs/           one file per job, with the output of the job

After a fault, the run is started again with the command that RUN/failure.json names. The run has
recovered when it has completed the next step, and the metrics, samples and weights of all its steps
equal those of the reference.
"""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from mrl.config import Recipe, dump_recipe
from mrl.drill.job import Job, Unexpected, num_rows, saved
from mrl.errors import InputError
from mrl.run.compare import MACHINE, differences
from mrl.run.folder import RunFolder
from parallel.checkpoint.manifest import Damaged, candidates, read_manifest

OF_THE_FAULT = (
    *(*MACHINE, "rollout/engine_restarts", "rollout/canary", "checkpoint/"),
    "rollout/sync_bytes",  # the first sync of a start sends more if engines are ahead
)
"""Prefixes of metrics that a fault may change, and that are therefore not compared."""
NUM_STEPS = 16
"""The default number of steps of the reference, the run without faults."""
FEWEST_LEFT = 6
"""A fault is provoked in a run only if the run has at least this many steps left."""
SIGNS = ("Traceback (most recent call last)", "Segmentation fault")
"""Strings that the output of a job must not contain when a fault has ended the job."""


class Drill:
    """Starts the jobs of a drill: a run without faults, then a run in which faults are provoked."""

    def __init__(
        self, recipe: Recipe, ranks: int, folder: Path, num_steps: int = NUM_STEPS
    ) -> None:
        """Prepare `folder` for runs of `num_steps` steps on `ranks` ranks.

        Raises InputError if the folder is not empty.
        """
        if folder.exists() and any(folder.iterdir()):
            raise InputError(
                f"{folder} is not empty; remove it, or choose another folder with --folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.ranks, self.num_steps = folder, ranks, num_steps
        self.recipe = _for_drill(recipe, folder / "run", self.num_steps)
        self.file = folder / "recipe.yaml"
        dump_recipe(self.recipe, self.file)
        self.run, self.reference = folder / "run", folder / "reference"
        self.job: Job | None = None
        self.judges_bits = not recipe.asynchronous.is_free
        """Whether the run is compared with the reference. This requires a deterministic recipe: in
        every run without faults, metrics, samples and weights have the same bits."""
        self._digests: dict[int, dict[str, str]] = {}
        self._starts = itertools.count()

    @cached_property
    def scratch(self) -> Path:
        """The temporary directory of all jobs, created on first use. Every file in it is from a job."""
        return Path(tempfile.mkdtemp(prefix="mrl-drill-"))

    @property
    def first_rollout(self) -> int:
        """The first rank that only leads engines; the number of ranks if there is no such rank."""
        return self.ranks - (self.recipe.rollout.num_ranks or 0)

    @property
    def last_trainer(self) -> int:
        """The last rank that trains."""
        return self.first_rollout - 1

    @property
    def engine_leader(self) -> int:
        """The rank that leads the first engine."""
        return self.first_rollout if self.first_rollout < self.ranks else 0

    @property
    def limit_s(self) -> float:
        """The longest time in seconds that a job may take to start and to complete one step."""
        return self.recipe.longest_wait_s

    def train_without_fault(self) -> Job:
        """Train all steps of the reference (the run without faults) in one job, and return the job.

        Raises Unexpected if the exit code is not 0.
        """
        job = self.start(*self.words(f"output_dir={self.reference}"), run=self.reference)
        for number in itertools.count():
            if job.process.poll() is not None:
                break
            self._note_digests(self.reference)
            job.look(closely=number % 50 == 0)
            time.sleep(0.1)
        self._note_digests(self.reference)
        if job.end():
            raise Unexpected(f"the run without a fault ended with code {job.end()}; see {job.log}")
        return job

    def words(self, *overrides: str) -> list[str]:
        """Return the command that trains the drill's recipe with these overrides."""
        launch = ["-m", "mrl.launch", "--standalone", "--nproc-per-node", str(self.ranks)]
        return [sys.executable, *launch, "-m", "mrl", "train", str(self.file), *overrides]

    def start(self, *words: str, run: Path | None = None) -> Job:
        """Start a command, by default the one that trains the drill's recipe; return its `Job`.

        run: the folder of the run that the command trains; None for the run in which faults are
        provoked.
        """
        log = self.folder / "logs" / f"start_{next(self._starts):02d}.log"
        return Job(words or self.words(), run or self.run, log, self.scratch, self.limit_s)

    def running(self) -> Job:
        """Return a running job that has done at least one step and has at least FEWEST_LEFT steps left.

        A run with fewer steps left is removed first. If no job is running, a new job starts the run
        or continues it.
        """
        if num_rows(self.run) > self.num_steps - FEWEST_LEFT:
            self.close()
            shutil.rmtree(self.run)
        if self.job is None or self.job.process.poll() is not None:
            self.job = self.start()
            self.job.wait_for_rows(1)
        self.job.look(closely=True)
        return self.job

    def continued(self, done: int, command: str = "") -> list[str]:
        """Start the run again, and wait until it has done more than `done` steps.

        command: the command to start the run with; if empty, the command that trains the recipe.

        Returns a phrase for each difference from the run without faults, and for each other
        problem. Raises Unexpected if the job ends too early or takes too long.
        """
        self.close()
        words = shlex.split(command)
        if words and Path(words[0]).name.startswith("python"):
            words[0] = sys.executable
        kept = saved(self.run)
        found = []
        if kept < done - 1 - self.recipe.checkpoint.async_save:
            found.append(f"{done} steps were done and only {kept} are saved")
        self.job = self.start(*words)
        return found + self.check_step_after(done)

    def check_step_after(self, done: int) -> list[str]:
        """Wait until the run has done more than `done` steps, or all of its steps.

        Returns a phrase for each difference from the run without faults. If a checkpoint of the
        last step already exists, the job has nothing to do and must end with code 0. If it ends
        with another code, the result is a phrase with this code. Raises Unexpected if the job ends
        too early or takes too long.
        """
        job = self.job
        assert job is not None
        if saved(self.run) < self.num_steps:
            job.wait_for_rows(min(done + 1, self.num_steps))
        elif (
            code := job.end()
        ):  # the last step was saved before the fault, so there are no more steps
            return [f"the start of a run that is done ended with code {code}"]
        return self.differences() if self.judges_bits else []

    def differences(self) -> list[str]:
        """Return a phrase for each step or checkpoint that differs from the run without faults."""
        return other_steps(self.run, self.reference) + self._other_weights()

    def broken(self, name: str) -> None:
        """End the run, which could not continue after the fault `name`; move its folder to broken_NAME.

        The next job then starts a new run.
        """
        self.close()
        with suppress(OSError):
            shutil.move(self.run, self.folder / f"broken_{name}")

    def close(self) -> None:
        """End all processes of the run. May be called again."""
        if self.job is not None:
            self.job.kill()
            self.job = None

    def end(self) -> None:
        """End all processes and remove the temporary directory."""
        self.close()
        if "scratch" in vars(self):  # made by the first start
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _other_weights(self) -> list[str]:
        for checkpoint in candidates(self.run / "checkpoints"):
            with suppress(Damaged, InputError):
                step, digests = _digests(checkpoint)
                if self._digests.get(step, digests) != digests:
                    return [f"the checkpoint with {step} steps has other bits"]
                return []
        return []

    def _note_digests(self, run: Path) -> None:
        for checkpoint in candidates(run / "checkpoints")[:2]:
            with suppress(Damaged, InputError, OSError):
                step, digests = _digests(checkpoint)
                self._digests[step] = digests


def other_steps(ours: Path, others: Path) -> list[str]:
    """Return a phrase for each step of run `ours` whose metrics or samples differ in run `others`.

    One more phrase is returned if the step numbers of `ours` are not 0, 1, 2 and so on.
    """
    run, reference = RunFolder(ours), RunFolder(others)
    expected = {row["step"]: row for row in reference.read_metrics()}
    rows = run.read_metrics()
    found = []
    if [row["step"] for row in rows] != list(range(len(rows))):
        found.append(f"metrics.jsonl has the steps {[row['step'] for row in rows]}")
    for row in rows:
        step = row["step"]
        other = differences(expected.get(step, {}), row, OF_THE_FAULT)
        if other:
            keys = ", ".join(pair.key for pair in other[:3])
            found.append(f"step {step} has other values of {keys}")
        if not _same_samples(run.rollout_file(step), reference.rollout_file(step)):
            found.append(f"step {step} has other samples")
    return found


def one_step_again(drill: Drill) -> str:
    """Train the run's first step, and compare it with the first step of the run without faults.

    No fault has happened yet, so a difference means that the recipe is not deterministic, for
    example because an engine runs on a GPU without `enable_deterministic_inference`. In that case
    the drill no longer compares the two runs. Returns the reason why the two runs are not compared,
    or an empty string if they are compared.
    """
    drill.running()
    if not drill.judges_bits:
        return "engines that run freely have other bits in every run; bits are not compared"
    if differ := drill.differences():
        drill.judges_bits = False
        return f"a second start without a fault differs: {differ[0]}; bits are not compared"
    return ""


def problems_of_end(job: Job, code: int, codes: Sequence[int]) -> list[str]:
    """Return a phrase for each problem with the end of a job.

    The exit code `code` must be one of `codes`. The function also checks the job's RUN/failure.json
    and output, and that no processes, open ports or files of the job are left.
    """
    found = job.left()
    if code not in codes:
        found.append(f"exit code {code}, expected {' or '.join(map(str, codes))}")
    printed = job.printed()
    found += [f"{sign} in {job.log}" for sign in SIGNS if sign in printed]
    if code in range(70, 80) and code != 75:  # the exit codes of failures
        failure = job.failure()
        if failure is None:
            found.append("no RUN/failure.json of this start")
        elif failure.exit_code != code or not failure.command:
            found.append("RUN/failure.json has another code, or no command that continues")
        if "mrl: " not in printed:
            found.append("no block of text on the terminal")
    return found


def done_of(job: Job) -> int:
    """Return the number of steps that the job's run has recorded in metrics.jsonl."""
    return num_rows(job.run)


def _for_drill(recipe: Recipe, run: Path, num_steps: int) -> Recipe:
    """Return the recipe with few steps, a checkpoint per step, and no output outside of `run`."""
    checkpoint = recipe.checkpoint.model_copy(update={"save_every": 1, "keep": 3})
    return recipe.model_copy(
        update={
            "output_dir": str(run.absolute()),
            "train": recipe.train.model_copy(update={"num_steps": num_steps}),
            "checkpoint": checkpoint,
            "logging": recipe.logging.model_copy(update={"trackers": ("jsonl",)}),
            "eval": recipe.eval.model_copy(update={"every": 0}),
            "profile": recipe.profile.model_copy(update={"steps": ()}),
        }
    )


def _digests(checkpoint: Path) -> tuple[int, dict[str, str]]:
    """Return the number of steps of a checkpoint, and the SHA-256 of its tensor files by name."""
    files: Mapping[str, Any] = read_manifest(checkpoint)["files"]
    step = int(checkpoint.name.removeprefix("iter_"))
    return step, {name: f["sha256"] for name, f in files.items() if name.endswith(".distcp")}


def _same_samples(one: Path, other: Path) -> bool:
    """Return whether two rollout files have the same rows; False if either file cannot be read."""
    rows = []
    for file in (one, other):
        try:
            rows.append([json.loads(line) for line in file.read_text().splitlines()])
        except (OSError, ValueError):
            return False
    return rows[0] == rows[1]
