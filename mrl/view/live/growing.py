"""Curves of bounded size, to which the rows of a run are added one by one.

The curves are those of mrl/view/series.py: the smallest and the largest value of each stretch of rows
are kept, and the first one that is not finite. Here the stretches double in length whenever a curve
has too many points, so 100,000 rows take the memory of some thousand. Rows are sorted into curves many
at a time, because that is several times faster.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import repeat
from operator import itemgetter
from typing import Any

import numpy as np

from mrl.view.series import LARGEST, MAX_POINTS, group_of, is_clipped, short

BATCH = 256
"""The number of rows that are sorted into curves at a time."""
TAIL = 512
"""A curve keeps at least this many of its newest values."""
MISSING = math.inf
"""In a column: the row lacks the key. Values themselves are never infinite."""
NOT_FINITE = math.nan

Row = Mapping[str, Any]
Values = Sequence[Any]


def drawn_values(row: Row) -> dict[str, float | int | None]:
    """Return the values of a row as curves have them: shortened, and None if not finite."""
    return {
        key: short(value, 7)
        for key, value in row.items()
        if key != "step" and (value is None or isinstance(value, (int, float)))
    }


class GrowingCurves:
    """The curves of all metrics of the rows so far."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points = max_points
        self._steps = array("q")
        self._waiting: list[Row] = []
        """The newest rows, which are not in the curves yet."""
        self._groups: dict[Any, _Group] = {}
        self._keys: set[str] = {"step"}
        self._clipped: set[str] = set()

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._steps)

    def add(self, row: Row) -> None:
        """Add a row, whose step is larger than those before it."""
        self._steps.append(row["step"])
        self._waiting.append(row)
        if len(self._waiting) >= BATCH:
            self._sort()

    def data(self) -> dict[str, Any]:
        """Return the curves as JSON-able data, in the form of `mrl.view.series.curves`. `steps` has
        only the steps at which a curve has a value."""
        self._sort()
        kept = sorted({at for group in self._groups.values() for at in group.at})
        places = {at: place for place, at in enumerate(kept)}
        series: dict[str, Any] = {}
        for group in self._groups.values():
            for key, column in group.columns.items():
                there = [i for i, value in enumerate(column) if value != MISSING]
                at = [places[group.at[i]] for i in there]
                values = [_unpacked(column[i]) for i in there]
                series[key] = {"v": values} | ({} if len(at) == len(kept) else {"at": at})
        return {
            "steps": [self._steps[at] for at in kept],
            "series": {key: series[key] for key in sorted(series) if series[key]["v"]},
            **self.notes,
        }

    @property
    def notes(self) -> dict[str, Any]:
        """`thinned` and `clipped` of `data`, for `mrl.view.series.notes_of`."""
        is_thinned = any(group.stretch > 1 for group in self._groups.values())
        return {"thinned": is_thinned, "clipped": sorted(self._clipped)}

    def _sort(self) -> None:
        """Put the waiting rows into the curves."""
        rows, self._waiting = self._waiting, []
        for row in rows:
            if not row.keys() <= self._keys:
                for key in row.keys() - self._keys:
                    self._keys.add(key)
                    name = group_of(key)
                    if name not in self._groups:
                        self._groups[name] = _Group(self._max_points)
                    self._groups[name].add_key(key)
        first, values = len(self._steps) - len(rows), _columns(rows)
        for group in self._groups.values():
            self._clipped |= group.add(first, rows, values)


