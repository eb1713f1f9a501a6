"""The first samples of `make_samples`, for tests of single features."""

from __future__ import annotations

from mrl.types import Sample
from tests.parallel.conftest import make_samples


def few_samples() -> list[Sample]:
    """Seven samples of uneven lengths, 138 tokens: in packs of 64, a step has three micro-batches."""
    return make_samples()[:7]
