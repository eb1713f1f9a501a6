"""This module repeats every measurement: `make evidence`, or `python -m benchmarks.evidence`.

It runs the targets of the catalog one after the other and prints one table of them. Their results go
to runs/results/, and become the committed ones by --record. A target has passed where its command exits
with 0 and its last plain line is `N passed, 0 failed`; one that fails does not stop the others. A goal
of speed that is missed breaks nothing: the line counts it (`1 goal missed`). What each of them prints
is kept in runs/evidence/NAME.log. Targets that need a GPU are skipped where there is none.

Without --only, studies are left out, which answered a question once, and every target whose results,
new or committed, passed with the code as it is now. So the command continues where it was interrupted,
and on several machines what one of them has committed is not repeated by the others.

--list    print the targets, and which of them `make test` runs in short
--stale   print which results are of older code than this, and what has changed since
--record  make the new results (of --only) the committed ones, and write the pages that quote them;
          a study's result only where --only names it. A result that is older than the committed
          one, or whose pages cannot be made, is passed over with a line
--mark    write into docs/results.md which results are of older code
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.evidence.catalog import Target, chosen
from benchmarks.evidence.digest import ROOT
from benchmarks.evidence.record import mark, record
from benchmarks.evidence.result import NEW, RESULTS, commit_now
from benchmarks.evidence.staleness import PAGE, age, changed_files, states

LOGS = ROOT / "runs" / "evidence"
PLAIN_LINE = re.compile(r"^(\d+) passed, (\d+) failed(, \d+ skipped)?(, \d+ goals? missed)?$")
NUM_SHOWN = 4
"""How many changed files `--stale` names."""


@dataclass(frozen=True)
class Outcome:
    """What one target did."""

    target: Target
    status: str
    """`passed`, `failed` or `skipped`."""
    seconds: float
    line: str
    """Its plain line, or why it has none."""
    commit: str


def run_target(target: Target, log: Path) -> Outcome:
    """Run the command of one target, its output going to `log`."""
    commit = commit_now([])
    if target.needs_gpu and not has_gpu():
        return Outcome(target, "skipped", 0.0, "needs a GPU", commit)
    log.parent.mkdir(parents=True, exist_ok=True)
    limit_s = 600 + 300 * target.minutes
    start = time.monotonic()
    with log.open("w") as sink:
        command = [sys.executable, "-W", "ignore", "-m", *target.arguments]
        process = subprocess.Popen(command, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT)
        try:
            code = process.wait(limit_s)
            why = f"no plain line; exit code {code}"
        except subprocess.TimeoutExpired:
            code, why = -1, f"ended at its limit of {limit_s:.0f} s"
        finally:
            end_tree(process)
    seconds = time.monotonic() - start
    line = plain_line(log.read_text(errors="replace"))
    found = PLAIN_LINE.match(line)
    passed = code == 0 and found is not None and int(found[2]) == 0
    if code < 0 or not found:
        line = why
    elif code and int(found[2]) == 0:
        line = f"{line}, but exit code {code}"
    return Outcome(target, "passed" if passed else "failed", seconds, line, commit)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a command and of its children."""
    if process.poll() is not None:
        return
    tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for one in tree:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def has_gpu() -> bool:
    """Tell whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def plain_line(output: str) -> str:
    """Return the last line that counts what passed and failed; empty where there is none."""
    lines = [line.strip() for line in output.splitlines() if PLAIN_LINE.match(line.strip())]
    return lines[-1] if lines else ""


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text with aligned columns; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def outcome_table(outcomes: Sequence[Outcome]) -> str:
    """Return the table that `make evidence` ends with."""
    heading = ("target", "outcome", "seconds", "last line", "commit")
    rows = [
        (o.target.name, o.status, f"{o.seconds:.0f}", o.line, o.commit[:7] + o.commit[40:])
        for o in outcomes
    ]
    return table([heading, *rows])


def list_table(targets: Sequence[Target]) -> str:
    """Return the table of `--list`."""
    heading = ("target", "minutes", "python -m ...", "in make test", "what it shows")
    rows = [
        (
            t.name + (" (GPU)" if t.needs_gpu else ""),
            f"{t.minutes:g}",
            " ".join(t.arguments),
            t.short or "no short form",
            t.tells,
        )
        for t in targets
    ]
    return table([heading, *rows])


def stale_table() -> str:
    """Return the table of `--stale`: each result, its commit and age, and what has changed since."""
    rows = [("result", "commit", "age", "state", "changed files")]
    for state in states():
        if not state.why:
            what = "study" if state.target.is_study else "current"
            rows.append((state.name, state.short_commit, age(state), what, ""))
            continue
        changed = changed_files(state)
        if changed is None:
            what = "unknown: this clone does not have the commit"
        elif changed:
            more = f" and {len(changed) - NUM_SHOWN} more" if len(changed) > NUM_SHOWN else ""
            what = f"{len(changed)}: " + ", ".join(changed[:NUM_SHOWN]) + more
        else:
            what = "0; definitions were removed"
        rows.append((state.name, state.short_commit, age(state), f"stale: {state.why}", what))
    return table(rows)


def is_current(target: Target) -> bool:
    """Return whether all results of a target have passed with the code as it is now.

    Results of other code are passed over; of the others a new one counts before a committed one.
    """
    found = {
        state.name: state
        for folder in (RESULTS, NEW)
        for state in states(folder)
        if not state.why and not state.commit.endswith("+dirty")
    }
    own = [found.get(name) for name in target.results]
    return bool(own) and all(state is not None and state.num_failed == 0 for state in own)


def main() -> None:
    """Parse the arguments and do what they ask for; exit with 1 where a target failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="targets or groups")
    parser.add_argument("--list", action="store_true", help="print the targets and end")
    parser.add_argument("--stale", action="store_true", help="print the stale results and end")
    parser.add_argument(
        "--record", action="store_true", help="commit new results to the docs and end"
    )
    parser.add_argument("--mark", action="store_true", help="mark docs/results.md and end")
    arguments = parser.parse_args()
    try:
        targets = chosen(arguments.only)
    except ValueError as error:
        parser.error(f"--only: {error}")
    if arguments.list:
        print(list_table(targets))
    elif arguments.stale:
        print(stale_table())
    elif arguments.mark:
        if mark():
            print(f"updated the marks in {PAGE.relative_to(ROOT)}")
    elif arguments.record:
        record_new(targets)
    else:
        run_all(targets if arguments.only else [t for t in targets if not is_current(t)])


