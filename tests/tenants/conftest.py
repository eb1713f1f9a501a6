"""A toy model, and a service's registry that listens at its socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mrl.service.control import Control
from mrl.service.registry import Registry
from tests.tenants.parts import make_model, service


@pytest.fixture(scope="module")
def model(made_once: Callable[..., Path]) -> Path:
    return made_once("tenants_model", make_model)


@pytest.fixture
def control(tmp_path: Path, model: Path) -> Iterator[Control]:
    with Registry(service(tmp_path, model)) as registry, Control(registry) as made:
        yield made
