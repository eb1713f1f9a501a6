"""The rows of the memory plan. Each row is a number of bytes with its formula and source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

ASSUMPTION = "assumption"
"""First word of `Row.source` if the number comes neither from code nor from a measured run."""


Role = Literal["both", "trainer", "rollout"]
"""`both` for a rank of a colocated run, which trains and generates. A rank of a disaggregated run is a
`trainer` or a `rollout` rank."""


@dataclass(frozen=True)
class Row:
    """One kind of memory on one rank, or on one node."""

    name: str
    num_bytes: int
    formula: str
    """How `num_bytes` is computed, in words and numbers."""
    source: str
    """The origin of the formula: a function of this package, a file of a library, an issue with a
    measurement, or `assumption` with its reason."""
    managed: bool = False
    """Whether torch's caching allocator allocates these bytes, so that fragmentation adds to them."""


@dataclass(frozen=True)
class Phase:
    """The memory of one rank during one phase of a step."""

    name: str
    stage: int
    """Index of the rank's pipeline stage; 0 for a rollout rank, which has no stage."""
    device: tuple[Row, ...]
    role: Role

    @property
    def device_bytes(self) -> int:
        return total(self.device)

    def device_row(self, name: str) -> int:
        """Return the total device bytes of all rows that have the name `name`."""
        return sum(row.num_bytes for row in self.device if row.name == name)


def total(rows: Iterable[Row]) -> int:
    """Return the sum of the rows' bytes."""
    return sum(row.num_bytes for row in rows)


def times(rows: Iterable[Row], count: int) -> tuple[Row, ...]:
    """Return the rows with their bytes multiplied by `count`, for `count` ranks with the same rows."""
    return tuple(
        replace(row, num_bytes=count * row.num_bytes, formula=f"{count} x {row.formula}")
        for row in rows
    )


def present(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return the rows whose `num_bytes` is not 0."""
    return tuple(row for row in rows if row.num_bytes)
