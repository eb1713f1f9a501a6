"""The engines under test. Any engine of mrl.engines may be put here: see benchmarks/conformance.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rollout_helpers import make_buckets, make_engine

from mrl.engines.base import RolloutEngine

NUM_ENGINES = int(os.environ.get("MRL_CONFORMANCE_ENGINES", "1"))


@pytest.fixture(scope="session")
def other_engines(toy_folder: Path, tmp_path_factory) -> Iterator[list[RolloutEngine]]:
    """Engines beside the one that the tests talk to: awake, and with the same weights."""
    logs = tmp_path_factory.mktemp("others")
    others = [make_engine(toy_folder, logs / f"{i}.log") for i in range(1, NUM_ENGINES)]
    for engine in others:
        engine.start()
    yield others
    for engine in others:
        engine.stop()


@pytest.fixture
def engines(engine, other_engines, toy_weights) -> list[RolloutEngine]:
    """All of them, with the checkpoint's weights as version 0."""
    for other in other_engines:
        other.wake()
        other.endpoint.update_weights(make_buckets(toy_weights, 0), 0)
    return [engine, *other_engines]
