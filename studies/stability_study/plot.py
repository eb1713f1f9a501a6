"""The study's curves as one small SVG: an arm is a line (median over seeds) in a band (all seeds).

No plotting library: the file stays a few kilobytes of text, and the same results give the same bytes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

COLORS = {"off": "#c0392b", "TIS": "#e08e0b", "R2": "#8e44ad", "R3": "#1f78b4", "GSPO": "#6b705c",
          "R3+GSPO": "#1b9e77"}  # fmt: skip
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 300, 200, 46, 44, 30, 18
Step = dict[str, Any]
Result = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    title: str
    value: Callable[[Step], float]
    log: bool = False
    shows: Callable[[Result], bool] = lambda result: True
    """Tells which runs are drawn."""


PANELS = (
    Panel("reward", lambda step: step["reward/mean"]),
    Panel("k3, engine against trainer", lambda step: step["mismatch/k3"], log=True),
    Panel("extreme tokens of the update", lambda step: step["study/ratio_extreme"], log=True),
)
FLOOR = 1e-7
"""The smallest value on a logarithmic axis: smaller ones and 0 are drawn there."""


def curves(
    results: Sequence[Result], panel: Panel, arms: Iterable[str]
) -> dict[str, list[tuple[float, ...]]]:
    """(median, smallest, largest) over seeds of each step of each arm; runs may end early."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for arm in arms:
        runs = [r["steps"] for r in results if r["arm"] == arm and panel.shows(r)]
        columns = [
            [panel.value(run[i]) for run in runs if i < len(run)]
            for i in range(max(map(len, runs), default=0))
        ]
        if columns:
            found[arm] = [(statistics.median(c), min(c), max(c)) for c in columns]
    return found


def svg(
    results: Sequence[Result],
    colors: Mapping[str, str] = COLORS,
    panels: Sequence[Panel] = PANELS,
) -> str:
    """Draw all panels side by side under one legend. `colors` has the color of each arm."""
    width = LEFT + len(panels) * (WIDTH + LEFT) - LEFT + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{TOP + HEIGHT + BOTTOM}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{TOP + HEIGHT + BOTTOM}" fill="#fff"/>',
    ]
    for i, (arm, color) in enumerate(colors.items()):
        x = LEFT + i * 90
        parts.append(f'<rect x="{x}" y="8" width="14" height="4" fill="{color}"/>')
        parts.append(f'<text x="{x + 18}" y="14">{escape(arm)}</text>')
    for i, panel in enumerate(panels):
        parts += _panel(panel, curves(results, panel, colors), colors, LEFT + i * (WIDTH + LEFT))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    panel: Panel,
    lines: dict[str, list[tuple[float, ...]]],
    colors: Mapping[str, str],
    left: float,
) -> list[str]:
    scale = math.log10 if panel.log else float
    points = [max(v, FLOOR) if panel.log else v for line in lines.values() for p in line for v in p]
    low, high = (scale(min(points)), scale(max(points))) if points else (0.0, 1.0)
    if panel.log:
        low, high = math.floor(low), math.ceil(high)
    high = high if high > low else low + 1
    steps = max((len(line) for line in lines.values()), default=2) - 1

    def at(i: int, value: float) -> str:
        level = scale(max(value, FLOOR)) if panel.log else value
        y = TOP + HEIGHT * (1 - (level - low) / (high - low))
        return f"{left + WIDTH * i / max(steps, 1):.1f},{y:.1f}"

    parts = [
        f'<text x="{left}" y="{TOP - 8}" font-weight="bold">{escape(panel.title)}</text>',
        f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#bbb"/>',
        f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 22}" text-anchor="middle">step</text>',
    ]
    for level in _ticks(low, high, panel.log):
        y = TOP + HEIGHT * (1 - (level - low) / (high - low))
        text = f"1e{level:.0f}" if panel.log else f"{level:.1f}"
        parts.append(f'<text x="{left - 4}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        parts.append(
            f'<line x1="{left}" x2="{left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>'
        )
    for arm, line in lines.items():
        band = [at(i, p[2]) for i, p in enumerate(line)]
        band += [at(i, p[1]) for i, p in reversed(list(enumerate(line)))]
        parts.append(f'<polygon points="{" ".join(band)}" fill="{colors[arm]}" opacity="0.10"/>')
    for arm, line in lines.items():
        middle = " ".join(at(i, p[0]) for i, p in enumerate(line))
        parts.append(
            f'<polyline points="{middle}" fill="none" stroke="{colors[arm]}" stroke-width="1.6"/>'
        )
    return parts


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        return [float(level) for level in range(int(low), int(high) + 1)]
    first = math.ceil(low * 10)
    every = max(1, math.ceil((high - low) * 10 / 6))
    return [tick / 10 for tick in range(first, math.floor(high * 10) + 1, every)]
