"""Bytes with their formula and source: what every total of the plan is the sum of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

ASSUMPTION = "assumption"
"""First word of the source of a number that was neither read in code nor counted in a run."""


@dataclass(frozen=True)
class Row:
    """A row is one kind of bytes on one rank, or on one node."""

    name: str
    num_bytes: int
    formula: str
    """How the number came about, in words and sizes."""
    source: str
    """A function of this package, a file of a library, an issue with a measurement, or `assumption`
    with its reason."""
    managed: bool = False
    """Allocated by torch's caching allocator, which leaves some of what it reserves unused."""


@dataclass(frozen=True)
class Phase:
    """What one rank holds during one phase of a step."""

    name: str
    stage: int
    """Stage of the pipeline."""
    device: tuple[Row, ...]
    host: tuple[Row, ...]
    """The same in every phase: pinned buffers are kept once they are there."""
    role: Literal["both", "trainer", "rollout"] = "both"
    """What the rank does; `rollout`: it leads an engine and has no stage."""

    @property
    def device_bytes(self) -> int:
        return total(self.device)

    def device_row(self, name: str) -> int:
        """Bytes of the row of that name; 0 where there is none."""
        return sum(row.num_bytes for row in self.device if row.name == name)


def total(rows: Iterable[Row]) -> int:
    return sum(row.num_bytes for row in rows)


def times(rows: Iterable[Row], count: int) -> tuple[Row, ...]:
    """Multiply the rows by `count` ranks."""
    return tuple(
        replace(row, num_bytes=count * row.num_bytes, formula=f"{count} x {row.formula}")
        for row in rows
    )


def present(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Leave out rows of 0 bytes."""
    return tuple(row for row in rows if row.num_bytes)
