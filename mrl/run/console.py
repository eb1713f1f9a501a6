"""Terminal output of rank 0. In a log file the text is the same, without control codes.

Model output is untrusted and is escaped before it is printed.
"""

from __future__ import annotations

import errno
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import localtime, monotonic, strftime
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mrl.run.activities import WAIT, main_cause
from mrl.run.gap_parts import LEVELS, quantization_in_words
from mrl.run.rollout_rows import conversation
from mrl.system.printable import escape

COLUMNS = (
    ("reward/mean", "reward", "8.4f"),
    ("response_len/mean", "len", "7.1f"),
    ("response_len/max", "longest", "7.0f"),
    ("response_len/truncated", "cut off", "7.4f"),
    ("loss/total", "loss", "10.3e"),
    ("grad_norm", "grad", "9.3f"),
    ("mismatch/logprob_abs_max", "mismatch", "9.2e"),
    ("routing/disagreement", "reroute", "7.4f"),
    ("throughput/step_tokens_per_s", "tokens/s", "8.1f"),
    ("throughput/mfu", "MFU", "6.4f"),
    ("time/step_s", "s/step", "7.2f"),
    ("time/timestamp", "time", "8"),
)
"""The columns of a step line, as (metric key, heading, number format)."""
ONLY_WIDE = ("response_len/max", "response_len/truncated", "throughput/step_tokens_per_s",
             "throughput/mfu", "time/timestamp")  # fmt: skip
"""Metrics that a terminal narrower than WIDE characters does not show. A log file shows all metrics."""
STEP_WIDTH, DONE_WIDTH = 5, 10
"""Widths in characters of the columns `step` and `done` (see `step_line`)."""
WIDE = 132
WAITS_WIDTH = 62
"""Width in characters of the text of `who_waits` at the end of a disaggregated run's step line. A
narrow terminal shows this text on a line of its own."""
PLOT_HEIGHT = 8
MAX_TURNS = 4
"""The largest number of turns of a sample that are printed."""
MAX_SAMPLE_CHARS = 400
LOG_WIDTH = 1000
GAP = 2
"""Spaces after a column of a table."""
LAST_WIDTH = 24
"""The last column of a table is at least this wide, unless all its cells are shorter."""


class _Output(Console):
    """A console that raises BrokenPipeError if the reader of standard output has closed the pipe,
    where rich would exit with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, "the reader of standard output has closed the pipe")


def pairs(rows: list[tuple[str, str]], *, console: Console | None = None) -> None:
    """Print (name, value) rows, such as the plan of a run."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(escape(name), Text(escape(value)))
    (console or _console()).print(table)


def table(
    title: str,
    header: tuple[str, ...],
    rows: list[tuple[str, ...]],
    *,
    console: Console | None = None,
) -> None:
    """Print a table with a title; only the cells of its last column may wrap. A table that does not
    fit is wider than the terminal, because a number that is cut off reads as another number."""
    console = console or _console()
    _line(console, f"\n{title}", style="bold")
    cells = [[escape(cell) for cell in row] for row in (header, *rows)]
    *widths, last = (max(map(cell_len, column)) for column in zip(*cells, strict=True))
    last = min(last, LAST_WIDTH)
    needed = sum(widths) + last + GAP * len(header)
    shown = Table(box=None, padding=(0, GAP, 0, 0), header_style="dim")
    for name in cells[0][:-1]:
        shown.add_column(name, no_wrap=True)
    shown.add_column(cells[0][-1], overflow="fold", min_width=last)
    for row in cells[1:]:
        shown.add_row(*map(Text, row))
    shown.width = needed if needed > console.width else None
    console.print(shown, crop=False)


