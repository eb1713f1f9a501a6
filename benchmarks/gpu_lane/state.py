"""This module keeps what `make gpu-check` has found on file at every moment, so that a second call can
continue.

`gpu_check.json` is written anew (and renamed into place) before and after each part; every event is
also a line of `gpu_check.jsonl`. Both are in each of the given folders. A call that is killed leaves
all that ended before it, and the name of the part that was running.

The record of a part counts as long as the code and the versions that it ran with are the present ones:
their hash is kept with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mrl.system.files import write_whole

ROOT = Path(__file__).parents[2]
CODE = ("setup.py", "csrc", "mrl", "moe", "parallel", "launch/recipes", "benchmarks", "tests")
SUFFIXES = (".py", ".sh", ".cpp", ".cu", ".h", ".yaml", ".jsonl", ".json")
PACKAGES = (
    "torch", "triton", "megatron-core", "sglang", "sglang-kernel", "transformers",
    "torch-memory-saver", "transformer-engine", "apex", "flash-attn",
)  # fmt: skip
PASSED, FAILED, CUT, SKIPPED, RUNNING = "passed", "failed", "cut", "skipped", "running"
"""`cut`: the call's own time ended first. `running`: the call was killed during the part."""


def code_digest(root: Path = ROOT) -> str:
    """Return the digest of every source file that a part may run; results and built files do not
    count.
    """
    digest = hashlib.sha256()
    for name in CODE:
        top = root / name
        for file in [top] if top.is_file() else sorted(top.rglob("*")):
            inner = file.relative_to(root)
            if file.suffix in SUFFIXES and "results" not in inner.parts and file.is_file():
                digest.update(f"{inner}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that decide what the parts do."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def device_name(device: str) -> str:
    """Return the GPU's name as nvidia-smi prints it, without importing torch; `device` itself where
    that is no GPU.
    """
    if device != "cuda":
        return device
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return "cuda"
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else "cuda"


class State:
    """The records of the parts, by name, and where they are kept."""

    def __init__(self, device: str, folders: Sequence[Path], earlier: Path | None) -> None:
        """Continue from `earlier`, a gpu_check.json; one of another device is ignored."""
        self.folders = folders
        self.fingerprint = {
            "code": code_digest(), "versions": versions(), "device": device_name(device)
        }  # fmt: skip
        self.key = hashlib.sha256(json.dumps(self.fingerprint).encode()).hexdigest()[:16]
        self.parts: dict[str, dict[str, Any]] = {}
        self.num_calls = 0
        self.note = ""
        if earlier is not None and earlier.is_file():
            self._read(earlier)
        self.num_calls += 1
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)

    def _read(self, file: Path) -> None:
        try:
            found = json.loads(file.read_text())
            parts, device = dict(found["parts"]), found["fingerprint"]["device"]
            self.num_calls = int(found["num_calls"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.note = f"{file} is no state of an earlier call ({error!r}); starting anew"
            return
        if device != self.fingerprint["device"]:
            self.num_calls = 0
            self.note = f"{file} is of {device}, not of {self.fingerprint['device']}; starting anew"
            return
        self.parts = parts

    def has_passed(self, name: str) -> bool:
        """Tell whether the part passed with the present code and versions."""
        record = self.parts.get(name, {})
        return record.get("status") == PASSED and record.get("key") == self.key

    def order(self, names: Sequence[str], first: Collection[str] = ()) -> list[str]:
        """Return the parts that are still to run, the most telling first; `names` are in order of
        value. Those of `first` come before all others, also where they have passed.

        With unchanged code: those that no call has reached, then the one during which a call was
        killed, then those that failed. With other code: those that failed, then those that no call has
        reached, then those that passed with the earlier code.
        """

        def rank(name: str) -> int:
            record = self.parts.get(name)
            if name in first:
                return -1
            if record is None or record["status"] in (CUT, SKIPPED):
                return 1
            if record["key"] != self.key:
                return 2 if record["status"] == PASSED else 0
            return 2 if record["status"] == RUNNING else 3

        left = [name for name in names if name in first or not self.has_passed(name)]
        return sorted(left, key=rank)  # stable: within a rank they keep their order

    def record(self, name: str, **found: Any) -> None:
        """Put a part's record on file. A part that has started is recorded as `running`."""
        record = {"key": self.key, "call": self.num_calls, **found}
        self.parts[name] = record
        line = json.dumps({"part": name, "at": time.strftime("%FT%TZ", time.gmtime()), **record})
        for folder in self.folders:
            with open(folder / "gpu_check.jsonl", "a") as sink:
                sink.write(line + "\n")
                sink.flush()
                os.fsync(sink.fileno())
        self.write()

    def write(self) -> None:
        text = json.dumps(
            {"num_calls": self.num_calls, "fingerprint": self.fingerprint, "key": self.key,
             "parts": self.parts},
            indent=1,
        )  # fmt: skip
        for folder in self.folders:
            write_whole(folder / "gpu_check.json", text + "\n", durable=True)
