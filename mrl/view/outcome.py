"""The outcome of a run: final reward, evaluations, mismatch, and the best and worst samples."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from mrl.errors import InputError
from mrl.run import rollout_rows
from mrl.system.json_text import is_number, parse_row
from mrl.view.series import short, with_step

ENDS = 5
"""Number of steps at the beginning of a run, and also at its end, over which the reward is
averaged."""
Z = 1.96
"""Half the width of a 95% confidence interval, as a multiple of the standard error."""
MAX_TURN = 1500
"""The largest number of characters that are shown of a turn; the middle of a longer turn is left
out."""
MAX_TURNS = 20
"""The largest number of turns that are shown of a conversation; the middle of a longer conversation
is left out."""
NUM_SHOWN = 2
"""The page shows at most this many best samples and this many worst samples."""

Row = dict[str, Any]


class Totals:
    """What `figures` takes from the rows of a run. Rows are added one by one, in their order."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.first_rewards: list[float] = []
        self.last_rewards: deque[float] = deque(maxlen=ENDS)
        self.num_rewards = self.num_gaps = 0
        self.sum_of_gaps, self.largest_gap = 0.0, -math.inf
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        reward, mean, most = (
            row.get(key, math.nan)
            for key in ("reward/mean", "mismatch/logprob_abs_mean", "mismatch/logprob_abs_max")
        )
        if _is_finite(reward):
            self.num_rewards += 1
            self.last_rewards.append(reward)
            if len(self.first_rewards) < ENDS:
                self.first_rewards.append(reward)
        if _is_finite(mean):
            self.num_gaps += 1
            self.sum_of_gaps += mean
        if _is_finite(most):
            self.largest_gap = max(self.largest_gap, most)


class Figure(NamedTuple):
    """A number at the top of the page."""

    name: str
    value: str
    detail: str


def read_evaluations(run: Path, notes: list[str]) -> list[Row]:
    """Return one row from each file evals/step_*.json, by ascending step. Damaged files are left
    out, and a note is appended to `notes`.

    A row has the metrics `eval/*`, and `step`, the number of steps after which the weights were
    evaluated.
    """
    rows = []
    for file in sorted((run / "evals").glob("step_*.json")):
        try:
            rows.append(read_evaluation(file))
        except (OSError, ValueError) as error:
            notes.append(f"The evaluation {file.name} is left out: {error}.")
    return sorted(rows, key=lambda row: row["step"])


def read_evaluation(file: Path) -> Row:
    """Return the row of an evaluation from its file. Raises OSError, or ValueError if the file is
    damaged."""
    row = with_step(parse_row(file.read_bytes()))
    if row is None:
        raise ValueError("it has no step")
    return row


def with_evaluations(rows: list[Row], evaluations: Sequence[Row]) -> list[Row]:
    """Return the rows of metrics.jsonl, and after them a row for the evaluation of the final weights.

    That evaluation needs a row of its own, because no step follows it. Other evaluations are in the
    row of the step that follows them.
    """
    last = rows[-1]["step"] if rows else -1
    found = {row["step"]: row for row in evaluations if row["step"] > last}
    return [*rows, *(found[step] for step in sorted(found))]


def figures(totals: Totals, evaluations: Sequence[Row]) -> list[Figure]:
    """Return the final reward, the score of each evaluation set, and the difference between the
    log-probs of engine and trainer."""
    found = []
    if count := min(ENDS, totals.num_rewards):
        first, last = (sum(part) / count for part in (totals.first_rewards, totals.last_rewards))
        over = f"of the first {count} steps" if count > 1 else "of the first step"
        found.append(Figure(
            f"mean reward of the last {count} steps" if count > 1 else "mean reward of the last step",
            _shown(last), f"{_shown(first)} {over}",
        ))  # fmt: skip
    found += [_score(key, evaluations) for key in _score_keys(evaluations)]
    if totals.num_gaps and totals.largest_gap > -math.inf:
        found.append(Figure(
            "engine against trainer, |\u0394 log-prob|", f"{totals.sum_of_gaps / totals.num_gaps:.1e}",
            f"mean of all steps; {totals.largest_gap:.1e} at most",
        ))  # fmt: skip
    return found