def record_new(targets: Sequence[Target]) -> None:
    """Record the new results, print what became of them, and exit with 1 where one was not recorded
    because of an error."""
    recorded = record(targets)
    if not recorded.lines and not recorded.errors:
        print(f"no new result in {NEW.relative_to(ROOT)}")
    for line in recorded.lines:
        print(line)
    for name, error in recorded.errors.items():
        traceback.print_exception(error)
        print(f"{name}: not recorded, and none of its pages is changed: {error!r}", flush=True)
    sys.exit(bool(recorded.errors))


def run_all(targets: Sequence[Target]) -> None:
    """Run the targets, print their table, mark the page, and exit with 1 where one failed."""
    print(
        f"{len(targets)} targets, about {sum(t.minutes for t in targets):.0f} minutes; {LOGS}/*.log"
    )
    outcomes = []
    for target in targets:
        print(f"{target.name} ...", flush=True)
        outcome = run_target(target, LOGS / f"{target.name}.log")
        outcomes.append(outcome)
        print(
            f"{target.name}: {outcome.status} after {outcome.seconds:.0f} s: {outcome.line}",
            flush=True,
        )
    print(f"\n{outcome_table(outcomes)}")
    num = {status: sum(o.status == status for o in outcomes) for status in ("passed", "failed")}
    print(f"{num['passed']} passed, {num['failed']} failed")
    sys.exit(num["failed"] > 0)


if __name__ == "__main__":
    main()
