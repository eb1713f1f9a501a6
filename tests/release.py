"""What `make test` leaves out and `make test-all` runs: the marker `release`, for cases of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def release(*values: Any, id: str | None = None) -> Any:
    """One case of a parametrized test that is for releases only."""
    return pytest.param(*values, marks=pytest.mark.release, id=id)


def only_in_release(cases: Iterable[T], is_released: Callable[[T], bool]) -> list[Any]:
    """`cases`, of which those that `is_released` names are for releases only; one value a case."""
    return [release(case) if is_released(case) else case for case in cases]
