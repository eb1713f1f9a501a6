"""Prints what rank 0 shows in the terminal; in a log file the same text without control codes.

Model output is untrusted: it is escaped before it reaches the terminal.
"""

from __future__ import annotations

import math
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import localtime, monotonic, strftime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mrl.run.activities import WAIT, main_cause

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
"""(metric key, heading, number format) of a step line."""
ONLY_WIDE = ("response_len/max", "response_len/truncated", "throughput/step_tokens_per_s",
             "throughput/mfu", "time/timestamp")  # fmt: skip
"""Left out where the console has fewer than WIDE columns; a log file has them all."""
STEP_WIDTH, DONE_WIDTH = 5, 10
"""The widths of the columns of the step's number and of the completed steps."""
WIDE = 132
WAITS_WIDTH = 62
"""Columns of what a disaggregated run adds to a step line; a narrow console has it on another line."""
PLOT_HEIGHT = 8
MAX_SAMPLE_CHARS = 400
LOG_WIDTH = 1000


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
    """Print a titled table; the last column folds, the others keep their lines."""
    console = console or _console()
    _line(console, f"\n{title}", style="bold")
    shown = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for number, name in enumerate(header):
        last = number == len(header) - 1
        shown.add_column(escape(name), no_wrap=not last, overflow="fold")
    for row in rows:
        shown.add_row(*(Text(escape(cell)) for cell in row))
    console.print(shown)


def step_line(
    metrics: Mapping[str, float],
    *,
    num_steps: int | None = None,
    name: str = "",
    is_first: bool = False,
    console: Console | None = None,
) -> None:
    """Print one aligned line; a metric that is off shows as `-`. `name`: whose step it is.

    `step` is the number in metrics.jsonl, in the names of the files and in `mrl why RUN STEP`, counted
    from 0; `done` is the number of completed steps, of `num_steps`. The heading is printed above every
    20th step, and above the first one of this start (`is_first`).
    """
    console = console or _console()
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
    if waits and not fits:
        _line(console, f"{'':>{STEP_WIDTH + DONE_WIDTH}}  {waits}", style="dim")


def who_waits(metrics: Mapping[str, float]) -> str:
    """Return in a few words which role of a disaggregated run was idle in a step, and why."""

    def percent(role: str) -> str:
        share = metrics.get(f"async/{role}_idle_share")
        return "-" if share is None or not math.isfinite(share) else f"{share:.0%}"

    cause = main_cause(metrics)
    why = f" ({cause})" if cause else ""
    queue = _cell(metrics.get("async/queued_groups"), ".0f")
    return (
        f"rollout idle {percent('rollout')}{why}, trainer waits {percent('trainer')}, queue {queue}"
    )


def evaluation(metrics: Mapping[str, float], *, console: Console | None = None) -> None:
    """Print `eval/SET/KEY` numbers, one line for each set."""
    sets: dict[str, list[str]] = {}
    for key, value in metrics.items():
        _, name, what = key.split("/", 2)
        sets.setdefault(name, []).append(f"{what} {value:.4g}")
    rows = [(name, "  ".join(values)) for name, values in sets.items()]
    table("Evaluation", ("set", "numbers"), rows, console=console)


def warning(text: str, *, console: Console | None = None) -> None:
    """Print one line that the user should see; `text` may quote untrusted output."""
    _line(console or _console(), f"warning: {escape(text)}", style="yellow")


@contextmanager
def progress(description: str, *, console: Console | None = None) -> Iterator[None]:
    """Show a spinner while something slow runs; without a terminal, a line before and after."""
    console = console or _console()
    text, start = escape(description), monotonic()
    if console.is_terminal:
        with console.status(Text(text)):
            yield
    else:
        _line(console, f"{text} ...")
        yield
    _line(console, f"{text}: {monotonic() - start:.1f} s")  # not after a failure


def summary(
    rewards: list[float],
    best: Mapping[str, Any],
    worst: Mapping[str, Any],
    run_folder: str | Path,
    next_command: str,
    *,
    console: Console | None = None,
) -> None:
    """Print the reward curve, the best and the worst sample (`prompt`, `completion`, `reward`)."""
    console = console or _console()
    unicode = (console.encoding or "").lower().startswith("utf")
    for line in curve(rewards, width=min(console.width, 100), unicode=unicode):
        _line(console, line)
    for name, sample in (("best", best), ("worst", worst)):
        _line(console, f"{name} sample, reward {_cell(sample.get('reward'), '.4f')}", style="bold")
        for part in ("prompt", "completion"):
            _line(console, f"  {part:<10} {_shorten(escape(str(sample.get(part, ''))))}")
    _line(console, f"run folder  {escape(str(run_folder))}")
    _line(console, f"next        {escape(next_command)}")


def curve(values: list[float], *, width: int, unicode: bool = True) -> list[str]:
    """Draw a bar chart of `values` over steps, at most `width` columns wide; NaN leaves a gap.

    With more values than columns each column is the mean of its values. Empty if none is finite.
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
    lines = []
    for row in reversed(range(PLOT_HEIGHT)):
        label = {PLOT_HEIGHT - 1: f"{high:.4g}", 0: f"{low:.4g}"}.get(row, "")
        bars = "".join(levels[min(max(height - row * full, 0), full)] for height in heights)
        lines.append(f"{label:>{label_width}} {edge}{bars}".rstrip())
    lines.append(f"{'':>{label_width}}  reward over {len(values)} steps"[:width])
    return lines


def escape(text: str) -> str:
    """Make untrusted text harmless in a terminal: control and bidi codes become visible."""
    return "".join(_visible(char) for char in text)


def _visible(char: str) -> str:
    if char == "\n":
        return "\\n"
    if char == "\t":
        return "\\t"
    # Cc, Cf, Cs, Co, Cn: ESC and C1 codes, bidi overrides, lone surrogates, unassigned.
    if unicodedata.category(char)[0] == "C" or unicodedata.category(char) in ("Zl", "Zp"):
        code = ord(char)
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    return char


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SAMPLE_CHARS else text[: MAX_SAMPLE_CHARS - 3] + "..."


def _bin(values: list[float], num_columns: int) -> list[float]:
    """`values` themselves, or the means of `num_columns` even slices of them."""
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
    """Eighths of a row; at least 1, so that the lowest value is told from a gap."""
    if not math.isfinite(value):
        return 0
    share = (value - low) / (high - low) if high > low else 0.5
    return max(1, round(share * max_height))


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else f"{float(value):{form}}".strip()


def _step_cell(value: Any, key: str, form: str) -> str:
    """Return a value for its column; a value that is too wide is written with an exponent."""
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
    """Print a line as it is: no markup, no highlighting, no wrapping in logs, no characters that the
    terminal cannot write."""
    encoding = console.encoding or "utf-8"
    safe = text.encode(encoding, "backslashreplace").decode(encoding)
    console.print(Text(safe, style=style), soft_wrap=True, highlight=False)


def _console() -> Console:
    # Not kept: sys.stdout may be another one by the next call (tests, redirection).
    # A log file or a pipe keeps every line whole: a path in two pieces cannot be searched for.
    width = None if sys.stdout.isatty() else LOG_WIDTH
    return Console(width=width, highlight=False, markup=False)
