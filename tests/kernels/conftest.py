"""Fixtures: the CUDA kernels, run on a CPU by tests/kernels/emulator/."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from emulator import (
    ORDERS,
    GuardedCopies,
    build_module,
    build_samples,
    load_module,
    load_samples,
)
from torch import Tensor

EmulatedCuda = Callable[..., AbstractContextManager[None]]


@pytest.fixture(scope="session")
def emulated_module(made_once: Callable[..., Path]) -> ModuleType:
    return load_module(made_once("mrl_emulated", build_module))


@pytest.fixture(scope="session")
def emulator_samples(made_once: Callable[..., Path]) -> ctypes.CDLL:
    return load_samples(made_once("emulator_samples", build_samples))


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Turns torch.compile on, which tests/conftest.py turns off; fails where it compiled nothing."""
    from torch._dynamo import config, utils

    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    utils.counters.clear()
    with config.patch(disable=False):
        yield
    assert utils.counters["stats"]["unique_graphs"] > 0


@pytest.fixture
def emulated_cuda(emulated_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> EmulatedCuda:
    """Sends ops on CPU tensors to the emulated CUDA kernels: `with emulated_cuda("reverse"):`.

    The argument is the order of threads, one of `emulator.ORDERS`: results must not depend on it.
    Raises RuntimeError inside on what a GPU would fault or hang on, and on a byte read or written
    outside of a tensor's storage; AssertionError at the end if no kernel ran.
    """

    from mrl.kernels import backend  # not at the top: the emulator's own tests need no mrl._C

    @contextmanager
    def emulate(order: str = "forward", seed: int = 0) -> Iterator[None]:
        if order not in ORDERS:
            raise ValueError(f"order: got {order!r}, expected one of {ORDERS}")
        ran: list[str] = []

        def run(kernel: str, device: torch.device, /, **arguments: Any) -> None:
            assert device.type == "cpu", f"{kernel}: the emulator takes CPU tensors, got {device}"
            ran.append(kernel)
            if arguments.get("workspace", 0) is None:  # which ops allocate for GPU tensors only
                sizes = (arguments["num_tokens"], arguments["num_sequences"])
                num_bytes = emulated_module.policy_loss_workspace_bytes(*sizes)
                arguments["workspace"] = torch.full((num_bytes,), 0xFF, dtype=torch.uint8)
            tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
            copies = GuardedCopies(tensors)
            values = {name: _address(value, copies) for name, value in arguments.items()}
            getattr(emulated_module, f"{kernel}_cuda")(**values, stream=0)
            copies.copy_back()

        with monkeypatch.context() as patch:
            patch.setattr(backend, "run", run)
            patch.setenv("MRL_EMULATOR_ORDER", order)
            patch.setenv("MRL_EMULATOR_SEED", str(seed))
            yield
        assert ran, "emulated_cuda: no kernel ran through mrl.kernels.backend.run"

    return emulate


def _address(value: Any, copies: GuardedCopies) -> Any:
    if value is None:
        return 0
    return copies.address(value) if isinstance(value, Tensor) else value