def step_line(
    metrics: Mapping[str, float],
    *,
    num_steps: int | None = None,
    name: str = "",
    is_first: bool = False,
    console: Console | None = None,
) -> None:
    """Print the metrics of a step in one aligned line; a missing metric is shown as `-`. The loss
    of a client's session, which has no router loss, is `loss/policy`.

    Column `step` is counted from 0, as in metrics.jsonl, in file names and in `mrl why RUN STEP`.
    Column `done` is the number of completed steps, out of `num_steps` if that is given. The heading
    is printed above every 20th step and above the first step of this start (`is_first`). `name` is
    the tenant's name in a service, and empty otherwise. A step with a decomposition of a quantised
    engine's gap has the text of `gap_by_cause` on a line of its own.
    """
    console = console or _console()
    if "loss/policy" in metrics:
        metrics = {"loss/total": metrics["loss/policy"], **metrics}
    step, is_wide = int(metrics["step"]), console.width >= WIDE
    columns = [each for each in COLUMNS if is_wide or each[0] not in ONLY_WIDE]
    gap = 2 if is_wide else 1
    if is_first or step % 20 == 0:
        head = "".join(f"{name:>{_width(form) + gap}}" for _, name, form in columns)
        _line(console, f"{'step':>{STEP_WIDTH}}{'done':>{DONE_WIDTH}}{head}", style="bold")
    done = f"{step + 1}/{num_steps}" if num_steps else f"{step + 1}"
    cells = "".join(
        f"{_step_cell(metrics.get(key), key, form):>{_width(form) + gap}}"
        for key, _, form in columns
    )
    waits = who_waits(metrics) if WAIT in metrics else ""
    fits = console.width >= WIDE + WAITS_WIDTH
    more = [text for text in (name, waits if fits else "") if text]
    count = f"{step:>{STEP_WIDTH}}{done:>{DONE_WIDTH}}"
    _line(console, "  ".join([f"{count}{cells}", *more]))
    for text in (waits if not fits else "", gap_by_cause(metrics)):
        if text:
            _line(console, f"{'':>{STEP_WIDTH + DONE_WIDTH}}  {text}", style="dim")


def who_waits(metrics: Mapping[str, float]) -> str:
    """Describe a disaggregated step: the shares of its time in which engines and trainer were idle,
    and how many finished groups wait to be trained on."""

    def percent(role: str) -> str:
        share = metrics.get(f"async/{role}_idle_share")
        return "-" if share is None or not math.isfinite(share) else f"{share:.0%}"

    cause = main_cause(metrics)
    why = f" ({cause})" if cause else ""
    queue = _cell(metrics.get("async/queued_groups"), ".0f")
    return (
        f"rollout idle {percent('rollout')}{why}, trainer waits {percent('trainer')}, queue {queue}"
    )


def gap_by_cause(metrics: Mapping[str, float]) -> str:
    """Say how much of the gap between engine and trainer comes from the engine's quantised weights;
    empty in a step without a decomposition, and if the engine does not quantise."""
    key = "logprob_abs_mean"
    found = {level: metrics.get(f"decompose/{level}/{key}") for level in LEVELS}
    levels = {
        level: {key: value if math.isfinite(value) else None}
        for level, value in found.items()
        if value is not None
    }
    return quantization_in_words(levels)


def evaluation(metrics: Mapping[str, float], *, console: Console | None = None) -> None:
    """Print metrics with names like `eval/SET/KEY`, in one line for each eval set."""
    sets: dict[str, list[str]] = {}
    for key, value in metrics.items():
        _, name, what = key.split("/", 2)
        sets.setdefault(name, []).append(f"{what} {value:.4g}")
    rows = [(name, "  ".join(values)) for name, values in sets.items()]
    table("Evaluation", ("set", "numbers"), rows, console=console)


def warning(text: str, *, console: Console | None = None) -> None:
    """Print a warning on one line. `text` may quote untrusted output, which is escaped."""
    _line(console or _console(), f"warning: {escape(text)}", style="yellow")


def note(text: str, *, console: Console | None = None) -> None:
    """Print a line about something that is as it should be. `text` is escaped."""
    _line(console or _console(), escape(text))


def warn_on(is_main: bool) -> Callable[[str], None]:
    """Return `warning` on the main rank, and a function that prints nothing on all other ranks."""
    return warning if is_main else lambda text: None


@contextmanager
def progress(description: str, *, name: str = "", console: Console | None = None) -> Iterator[None]:
    """Show a spinner while the `with` block runs, and then print how many seconds the block took.

    `name` is the tenant's name in a service, which precedes the description, and empty otherwise.
    In a log file, a line before the block replaces the spinner. After an exception in the block,
    the seconds are not printed.
    """
    console = console or _console()
    text, start = escape(f"{name}: {description}" if name else description), monotonic()
    if console.is_terminal:
        with console.status(Text(text)):
            yield
    else:
        _line(console, f"{text} ...")
        yield
    _line(console, f"{text}: {monotonic() - start:.1f} s")  # not reached after an exception


