"""A service with the Tinker API and the real engine on a toy model, and programs that call it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mrl.tinker.keys import Keys
from tests.tenants.serving import ROOT, Service, environment, wait_for

FOLDER = Path(os.environ.get("MRL_TINKER_SDK", Path(sys.prefix) / "tinker"))
"""Where `make tinker` installs the SDK."""
LIMIT_S = 300.0

needs_sdk = pytest.mark.skipif(
    not (FOLDER / "tinker").is_dir() and importlib.util.find_spec("tinker") is None,
    reason="the Tinker SDK is not installed; `make tinker` installs it",
)

needs_cookbook = pytest.mark.skipif(
    not (FOLDER / "tinker_cookbook").is_dir(),
    reason="tinker-cookbook is not installed; `make tinker` installs it",
)


def tinker_service(folder: Path, model: Path, ranks: int = 1, **more: Any) -> Service:
    """Return a service that speaks the Tinker API, and write its configuration."""
    folder.mkdir(exist_ok=True)
    service = Service(folder / "service", model, ranks)
    service.write(**{"control": {"tinker": 0}, "tenants": {"max_number": 8}, **more})
    service.folder.mkdir(exist_ok=True)
    return service


@contextmanager
def served(service: Service) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a service in the block; yields the address of its Tinker API."""
    address = service.folder / "tinker" / "address"
    address.unlink(missing_ok=True)
    process = service.start()
    try:
        wait_for(address.exists, process)
        yield address.read_text().strip(), process
    finally:
        process.terminate()
        process.wait(60)


def key_of(service: Service, user: str = "ann") -> str:
    return Keys(service.folder).add(user)


def sdk_environment(key: str) -> dict[str, str]:
    own = environment()
    path = os.pathsep.join([own["PYTHONPATH"], str(FOLDER)])
    return {**own, "PYTHONPATH": path, "TINKER_API_KEY": key, "TINKER_TELEMETRY": "0"}


def start_program(name: str, url: str, key: str, *words: str) -> subprocess.Popen[str]:
    """Start a program of programs.py or, with `fault_programs.` before its name, of that file."""
    module, _, name = f"programs.{name}".rpartition(".")
    module = module.removeprefix("programs.")
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", f"tests.tinker.{module}", name, url, *words],
        cwd=ROOT, env=sdk_environment(key), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def result_of(program: subprocess.Popen[str]) -> Any:
    """Return what a program has found, once it ends."""
    try:
        out, said = program.communicate(timeout=LIMIT_S)
    finally:
        program.kill()
    assert program.returncode == 0, out[-2000:] + said[-6000:]
    return json.loads(out.splitlines()[-1])


def run_program(name: str, url: str, key: str, *words: str) -> Any:
    """Return what a program has found: see `start_program`."""
    return result_of(start_program(name, url, key, *words))