class _Group:
    """Curves that are thinned at the same rows (`mrl.view.series.TOGETHER`), as columns."""

    def __init__(self, max_points: int) -> None:
        self._max_points = max_points
        self.at = array("q")
        """The indices of the kept rows."""
        self.columns: dict[str, array[float]] = {}
        self.stretch = 1
        """The number of rows of a stretch."""
        self._num_thinned = 0
        """The number of kept rows at the beginning that were thinned."""

    def add_key(self, key: str) -> None:
        self.columns[key] = array("d", repeat(MISSING, len(self.at)))

    def add(self, first: int, rows: Sequence[Row], values: Mapping[str, Values]) -> set[str]:
        """Add rows, the first of which has the index `first`. `values` are the rows' `_columns`. Return
        the keys of clipped values."""
        clipped: set[str] = set()
        found = {key: _column(rows, key, values.get(key), clipped) for key in self.columns}
        columns = list(found.values())
        if all(MISSING not in column for column in columns):
            self.at.extend(range(first, first + len(rows)))
        else:
            there = [i for i in range(len(rows)) if any(c[i] != MISSING for c in columns)]
            self.at.extend([first + i for i in there])
            found = {key: array("d", [c[i] for i in there]) for key, c in found.items()}
        for key, column in found.items():
            self.columns[key].extend(column)
        if len(self.at) > self._max_points + 3 * TAIL:
            self._thin()
        return clipped

    def _thin(self) -> None:
        """Thin the rows that were not thinned yet, except for the newest TAIL. If that is not enough,
        double the stretch and thin all of them."""
        begin, end = self._num_thinned, len(self.at) - TAIL
        while True:
            # The last stretch that was thinned may go on, so it is thinned together with the rest.
            while begin and self.at[begin - 1] // self.stretch == self.at[begin] // self.stretch:
                begin -= 1
            stretches = np.array(self.at[begin:end]) // self.stretch
            is_kept = np.zeros(end - begin, dtype=bool)
            for column in self.columns.values():
                for places in _extremes(np.array(column[begin:end]), stretches):
                    is_kept[places] = True
            chosen = np.flatnonzero(is_kept) + begin
            columns: list[array[Any]] = [self.at, *self.columns.values()]
            for column in columns:
                column[begin:end] = array(column.typecode, np.array(column)[chosen].tobytes())
            self._num_thinned = end = begin + len(chosen)
            if end <= self._max_points or self.stretch > 1 << 40:
                return
            self.stretch *= 2
            begin = 0


def _extremes(values: np.ndarray, stretches: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the places of the smallest, the largest and the first value that is not finite of each
    stretch. `stretches` is the stretch of each value, ascending."""
    is_first = _is_first(stretches)
    begins, number = np.flatnonzero(is_first), np.cumsum(is_first) - 1
    is_finite = np.isfinite(values)
    whole = bool(is_finite.all())
    for extreme, other in ((np.minimum, math.inf), (np.maximum, -math.inf)):
        ends = extreme.reduceat(values if whole else np.where(is_finite, values, other), begins)
        places = np.flatnonzero(values == ends[number])
        yield places[_is_first(stretches[places])]
    if not whole:
        places = np.flatnonzero(np.isnan(values))
        yield places[_is_first(stretches[places])]


def _is_first(stretches: np.ndarray) -> np.ndarray:
    """Return whether each value is the first one of its stretch."""
    is_first = np.ones(len(stretches), dtype=bool)
    is_first[1:] = stretches[1:] != stretches[:-1]
    return is_first


def _columns(rows: Sequence[Row]) -> dict[str, Values]:
    """Return the values of the keys that all rows have."""
    common = set(rows[0]) if rows else set()
    for row in rows:
        if not common <= row.keys():
            common &= row.keys()
    keys = [*common, "step"]  # a single key would not give tuples
    return (
        dict(zip(keys, zip(*map(itemgetter(*keys), rows), strict=True), strict=True))
        if rows
        else {}
    )


def _column(
    rows: Sequence[Row], key: str, values: Values | None, clipped: set[str]
) -> array[float]:
    """Return the values of a key in rows. `values` are those in the rows if all rows have the key. If a
    value was clipped, its key is added to `clipped`."""
    if values is not None:
        with suppress(TypeError, OverflowError):
            column = array("d", values)  # only numbers, as almost always
            if math.isfinite(sum(column)) and max(column) <= LARGEST and min(column) >= -LARGEST:
                return column
    return array("d", [_packed(row.get(key, ...), key, clipped) for row in rows])


def _unpacked(value: float) -> float | int | None:
    """Return a value of a column as the page shows it. Whole numbers are not rounded."""
    return int(value) if value.is_integer() and abs(value) < 1e15 else short(value, 7)


def _packed(value: Any, key: str, clipped: set[str]) -> float:
    if value is None:
        return NOT_FINITE
    if not isinstance(value, (int, float)):
        return MISSING
    if -LARGEST <= value <= LARGEST:
        return float(value)
    if not is_clipped(value):
        return NOT_FINITE
    clipped.add(key)
    return LARGEST if value > 0 else -LARGEST