def summary(
    rewards: list[float],
    best: Mapping[str, Any],
    worst: Mapping[str, Any],
    run_folder: str | Path,
    next_command: str,
    *,
    console: Console | None = None,
) -> None:
    """Print the reward curve, the best and the worst sample, the run folder, and the next command.

    Each sample has `prompt`, `completion` and `reward`. A prompt of chat messages is printed as a
    conversation, with a line for each of its last turns.
    """
    console = console or _console()
    unicode = (console.encoding or "").lower().startswith("utf")
    for line in curve(rewards, width=min(console.width, 100), unicode=unicode):
        _line(console, line)
    for name, sample in (("best", best), ("worst", worst)):
        _line(console, f"{name} sample, reward {_cell(sample.get('reward'), '.4f')}", style="bold")
        turns = conversation(sample.get("prompt", ""), sample.get("completion", ""))
        if len(turns) > MAX_TURNS:
            _line(console, f"  ({len(turns) - MAX_TURNS} earlier turns)")
        for role, text in turns[-MAX_TURNS:]:
            _line(console, f"  {escape(role):<10} {_shorten(escape(text))}")
    _line(console, f"run folder  {escape(str(run_folder))}")
    _line(console, f"next        {escape(next_command)}")


def curve(values: list[float], *, width: int, unicode: bool = True) -> list[str]:
    """Return the lines of a bar chart of `values` over steps, at most `width` characters wide.

    NaN leaves a gap. If there are more values than columns, each column shows the mean of several
    values. There are no lines if no value is finite.
    """
    label_width = 9
    columns = _bin(values, max(1, width - label_width - 2))
    finite = [value for value in columns if math.isfinite(value)]
    if not finite:
        return []
    low, high = min(finite), max(finite)
    levels = " ▁▂▃▄▅▆▇█" if unicode else " .:#"
    full = len(levels) - 1
    heights = [_height(value, low, high, PLOT_HEIGHT * full) for value in columns]
    edge = "┤" if unicode else "|"
    labels = {PLOT_HEIGHT - 1: f"{high:.4g}", 0: f"{low:.4g}"}
    if low == high:  # the bars end in the middle, and so does the only number
        labels = {PLOT_HEIGHT // 2 - 1: f"{low:.4g}"}
    lines = []
    for row in reversed(range(PLOT_HEIGHT)):
        label = labels.get(row, "")
        bars = "".join(levels[min(max(height - row * full, 0), full)] for height in heights)
        lines.append(f"{label:>{label_width}} {edge}{bars}".rstrip())
    lines.append(f"{'':>{label_width}}  reward over {len(values)} steps"[:width])
    return lines


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SAMPLE_CHARS else text[: MAX_SAMPLE_CHARS - 3] + "..."


def _bin(values: list[float], num_columns: int) -> list[float]:
    """Return `values` or, if there are more than `num_columns`, the means of `num_columns` slices.

    The slices are about equally long. Values that are not finite are left out of the means.
    """
    if len(values) <= num_columns:
        return values
    columns = []
    for index in range(num_columns):
        start = index * len(values) // num_columns
        stop = (index + 1) * len(values) // num_columns
        part = [value for value in values[start:stop] if math.isfinite(value)]
        columns.append(sum(part) / len(part) if part else math.nan)
    return columns


def _height(value: float, low: float, high: float, max_height: int) -> int:
    """Return the height of a bar, from 1 for `low` to `max_height` for `high`.

    The height is 0 if `value` is not finite, and half of `max_height` if `low` equals `high`.
    """
    if not math.isfinite(value):
        return 0
    share = (value - low) / (high - low) if high > low else 0.5
    return max(1, round(share * max_height))


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else f"{float(value):{form}}".strip()


def _step_cell(value: Any, key: str, form: str) -> str:
    """Format a metric for its column of the step line.

    A number that is too wide is written with an exponent. The timestamp is written as a local time.
    """
    if key == "time/timestamp" and value is not None:
        return strftime("%H:%M:%S", localtime(value))
    text = _cell(value, form)
    wide = (f"{float(value):.{digits}e}" for digits in (2, 1, 0)) if value is not None else iter(())
    while len(text) > _width(form) and (shorter := next(wide, None)) is not None:
        text = shorter
    return text


def _width(form: str) -> int:
    return int(form.split(".", maxsplit=1)[0])


def _line(console: Console, text: str, style: str = "") -> None:
    """Print a line without markup, highlighting or wrapping.

    Characters that the terminal cannot encode are escaped.
    """
    encoding = console.encoding or "utf-8"
    safe = text.encode(encoding, "backslashreplace").decode(encoding)
    console.print(Text(safe, style=style), soft_wrap=True, highlight=False)


def _console() -> Console:
    # Made for each call, because sys.stdout may have been replaced since the last one (tests,
    # redirection). Lines in a log file or a pipe are not wrapped, so that paths can be searched for.
    width = None if sys.stdout.isatty() else LOG_WIDTH
    return _Output(width=width, highlight=False, markup=False)
