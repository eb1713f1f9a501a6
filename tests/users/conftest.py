"""The toy model of tests/loop, which all workers share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.toy_model import write_toy_model
from tests.loop.conftest import Toy


@pytest.fixture(scope="session")
def toy(made_once: Callable[..., Path]) -> Toy:
    return Toy(made_once("toy", write_toy_model))
