"""Comparison of two runs: recipe, versions, data order, samples, metrics, and where they diverge.

Within a step, prompts are compared first, then samples, then metrics, because different prompts cause
different samples, and different samples cause different metrics. Metrics that differ even between two
starts of the same run are left out: times, memory, throughput, `async/*`, `guard/ratio_error*` and
`guard/clip_budget*`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.config import load_recipe
from mrl.config.suggest import all_keys
from mrl.errors import InputError
from mrl.run.aside import step_of_file
from mrl.run.changes import NOT_GIVEN, flatten
from mrl.run.folder import RunFolder, saved_step
from mrl.run.json_lines import finite_or_null
from parallel.checkpoint.manifest import Damaged, candidates, read_manifest

if TYPE_CHECKING:
    from mrl.types import Sample

MACHINE = (
    *("time/", "memory/", "throughput/", "async/"),
    *("guard/ratio_error", "guard/clip_budget"),  # only of a step with a pass before the update
)
"""Prefixes of the metrics that differ between two starts of the same run."""
NOT_ASKED = ("output_dir",)


@dataclass(frozen=True)
class Pair:
    """A named value in each of the two runs. For a run that has no such value, it is None, or NOT_GIVEN
    for a free key of the recipe and for a metric, where null is a value."""

    key: str
    a: Any
    b: Any

    @property
    def difference(self) -> float | None:
        """The relative difference `|a - b| / max(|a|, |b|)`; None if `a` or `b` is not a number."""
        numbers = [v for v in (self.a, self.b) if isinstance(v, (int, float))]
        if len(numbers) < 2:
            return None
        return abs(numbers[0] - numbers[1]) / max(abs(numbers[0]), abs(numbers[1]), 1e-300)


@dataclass(frozen=True)
class Divergence:
    """The first step in which the prompts, samples or metrics of two runs differ."""

    step: int
    pairs: list[Pair]
    """The values in which the two runs differ in this step."""


@dataclass(frozen=True)
class Comparison:
    """The result that `mrl diff` prints.

    If all lists are empty and `prompts`, `samples` and `metrics` are None, the runs do not differ in
    the steps that both have.
    """

    steps_a: int
    steps_b: int
    config: list[Pair]
    versions: list[Pair]
    prompts: Divergence | None
    """The first step with different prompt ids. The key of each of its pairs is `sample N`, where N is
    the sample's index in the step."""
    samples: Divergence | None
    """The first step in which a sample differs although the prompts are the same. It has one pair: the
    first text, token or log-prob that differs."""
    metrics: Divergence | None

    @property
    def first_step(self) -> int | None:
        """The first step in which the runs differ; None if they do not differ."""
        steps = [p.step for p in (self.prompts, self.samples, self.metrics) if p is not None]
        return min(steps, default=None)

    def verdict(self) -> str:
        """Return one line that says in which step the runs first differ, and in what.

        If they do not differ, the line says so.
        """
        for name in ("prompts", "samples", "metrics"):
            found: Divergence | None = getattr(self, name)
            if found is not None and found.step == self.first_step:
                before = f", the same up to step {found.step - 1}" if found.step else ""
                return f"other {name} in step {found.step}{before}"
        return f"the same in the {min(self.steps_a, self.steps_b)} steps that both have"

    def as_json(self) -> dict[str, Any]:
        found = dataclasses.asdict(self) | {"first_step": self.first_step}
        return finite_or_null(found | {"verdict": self.verdict()})


def compare_runs(a: Path, b: Path) -> Comparison:
    """Compare two runs. Raises InputError if one of the paths is not a run folder."""
    one, two = open_run(a), open_run(b)
    rows = [{row["step"]: row for row in folder.read_metrics()} for folder in (one, two)]
    recipes = [flatten(load_recipe(folder.config).model_dump()) for folder in (one, two)]
    recipes = [{k: v for k, v in recipe.items() if k not in NOT_ASKED} for recipe in recipes]
    for key in recipes[0].keys() | recipes[1].keys():
        # A section that is null has no keys below it. A free key without a value is not null.
        for recipe in recipes:
            recipe.setdefault(key, None if key in all_keys() else NOT_GIVEN)
    prompts, samples = _rollouts(one, two)
    return Comparison(
        len(rows[0]),
        len(rows[1]),
        differences(recipes[0], recipes[1]),
        differences(_versions(one), _versions(two)),
        prompts,
        samples,
        _metrics(*rows),
    )


def open_run(path: Path) -> RunFolder:
    """Return the run folder at `path`. Raises InputError if there is none."""
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise InputError(f"{path}: no config.yaml there; give the output_dir of a run")
    return folder