def _score_keys(evaluations: Sequence[Row]) -> list[str]:
    """Return the key of one score for each evaluation set in the last evaluation: `avg@k`, or the
    first `pass@k` if there is no `avg@k`."""
    sets: dict[str, list[str]] = {}
    for key in evaluations[-1] if evaluations else ():
        parts = key.split("/")
        if len(parts) == 3 and parts[2].startswith(("avg@", "pass@")) and "_" not in parts[2]:
            sets.setdefault(parts[1], []).append(key)
    return [min(keys, key=lambda key: "/avg@" not in key) for keys in sets.values()]


def _score(key: str, evaluations: Sequence[Row]) -> Figure:
    scored = [row for row in evaluations if _is_finite(row.get(key))]
    name = key.removeprefix("eval/").replace("/", ", ")
    if not scored:
        return Figure(name, "\u2013", "no finite score")
    first, last = scored[0], scored[-1]
    when = [
        f"after {row['step']} steps" if row["step"] else "before the first step"
        for row in (first, last)
    ]
    detail = when[1] if first is last else f"{when[1]}; {_interval(first, key)} {when[0]}"
    if _is_finite(last.get(f"{key}_stderr")):
        name += ", 95% interval"
    return Figure(name, _interval(last, key), detail)


def _interval(row: Row, key: str) -> str:
    error: Any = row.get(f"{key}_stderr")
    spread = f" \u00b1 {Z * error:.3f}" if _is_finite(error) else ""
    return f"{_shown(row[key])}{spread}"


def best_and_worst(run: Path) -> list[Row]:
    """Return the samples with the highest and the lowest reward in the newest step that has
    samples.

    A sample has `name` (`best` or `worst`), `step`, `reward`, and `turns`, a list of pairs (role,
    text). Samples without a finite reward are left out. The best samples have different prompts,
    and so do the worst. The result is empty if there are no samples, or if the file is damaged.
    """
    numbers = {
        file: file.stem.removeprefix("step_") for file in (run / "rollouts").glob("step_*.jsonl")
    }
    steps = {file: int(text) for file, text in numbers.items() if text.isascii() and text.isdigit()}
    for file in sorted(steps, key=lambda file: -steps[file]):
        try:
            rows = [row for row in rollout_rows.read(file) if _is_finite(row["reward"])]
        except InputError:  # the sample browser has a note
            return []
        if rows:
            return _chosen(steps[file], rows)
    return []


def _chosen(step: int, rows: Sequence[Row]) -> list[Row]:
    ranked = sorted(rows, key=lambda row: row["reward"])
    below = [row for row in ranked if row["reward"] < ranked[-1]["reward"]]
    worst = _different(below or ranked)
    best = _different(row for row in reversed(ranked) if row["reward"] > worst[-1]["reward"])
    return [
        {
            "name": name,
            "step": step,
            "reward": _shown(row["reward"]),
            "turns": _turns(rollout_rows.conversation(row["prompt"], row["completion"])),
        }
        for name, part in (("best", best), ("worst", worst))
        for row in part
    ]


def _different(rows: Iterable[Row]) -> list[Row]:
    """Return the first row of each prompt, for the first NUM_SHOWN different prompts."""
    found: dict[str, Row] = {}
    for row in rows:
        if len(found) < NUM_SHOWN:
            found.setdefault(str(row["prompt"]), row)
    return list(found.values())


def _turns(turns: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return a conversation, as pairs (role, text), shortened for the page: without the middle
    turns if there are many, and without the middle of each long text."""
    half, num_left_out = MAX_TURNS // 2, len(turns) - MAX_TURNS
    if num_left_out > 0:
        turns = [*turns[:half], ("", f"[... {num_left_out} turns ...]"), *turns[-half:]]
    return [(role, _middle_out(text)) for role, text in turns]


def _middle_out(text: str) -> str:
    half = MAX_TURN // 2
    return text if len(text) <= MAX_TURN else f"{text[:half]} [...] {text[-half:]}"


def _is_finite(value: Any) -> TypeGuard[float]:
    return is_number(value) and math.isfinite(value)


def _shown(value: float) -> str:
    number = short(float(value), 3)
    return "\u2013" if number is None else f"{number:g}"
