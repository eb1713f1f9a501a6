"""Fewer samples than in the other tests of the room: what is compared here is one feature each."""

from __future__ import annotations

import pytest

from mrl.types import Sample
from tests.parallel.few_samples import few_samples


@pytest.fixture(scope="session")
def samples() -> list[Sample]:
    return few_samples()
