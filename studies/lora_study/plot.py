"""This module draws the reward of every run against the steps, as one small SVG.

No plotting library: the file stays a few kilobytes of text, and the same result gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from studies.lora_study.arms import ARMS, SEED

COLORS = {"full": "#6b705c", "lora": "#1f78b4"}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 560, 220, 46, 44, 40
NUM_TICKS = 5


def svg(results: Sequence[Mapping[str, Any]]) -> str:
    """Draw the two runs of the comparison as thick lines, and those that tried rates as thin ones."""
    shown = [result for result in results if result["model"] == "base"]
    steps = max(len(result["rewards"]) for result in shown)
    width, height = LEFT + WIDTH + LEFT, TOP + HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#bbb"/>',
        f'<text x="{LEFT}" y="{TOP - 8}" font-weight="bold">reward of a step</text>',
        f'<text x="{LEFT + WIDTH / 2}" y="{height - 8}" text-anchor="middle">step</text>',
    ]
    for i, (arm, color) in enumerate(COLORS.items()):
        x = LEFT + i * 150
        parts.append(f'<rect x="{x}" y="8" width="14" height="4" fill="{color}"/>')
        parts.append(f'<text x="{x + 18}" y="14">{escape(ARMS[arm].tells)}</text>')
    for i in range(NUM_TICKS + 1):
        y, x = TOP + HEIGHT * (1 - i / NUM_TICKS), LEFT + WIDTH * i / NUM_TICKS
        parts.append(
            f'<text x="{LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">{i / NUM_TICKS:.1f}</text>'
        )
        parts.append(
            f'<text x="{x:.1f}" y="{TOP + HEIGHT + 14}" text-anchor="middle">'
            f"{(steps - 1) * i / NUM_TICKS:.0f}</text>"
        )
    for result in sorted(shown, key=lambda one: one["seed"] == SEED):
        parts.append(_line(result, steps))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _line(result: Mapping[str, Any], steps: int) -> str:
    is_compared = result["seed"] == SEED
    points = " ".join(
        f"{LEFT + WIDTH * i / max(steps - 1, 1):.1f},{TOP + HEIGHT * (1 - reward):.1f}"
        for i, reward in enumerate(result["rewards"])
    )
    return (
        f'<polyline points="{points}" fill="none" stroke="{COLORS[result["arm"]]}" '
        f'stroke-width="{2 if is_compared else 0.8}" opacity="{1 if is_compared else 0.4}"/>'
    )
