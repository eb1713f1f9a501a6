"""A drill is one run that faults interrupt, beside the same run without a fault.

DRILL_FOLDER/recipe.yaml     the recipe with a checkpoint a step, few steps and no trackers
DRILL_FOLDER/reference/      the run without a fault
DRILL_FOLDER/run/            the run that every fault strikes, one after the other
DRILL_FOLDER/broken_NAME/    that run, where it could not continue after the fault NAME
DRILL_FOLDER/logs/           what each start printed

After a fault the run is started again by the command that its report names. It has recovered once it
has done the next step and all steps so far have the metrics, samples and weights of the reference.
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
"""Prefixes of metrics that a fault may change."""
NUM_STEPS = 16
"""Steps of the run without a fault."""
FEWEST_LEFT = 6
"""Steps that a run must have left when a fault strikes it."""
SIGNS = ("Traceback (most recent call last)", "Segmentation fault")
"""What no start may print that a fault ends."""


class Drill:
    """Holds the run that faults strike, and the reference beside it."""

    def __init__(
        self, recipe: Recipe, ranks: int, folder: Path, num_steps: int = NUM_STEPS
    ) -> None:
        """Prepare `folder`, for runs of `num_steps`.

        Raises InputError where the folder holds anything.
        """
        if folder.exists() and any(folder.iterdir()):
            raise InputError(
                f"{folder} is there already; remove it, or choose another with --folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.ranks, self.num_steps = folder, ranks, num_steps
        self.recipe = _for_drill(recipe, folder / "run", self.num_steps)
        self.file = folder / "recipe.yaml"
        dump_recipe(self.recipe, self.file)
        self.run, self.reference = folder / "run", folder / "reference"
        self.job: Job | None = None
        self.judges_bits = not recipe.asynchronous.is_free
        """Whether the recipe gives the same bits twice without a fault."""
        self._digests: dict[int, dict[str, str]] = {}
        self._starts = itertools.count()

    @cached_property
    def scratch(self) -> Path:
        """The temporary directory of all starts, made at the first: what is left there is theirs."""
        return Path(tempfile.mkdtemp(prefix="mrl-drill-"))

    @property
    def first_rollout(self) -> int:
        """The first rank that leads engines only; the number of ranks where there is none."""
        return self.ranks - (self.recipe.rollout.num_ranks or 0)

    @property
    def last_trainer(self) -> int:
        """The last rank that trains."""
        return self.first_rollout - 1

    @property
    def engine_leader(self) -> int:
        """The rank below which the first engine is."""
        return self.first_rollout if self.first_rollout < self.ranks else 0

    @property
    def limit_s(self) -> float:
        """Seconds in which a start and a step must be done."""
        return self.recipe.longest_wait_s

    def train_without_fault(self) -> Job:
        """Train the reference, all steps in one start; return its job. Raises Unexpected."""
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
        """Return the command that trains the recipe of the drill."""
        launch = ["-m", "mrl.launch", "--standalone", "--nproc-per-node", str(self.ranks)]
        return [sys.executable, *launch, "-m", "mrl", "train", str(self.file), *overrides]

    def start(self, *words: str, run: Path | None = None) -> Job:
        """Start a command, by default the one that trains the run."""
        log = self.folder / "logs" / f"start_{next(self._starts):02d}.log"
        return Job(words or self.words(), run or self.run, log, self.scratch, self.limit_s)

    def running(self) -> Job:
        """Return the job of the run, which has done a step since its start and has more to do.

        A run that is nearly done is put away, and the next one begins anew.
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
        """Start the run again and wait until it has done more steps than `done`; return what differs
        from the reference. Raises Unexpected."""
        self.close()
        words = shlex.split(command)
        if words and Path(words[0]).name.startswith("python"):
            words[0] = sys.executable
        kept = saved(self.run)
        found = []
        if kept < done - 1 - self.recipe.checkpoint.async_save:
            found.append(f"{done} steps were done and only {kept} are saved")
        self.job = self.start(*words)
        return found + self.goes_on(done)

    def goes_on(self, done: int) -> list[str]:
        """Wait until the job has done more steps than `done`, or all of them; return what differs."""
        job = self.job
        assert job is not None
        if saved(self.run) < self.num_steps:
            job.wait_for_rows(min(done + 1, self.num_steps))
        elif code := job.end():  # the last step was saved before the fault: nothing is left to do
            return [f"the start of a run that is done ended with code {code}"]
        return self.differences() if self.judges_bits else []

    def differences(self) -> list[str]:
        """Return where the run is not as the reference: metrics, samples, weights; one phrase each."""
        return other_steps(self.run, self.reference) + self._other_weights()

    def broken(self, name: str) -> None:
        """Put the run aside, because it could not continue after a fault; the next one begins anew."""
        self.close()
        with suppress(OSError):
            shutil.move(self.run, self.folder / f"broken_{name}")

    def close(self) -> None:
        """Leave no process of the run behind. Harmless when repeated."""
        if self.job is not None:
            self.job.kill()
            self.job = None

    def end(self) -> None:
        """Leave no process and no temporary directory behind."""
        self.close()
        if "scratch" in vars(self):  # a start has made it
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
    """Return the steps of a run whose metrics or samples differ from another's; one phrase each."""
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
    """Do the first step of the run, in a start of its own; return why its bits cannot be judged.

    Where they are not those of the reference, the recipe gives other bits each time (as an engine on a
    GPU does without `enable_deterministic_inference`), and no fault is to blame.
    """
    drill.running()
    if not drill.judges_bits:
        return "engines that run freely give other bits each time; bits are not compared"
    if differ := drill.differences():
        drill.judges_bits = False
        return f"without a fault a second start differs already: {differ[0]}; bits are not compared"
    return ""


def problems_of_end(job: Job, code: int, codes: Sequence[int]) -> list[str]:
    """Return what is wrong with the end of a start: its code, its report, what it left behind."""
    found = job.left()
    if code not in codes:
        found.append(f"exit code {code}, expected {' or '.join(map(str, codes))}")
    printed = job.printed()
    found += [f"{sign} in {job.log}" for sign in SIGNS if sign in printed]
    if code in range(70, 80) and code != 75:  # those of a failure
        failure = job.failure()
        if failure is None:
            found.append("no RUN/failure.json of this start")
        elif failure.exit_code != code or not failure.command:
            found.append("RUN/failure.json has another code, or no command that continues")
        if "mrl: " not in printed:
            found.append("no block of text on the terminal")
    return found


def done_of(job: Job) -> int:
    """Return the steps that a run has recorded."""
    return num_rows(job.run)


def _for_drill(recipe: Recipe, run: Path, num_steps: int) -> Recipe:
    """Return the recipe with few steps, a checkpoint each, and nothing that leaves the folder."""
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
    """Return (steps, digests of the files that hold tensors) of a checkpoint."""
    files: Mapping[str, Any] = read_manifest(checkpoint)["files"]
    step = int(checkpoint.name.removeprefix("iter_"))
    return step, {name: f["sha256"] for name, f in files.items() if name.endswith(".distcp")}


def _same_samples(one: Path, other: Path) -> bool:
    """Whether two files of rollouts have the same samples, whichever weights' age they note."""
    rows = []
    for file in (one, other):
        try:
            rows.append([json.loads(line) for line in file.read_text().splitlines()])
        except (OSError, ValueError):
            return False
    return rows[0] == rows[1]
