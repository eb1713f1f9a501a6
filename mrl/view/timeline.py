"""Reads timeline.jsonl and the staleness metrics for the timeline on the page.

The timeline shows what the trainer and each engine did, and when. It has one lane for the trainer
and one for each engine. A lane consists of spans of time. The kind of a span is the activity during
it. Each kind has a text and a colour.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from mrl.run.activities import ACTIVITIES
from mrl.run.timeline import MAX_SECONDS, Timeline
from mrl.system.json_text import is_number

MAX_STEPS = 20
"""By default, the last steps of the run are drawn, at most this many."""
MAX_LANES = 17
MAX_SPANS = 1500
"""The largest number of spans of a lane. If a lane has more spans, the longest spans are kept."""
MERGED_S = 0.25
"""Two consecutive spans of an engine that have the same kind are joined if the gap between them
is shorter than this many seconds."""
OTHER = 7
TRAINER = {
    "train": ("trains", 0),
    "rollout": ("waits for its batch", 1),
    "logprob": ("log-probs before the update", 2),
    "ref_logprob": ("log-probs of the reference", 5),
    "value": ("values of the critic", 6),
    "sync": ("sends weights", 3),
    "score": ("shares the samples", 4),
}
"""The text and the colour of each part of a trainer's step; other parts have the colour OTHER."""
COLOURS = {
    "generate": 0, "bound": 1, "evaluate": 2, "load": 3, "score": 4, "drain": 5, "weights": 6,
    "start": OTHER,
}  # fmt: skip
STALENESS = "async/staleness/"

Piece = tuple[float, float, str]


def read_timeline(
    run: Path, rows: list[dict[str, Any]], steps: range | None, placement: Any
) -> dict[str, Any]:
    """Return the lanes of trainer and engines, and the histogram of staleness, as JSON-able data.

    If there are no lanes, `why` gives the reason. rows: the rows of metrics.jsonl. steps: the steps to
    draw; None for the last MAX_STEPS. placement: `rollout.placement` of the recipe.
    """
    histogram = {"staleness": count_staleness(rows)}
    known = Timeline(run / "timeline.jsonl").read()
    found = known[-MAX_STEPS:] if steps is None else [r for r in known if r["step"] in steps]
    if not found and known:
        why = f"timeline.jsonl has none of the steps of --steps; it has {len(known)} others."
        return histogram | {"why": why}
    return histogram | draw_timeline(found, placement)


def draw_timeline(found: list[dict[str, Any]], placement: Any) -> dict[str, Any]:
    """Return the lanes of rows of timeline.jsonl as JSON-able data: see `read_timeline`."""
    if not found:
        return {"why": _why(placement)}
    lanes = [("trainer", _pieces(found, "trainer", 0), TRAINER)]
    words = {name: (text, COLOURS[name]) for name, text in ACTIVITIES.items()}
    known_engines = range(max(len(row["engines"]) for row in found))
    pieces = {number: _pieces(found, "engines", number) for number in known_engines}
    if any(pieces.values()):  # engines that were removed before, or came later, have no lane
        pieces = {number: each for number, each in pieces.items() if each}
    engines = list(pieces)
    for number in engines[: MAX_LANES - 1]:
        lanes.append((f"engine {number}", pieces[number], words))
    origin = found[0]["begin"]
    notes = []
    if left_out := engines[MAX_LANES - 1 :]:
        notes.append(f"Engines {left_out[0]} to {left_out[-1]} are not drawn.")
    if any(len(pieces) > MAX_SPANS for _, pieces, _ in lanes):
        notes.append(f"Of a lane with more than {MAX_SPANS} spans the longest are drawn.")
    return {
        "why": "",
        "steps": [[row["step"], round(row["begin"] - origin, 3)] for row in found],
        "lanes": [_lane(name, pieces, kinds, origin) for name, pieces, kinds in lanes],
        "note": " ".join(notes),
    }


def count_staleness(rows: list[dict[str, Any]]) -> list[list[int]]:
    """Return pairs [staleness in versions, number of groups] over all steps, by ascending staleness."""
    counts: Counter[int] = Counter()
    for row in rows:
        add_staleness(row, counts)
    return [[age, counts[age]] for age in sorted(counts)]


def add_staleness(row: dict[str, Any], counts: Counter[int]) -> None:
    """Add the numbers of groups of a row of metrics.jsonl to `counts`, by staleness in versions."""
    for key, value in row.items():
        age = key.removeprefix(STALENESS)
        is_count = is_number(value) and 0 <= value < 2**53
        if age != key and age.isascii() and age.isdigit() and len(age) < 9 and is_count:
            counts[int(age)] += int(value)


def _why(placement: Any) -> str:
    if placement == "disaggregated":
        return "The run has no timeline.jsonl yet: its first step is not done, or an older mrl made it."
    return (
        "There is no timeline: in a colocated run engines and trainer take turns, and the seconds of "
        "each step are among the curves. Runs with rollout.placement=disaggregated have one."
    )


def _pieces(rows: list[dict[str, Any]], role: str, number: int) -> list[Piece]:
    """Return the spans of one lane as tuples (begin, end, kind), with times in seconds since 1970.

    Invalid spans are left out. Consecutive spans of an engine that have the same kind are joined if
    the gap is shorter than MERGED_S.
    """
    found: list[Piece] = []
    for row in rows:
        lanes = [row["trainer"]] if role == "trainer" else row["engines"]
        spans = lanes[number] if number < len(lanes) and isinstance(lanes[number], list) else []
        for span in filter(_is_span, spans):
            begin, end, kind = row["begin"] + span[0], row["begin"] + span[1], span[2]
            last = found[-1] if found else None
            if last and last[2] == kind and begin - last[1] < MERGED_S and role != "trainer":
                found[-1] = (last[0], end, kind)
            else:
                found.append((begin, end, kind))
    return found


def _is_span(span: Any) -> bool:
    return (
        isinstance(span, list)
        and len(span) == 3
        and all(is_number(at) and abs(at) < MAX_SECONDS for at in span[:2])
        and isinstance(span[2], str)
    )


def _lane(
    name: str, pieces: list[Piece], words: dict[str, tuple[str, int]], origin: float
) -> dict[str, Any]:
    """Return a lane as JSON-able data: its kinds and its spans.

    A kind has its text, its colour and its share of the lane's time. A span is [begin, end, index of
    its kind]; `begin` and `end` are in seconds from `origin`.
    """
    seconds: dict[str, float] = defaultdict(float)
    for begin, end, kind in pieces:
        seconds[kind] += end - begin
    whole = max(1e-9, pieces[-1][1] - pieces[0][0]) if pieces else 1.0
    order = [*(kind for kind in words if kind in seconds), *(k for k in seconds if k not in words)]
    kept = pieces
    if len(pieces) > MAX_SPANS:
        kept = sorted(heapq.nlargest(MAX_SPANS, pieces, key=lambda piece: piece[1] - piece[0]))
    return {
        "name": name,
        "kinds": [
            {"text": text, "colour": colour, "share": round(min(1.0, seconds[kind] / whole), 4)}
            for kind in order
            for text, colour in [words.get(kind, (kind, OTHER))]
        ],
        "spans": [
            [round(begin - origin, 3), round(end - origin, 3), order.index(kind)]
            for begin, end, kind in kept
        ],
    }
