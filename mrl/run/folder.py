"""The run folder: the files that a run writes and that a restart continues from.

OUTPUT_DIR/config.yaml            the resolved recipe
OUTPUT_DIR/history.jsonl          one object per start: what it changed; earlier recipes are in configs/
OUTPUT_DIR/metrics.jsonl          one object per step
OUTPUT_DIR/phase.json             what the run is doing now, from the watchdog (mrl/run/phase_file.py)
OUTPUT_DIR/timeline.jsonl         one object per step: who did what and when (disaggregated runs)
OUTPUT_DIR/rollouts/              step_000000.jsonl (and .safetensors with debug.save_rollouts)
OUTPUT_DIR/tokens/                step_000000.safetensors: values of engine and trainer per token
OUTPUT_DIR/diagnosis/             step_000000.json: the gap between engine and trainer, by layer
OUTPUT_DIR/evals/                 step_000000.json: the metrics of an evaluation, .jsonl: its samples;
                                  other_DIGEST/: evaluations with other settings than the run's
OUTPUT_DIR/checkpoints/           iter_0000010/, latest_checkpointed_iteration.txt
OUTPUT_DIR/logs/                  the engines' logs
OUTPUT_DIR/profile/               step_000010/: traces of a step of `profile.steps`
OUTPUT_DIR/trackers.json          how many steps each tracker of `logging` has received

When a restart repeats steps, their files are moved to dropped_0/ in the same folder (dropped_1/ for the
next such restart, and so on), and their rows of metrics.jsonl to OUTPUT_DIR/dropped_0/metrics.jsonl.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mrl.config import Recipe, dump_recipe
from mrl.errors import InputError
from mrl.run import metric_rows, rollout_rows
from mrl.run.aside import new_aside, set_aside, step_of_file
from mrl.run.changes import check_allowed, check_keys
from mrl.run.contents import contents_of
from mrl.run.evaluations import evaluation_file, rewind_evaluations, write_evaluation
from mrl.run.failure import clear_failure, newest_step
from mrl.run.history import History, Update, changes_to
from mrl.run.json_lines import add_line, as_line
from mrl.run.timeline import Timeline
from mrl.system.disk import refusing
from mrl.system.files import lock_folder, sync, write_whole
from parallel.checkpoint.manifest import folder_name, restore
from parallel.checkpoint.node_folder import node_folder

if TYPE_CHECKING:
    from mrl.types import SampleGroup


class RunFolder:
    """The paths of a run folder, and the methods that write its files. Only rank 0 writes."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.config = self.root / "config.yaml"
        self.metrics = self.root / "metrics.jsonl"
        self.rollouts = self.root / "rollouts"
        self.tokens = self.root / "tokens"
        self.diagnosis = self.root / "diagnosis"
        self.checkpoints = self.root / "checkpoints"
        self.logs = self.root / "logs"
        self.evals = self.root / "evals"
        self.history = History(self.root)
        self.timeline = Timeline(self.root / "timeline.jsonl")
        self._lock: IO[str] | None = None
        self._had_begun: bool | None = None
        """Whether `claim` found a run in the folder; None before `claim` is called."""
        self._settled = 0
        """The number of steps whose files are known to be on the disk."""

    def check(self, recipe: Recipe, allowed: Sequence[str] | None = ()) -> Update:
        """Return the changes that `recipe` makes to the run in this folder.

        `allowed` names the keys and branches given with `--allow`; None allows every key that can be
        allowed. Raises InputError if the folder cannot be created, or if the run has begun and a change
        is not permitted (`check_allowed`). Only rank 0 reads and compares the contents of files.
        """
        with refusing(self.root):  # a parent without access, or a name that is too long
            parent = next(p for p in (self.root, *self.root.absolute().parents) if p.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise InputError(
                f"output_dir {self.root}: {parent} is not a folder that can be written; choose another"
            )
        if self.root.absolute() == Path(recipe.model.path).absolute():
            raise InputError(
                f"output_dir {self.root} is the folder of model.path, which a run must not write to; "
                "choose another"
            )
        check_keys(allowed or ())
        contents = contents_of(recipe) if os.environ.get("RANK", "0") == "0" else {}
        if not self.config.exists():
            return Update((), tuple(allowed or ()), contents)
        changes = changes_to(self.root, recipe, contents)
        if self.has_begun:
            what = f"output_dir {self.root} holds a run of another recipe"
            wanted = [c.key for c in changes] if allowed is None else allowed
            check_allowed(changes, wanted, str(self.root), what)
        return Update(tuple(changes), tuple(allowed or ()), contents)

    @property
    def has_begun(self) -> bool:
        """Whether the folder has metrics or checkpoints of a run, which a start would continue."""
        has_rows = self.metrics.exists() and b"\n" in self.metrics.read_bytes()
        return has_rows or any(self.checkpoints.glob("iter_*"))

    def claim(self) -> None:
        """Lock the folder if a run has used it before. Call this before reading anything in it.

        No other process can then change what has been read. A new folder is locked only by `open`.
        Raises InputError while another run is writing to the folder, or if the folder cannot be
        accessed.
        """
        with refusing(self.root):
            has_lock = (self.root / ".lock").exists()
        if has_lock:
            with suppress(PermissionError):  # `check` reports a folder that cannot be written
                self._take_lock()
        if self._lock is not None:
            with refusing(self.root):
                of_session = [*self.root.glob("states/*"), *self.root.glob("samplers/*")]
                for folder in (self.checkpoints, *of_session):
                    restore(folder)
        self._had_begun = self.has_begun

    def _take_lock(self) -> None:
        if self._lock is not None:
            return
        with refusing(self.root):
            self._lock = lock_folder(self.root, "job")

    def open(self, recipe: Recipe, update: Update | None = None, step: int = 0) -> None:
        """Create and lock the folder, restore damaged metrics, and record the start in the history.

        `update` is the result of `check`, and `step` is the number of steps done. Raises InputError
        while another run is writing to the folder, or if another run has begun in the folder since
        `claim` found none.
        """
        with refusing(self.root):
            new = [p for p in (self.root, *self.root.absolute().parents) if not p.exists()]
            for folder in (self.rollouts, self.checkpoints, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
            for parent in (self.root, *(each.parent for each in new)):
                with suppress(PermissionError):  # this user may not open every parent
                    sync(parent)  # so that the folder exists after a power cut
        self._take_lock()
        if self._had_begun is False and self.has_begun:
            raise InputError(
                f"output_dir {self.root}: another job has begun a run there since this one started; "
                "start again to continue that run, or choose another output_dir"
            )
        update = update or Update()
        with refusing(self.root):
            clear_failure(self.root)
            snapshots = node_folder(self.root, recipe.checkpoint.snapshot_folder)
            saved = [root / folder_name(step) for root in (self.checkpoints, snapshots)]
            if found := next((each for each in saved if each.exists()), None):
                metric_rows.mend(self.metrics, found, step)
            self.history.add("start", step, update.changes, update.contents, allowed=update.allowed)
            dump_recipe(recipe, self.config)

    def close(self) -> None:
        """Release the lock on the folder, if this run holds it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def saved_step(self) -> int | None:
        """Return the number of steps done when the newest checkpoint was saved; None without one."""
        return newest_step(self.root)

    def rewind(self, step: int) -> None:
        """Prepare the folder for a run that repeats all steps from `step` on.

        The rows of these steps are removed from timeline.jsonl. Their rows of metrics.jsonl, and their
        files, are moved to the folder `dropped_0/` (or the next free number) next to them. Otherwise,
        `debug.load_rollouts` could read a mix of old steps and repeated steps.
        """
        for folder in (self.rollouts, self.tokens, self.diagnosis):
            set_aside(folder, step)
        # The run continues from the weights of evaluation `step`.
        rewind_evaluations(self.evals, step + 1)
        self._settled = step
        if self.metrics.exists():
            kept = metric_rows.rows_before(self.metrics, step)
            if dropped := self.metrics.read_bytes()[len(kept) :]:
                write_whole(new_aside(self.root) / self.metrics.name, dropped)
            write_whole(self.metrics, kept)
        self.timeline.rewind(step)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, leaving out a last line that a crash cut short.

        Raises InputError if a line is damaged.
        """
        return metric_rows.read(self.metrics)

    def kept(self, step: int) -> dict[str, bytes]:
        """Return the contents of the files to copy into the checkpoint of `step`, by file name."""
        return {metric_rows.COPY: metric_rows.rows_before(self.metrics, step)}

    def settle(self, step: int) -> None:
        """Sync the files of the steps up to `step` to the disk.

        This ensures that after a power cut, the files of all steps before a checkpoint still exist.
        """
        for folder in (self.rollouts, self.tokens, self.diagnosis, self.evals):
            steps = range(self._settled, step + 1)
            found = [f for f in folder.glob("step_*") if step_of_file(f) in steps]
            for path in (*found, folder) if found else ():
                sync(path)
        if self.metrics.exists():
            sync(self.metrics)
            sync(self.root)
        self._settled = step

    def add_metrics(self, metrics: dict[str, float]) -> None:
        """Append a line to metrics.jsonl. Errors are described in `add_line`."""
        add_line(self.metrics, metrics)

    def write_rollouts(self, step: int, lines: Iterable[bytes]) -> None:
        """Write rollouts/step_*.jsonl of a step. `lines` are the `rollout_lines` of its groups."""
        write_whole(self.rollout_file(step), lines)

    def write_evaluation(
        self, version: int, metrics: dict[str, float], lines: Iterable[bytes]
    ) -> None:
        """Write the files of an evaluation (`mrl.run.evaluations`).

        `version` is the version of the evaluated weights.
        """
        write_evaluation(self.evals, version, metrics, lines)

    def read_rollouts(self, step: int) -> list[dict[str, Any]]:
        """Return the rows that `write_rollouts` wrote. Raises InputError if a line is damaged."""
        return rollout_rows.read(self.rollout_file(step))

    def rollout_file(self, step: int) -> Path:
        return self.rollouts / f"step_{step:06d}.jsonl"

    def evaluation_file(self, version: int) -> Path:
        """Return the path of an evaluation's metrics file. `version` is that of the evaluated
        weights.

        The file exists only if the evaluation is complete.
        """
        return evaluation_file(self.evals, version)

    def token_file(self, step: int) -> Path:
        return self.tokens / f"step_{step:06d}.safetensors"

    def diagnosis_file(self, step: int) -> Path:
        return self.diagnosis / f"step_{step:06d}.json"


def saved_step(rollouts: str | Path, step: int) -> Path:
    """Return the path of the file in a run's `rollouts` folder that holds all tensors of a step."""
    return Path(rollouts) / f"step_{step:06d}.safetensors"


def check_saved_steps(rollouts: str, steps: Iterable[int]) -> None:
    """Raise InputError if the folder `rollouts` lacks the saved rollouts of one of `steps`."""
    for step in steps:
        file = saved_step(rollouts, step)
        if not file.is_file():
            raise InputError(
                f"debug.load_rollouts: no {file}; write it with debug.save_rollouts=true, and keep "
                "train.num_steps within the saved steps"
            )


def rollout_lines(step: int, group: SampleGroup, completions: Sequence[str]) -> bytes:
    """Return a group as lines of `rollouts/step_*.jsonl`, one per sample.

    Weights have the version N after N steps. `weight_version` is the version that sampled the sample's
    last token. `staleness` is `step` minus the oldest version that sampled a token of the sample.
    """
    rewards = [] if group.rewards is None else group.rewards.tolist()
    advantages = [] if group.advantages is None else group.advantages.tolist()
    return b"".join(
        as_lines(
            {
                "group_id": sample.group_id,
                "prompt_id": group.prompt.prompt_id,
                "source": group.prompt.source,
                "prompt": group.prompt.content,
                "completion": text,
                "reward": rewards[i],
                **parts_of_sample(group, i),
                "advantage": advantages[i] if advantages else None,
                "weight_version": sample.weight_versions[-1].version,
                "staleness": step - min(s.version for s in sample.weight_versions),
                "prompt_len": sample.prompt_len,
                "response_len": sample.num_generated,
                "finish_reason": sample.finish_reason,
            }
            for i, (sample, text) in enumerate(zip(group.samples, completions, strict=True))
        )
    )


def parts_of_sample(group: SampleGroup, index: int) -> dict[str, dict[str, float]]:
    """Return a dict with the field `reward_parts` of a sample; empty if the reward has no parts."""
    if group.reward_parts is None:
        return {}
    return {"reward_parts": {name: float(v[index]) for name, v in group.reward_parts.items()}}


def as_lines(rows: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    """Yield the rows as lines of JSON."""
    return (as_line(row).encode() for row in rows)
