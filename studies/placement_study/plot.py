"""This module draws the reward of every arm against time and against samples, as one small SVG.

No plotting library: the file stays a few kilobytes of text, and the same result gives the same bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape

from studies.placement_study.tables import NAMES

COLORS = {"colocated": "#6b705c", "synchronous": "#c0392b", "bound_1": "#1f78b4",
          "bound_2": "#1b9e77", "bound_4": "#8e44ad"}  # fmt: skip
TITLES = {"short": "short answers", "long": "long-tailed answers", "demo": "the demo"}
WIDTH, HEIGHT, LEFT, TOP, GAP = 360, 180, 46, 60, 64
NUM_TICKS = 4
SMOOTH = 3
"""Steps whose mean is a point of a curve."""
Curves = Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]


def svg(curves: Curves, num_samples: Mapping[str, float]) -> str:
    """Draw a line of panels for each task: reward against seconds and against samples.

    `curves`: seconds and reward after each step, by task and arm; `num_samples`: samples of a step.
    """
    width, height = LEFT + 2 * (WIDTH + LEFT), TOP + len(curves) * (HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for i, (arm, color) in enumerate(COLORS.items()):
        x = LEFT + i * 150
        parts.append(f'<rect x="{x}" y="8" width="14" height="4" fill="{color}"/>')
        parts.append(f'<text x="{x + 18}" y="14">{escape(NAMES[arm])}</text>')
    for line, (kind, arms) in enumerate(curves.items()):
        top = TOP + line * (HEIGHT + GAP)
        by_time = {arm: _points(each["seconds"], each["reward"]) for arm, each in arms.items()}
        counts = {
            arm: [(n + 1) * num_samples[kind] for n in range(len(each["reward"]))]
            for arm, each in arms.items()
        }
        by_samples = {arm: _points(counts[arm], each["reward"]) for arm, each in arms.items()}
        title = f"{TITLES[kind]}: reward"
        parts += _panel(f"{title} against time", "seconds", by_time, LEFT, top)
        parts += _panel(f"{title} against samples", "samples", by_samples, 2 * LEFT + WIDTH, top)
    return "\n".join([*parts, "</svg>"]) + "\n"


Points = list[tuple[float, float]]


def _points(across: Sequence[float], rewards: Sequence[float]) -> Points:
    """Return (x, reward), the reward smoothed over the steps up to x."""
    return [
        (x, statistics.fmean(rewards[max(0, i + 1 - SMOOTH) : i + 1])) for i, x in enumerate(across)
    ]


def _panel(title: str, unit: str, lines: dict[str, Points], left: float, top: float) -> list[str]:
    most_x = max(x for line in lines.values() for x, _ in line)
    most_y = max(0.1, *(y for line in lines.values() for _, y in line))

    def at(x: float, y: float) -> str:
        return f"{left + WIDTH * x / most_x:.1f},{top + HEIGHT * (1 - y / most_y):.1f}"

    parts = [
        f'<text x="{left}" y="{top - 8}" font-weight="bold">{escape(title)}</text>',
        f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#bbb"/>',
    ]
    for i in range(NUM_TICKS + 1):
        y, x = top + HEIGHT * (1 - i / NUM_TICKS), left + WIDTH * i / NUM_TICKS
        parts += [
            f'<text x="{left - 4}" y="{y + 4:.1f}" text-anchor="end">'
            f"{most_y * i / NUM_TICKS:.2f}</text>",
            f'<line x1="{left}" x2="{left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>',
            f'<text x="{x:.1f}" y="{top + HEIGHT + 14}" text-anchor="middle">'
            f"{most_x * i / NUM_TICKS:.0f}</text>",
        ]
    parts.append(
        f'<text x="{left + WIDTH / 2}" y="{top + HEIGHT + 28}" text-anchor="middle">{unit}</text>'
    )
    for arm, line in lines.items():
        drawn = " ".join(at(x, y) for x, y in line)
        parts.append(
            f'<polyline points="{drawn}" fill="none" stroke="{COLORS[arm]}" stroke-width="1.6"/>'
        )
    return parts
