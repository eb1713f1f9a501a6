"""The table of docs/faults.md: a row for each process and signal, a column for each phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.evidence.result import between_markers
from benchmarks.fault_table.base import ROOT
from benchmarks.process_strikes.phases import MEETING, PHASES

PAGE = ROOT / "docs" / "faults.md"
MARKER = "table of processes"
COLUMNS = (MEETING, *PHASES)
ABSENT, NOT_MEASURED = "-", "not measured"


def with_table(content: Mapping[str, Any]) -> str:
    """Return docs/faults.md with the table between its markers."""
    return between_markers(PAGE.read_text(), MARKER, markdown(content))


def markdown(content: Mapping[str, Any]) -> str:
    """Return the tables of all placements, in Markdown."""
    lines: list[str] = []
    rows: Sequence[Mapping[str, Any]] = content["rows"]
    for placement in dict.fromkeys(row["placement"] for row in rows):
        own = [row for row in rows if row["placement"] == placement]
        lines += ["", f"**{placement[0].upper()}{placement[1:]}**", ""]
        lines += [
            f"| process | signal | {' | '.join(COLUMNS)} |",
            "|---" * (len(COLUMNS) + 2) + "|",
        ]
        for role in dict.fromkeys(row["role"] for row in own):
            for signal in ("SIGSTOP", "SIGKILL"):
                cells = [cell(own, role, phase, signal) for phase in COLUMNS]
                lines.append(f"| {role} | {signal} | {' | '.join(cells)} |")
    if brief := sorted({each["role"] for each in content["too_brief"]}):
        lines += ["", f"Lived for less than a second and not signalled: {', '.join(brief)}."]
    missing = [text for text in content["not_measured"] if ":" not in text]
    if missing:
        lines += ["", f"Not measured at all: {', '.join(missing)}."]
    failed = [row for row in rows if row.get("problems")]
    if failed:
        lines += ["", "What failed:", ""]
        lines += [f"- {said(row)}" for row in failed]
    return "\n".join(lines)


def cell(rows: Sequence[Mapping[str, Any]], role: str, phase: str, signal: str) -> str:
    """Return the outcome of one signal, in a few words."""
    found = [r for r in rows if (r["role"], r["phase"], r["signal"]) == (role, phase, signal)]
    if not found:
        return ABSENT
    row = found[0]
    if "happened" not in row:
        return NOT_MEASURED
    noticed = "" if row["noticed_s"] is None else f"{row['noticed_s']:.0f} s, "
    text = {
        "went on": "went on",
        "replaced": f"{noticed}replaced, {row['seconds']:.0f} s",
        "ended": f"{noticed}code {row['exit_code']}, {row['seconds']:.0f} s",
        "waits": f"waits, {row['seconds']:.0f} s",
        "was not there": ABSENT,
        "other": "see below",
    }[row["happened"]]
    return f"**FAILED**: {text}" if row["problems"] else text


def said(row: Mapping[str, Any]) -> str:
    """Return a failed row in words."""
    problems = "; ".join(row["problems"]).replace("|", "\\|").replace("<", "&lt;")
    return f"{row['placement']}: {row['signal']} of {row['role']} at {row['phase']}: {problems}"
