"""One real SGLang server for most tests; a Hugging Face model beside it as the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_helpers import load_oracle, make_buckets, make_engine, named_weights, write_model

from mrl.engines.sglang.engine import Engine


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def oracle(toy_folder: Path) -> Any:
    return load_oracle(toy_folder)


@pytest.fixture(scope="session")
def toy_weights(oracle, tmp_path_factory) -> list[tuple[str, torch.Tensor]]:
    return named_weights(oracle, tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="session")
def shared_engine(toy_folder: Path, tmp_path_factory) -> Iterator[Engine]:
    engine = make_engine(toy_folder, tmp_path_factory.mktemp("logs") / "engine.log")
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def engine(shared_engine: Engine, toy_weights) -> Engine:
    """The shared engine, awake and with the checkpoint's weights as version 0."""
    shared_engine.wake()
    shared_engine.endpoint.update_weights(make_buckets(toy_weights, 0), 0)
    return shared_engine