def differences(
    a: Mapping[str, Any], b: Mapping[str, Any], leave_out: tuple[str, ...] = ()
) -> list[Pair]:
    """Return the keys whose values differ or that only one of the mappings has, with both values.

    Two NaNs count as equal. Keys that begin with one of `leave_out` are ignored.
    """
    keys = [key for key in sorted(a.keys() | b.keys()) if not key.startswith(leave_out)]
    pairs = [Pair(key, a.get(key), b.get(key)) for key in keys]
    return [pair for pair in pairs if not _same(pair.a, pair.b)]


def _same(a: Any, b: Any) -> bool:
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return both_nan or a == b


def _versions(folder: RunFolder) -> dict[str, str]:
    """Return the package versions that are recorded in the newest checkpoint.

    Checkpoints whose manifest cannot be read are skipped. The result is empty if no checkpoint
    remains.
    """
    for checkpoint in candidates(folder.checkpoints):
        with suppress(Damaged, InputError):
            return read_manifest(checkpoint).get("versions", {})
    return {}


def _metrics(a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]]) -> Divergence | None:
    for step in sorted(a.keys() & b.keys()):
        # The keys of a row depend on the step. A metric that is null was computed, and is not finite.
        rows = [
            {**dict.fromkeys(a[step].keys() | b[step].keys(), NOT_GIVEN), **row}
            for row in (a[step], b[step])
        ]
        if pairs := differences(rows[0], rows[1], MACHINE):
            return Divergence(step, sorted(pairs, key=lambda p: -(p.difference or 0.0)))
    return None


def _rollouts(one: RunFolder, two: RunFolder) -> tuple[Divergence | None, Divergence | None]:
    """Return two values: the first step whose prompts differ, and the first whose samples differ.

    Each value is None if there is no such step. Steps are compared in order up to the first whose
    prompts differ; the samples are compared only in the steps before that one.
    """
    samples: Divergence | None = None
    for step in _common_steps(one, two):
        a, b = one.read_rollouts(step), two.read_rollouts(step)
        if pairs := differences(_prompt_ids(a), _prompt_ids(b)):
            return Divergence(step, pairs), samples
        if samples is None:
            samples = _samples(one, two, step, a, b)
    return None, samples


def _prompt_ids(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {f"sample {i}": row.get("prompt_id", "") for i, row in enumerate(rows)}


def _common_steps(one: RunFolder, two: RunFolder) -> list[int]:
    numbers = [
        {step_of_file(file) for file in folder.rollouts.glob("step_*.jsonl")}
        for folder in (one, two)
    ]
    return sorted(step for step in numbers[0] & numbers[1] if step >= 0)


def _samples(
    one: RunFolder, two: RunFolder, step: int, a: list[dict], b: list[dict]
) -> Divergence | None:
    """Compare the samples of a step, and return the first difference; None if all are the same.

    Tokens and log-probs are compared if both runs have saved them; otherwise texts are compared.
    """
    files = [saved_step(folder.rollouts, step) for folder in (one, two)]
    if all(file.is_file() for file in files):
        from mrl.run.rollouts import load_groups  # with torch, which texts do not need

        both = [[s for g in load_groups(file) for s in g.samples] for file in files]
        if len(both[0]) != len(both[1]):
            return Divergence(step, [Pair("saved samples", len(both[0]), len(both[1]))])
        for i, (mine, theirs) in enumerate(zip(*both, strict=True)):
            if pair := _tokens(i, mine, theirs):
                return Divergence(step, [pair])
        return None
    for i, (mine, theirs) in enumerate(zip(a, b, strict=True)):
        if mine["completion"] != theirs["completion"]:
            pair = Pair(f"sample {i}, text", mine["completion"], theirs["completion"])
            return Divergence(step, [pair])
    return None


def _tokens(number: int, a: Sample, b: Sample) -> Pair | None:
    """Return the first token that differs or, if all are equal, the first log-prob that differs.

    The result is None if the samples are the same. `number` is the index of both samples in the step.
    """
    import torch

    for what, mine, theirs in (
        ("token", a.token_ids, b.token_ids),
        ("rollout log-prob", a.rollout_logprobs, b.rollout_logprobs),
    ):
        if torch.equal(mine, theirs):
            continue
        common = min(len(mine), len(theirs))
        differs = (mine[:common] != theirs[:common]).nonzero()
        place = int(differs[0]) if len(differs) else common
        values = [t[place].item() if place < len(t) else None for t in (mine, theirs)]
        return Pair(f"sample {number}, {what} {place}", *values)
    return None
