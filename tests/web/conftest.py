"""A toy model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tenants.parts import make_model


@pytest.fixture(scope="module")
def model(made_once: Callable[..., Path]) -> Path:
    return made_once("tenants_model", make_model)
