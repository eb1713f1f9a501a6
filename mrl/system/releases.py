"""Which releases of the libraries below mrl work, and names that those libraries keep private."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SUPPORTED: dict[str, tuple[str, ...]] = {
    "sglang": ("0.5.12", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
    "megatron-core": ("0.16.1", "0.19.2"),
}
"""The releases, by package, in which every private name is found (`make compat`); the last that this
Python can install (`newest`) is the one that the tests run and the docs recommend. Preflight refuses
others."""
NEEDS_PYTHON: dict[tuple[str, str], tuple[int, int]] = {("megatron-core", "0.19.2"): (3, 12)}
"""The oldest Python of a supported release, where mrl itself runs with an older one."""
ADAPTERS_SINCE = "0.5.20"
"""The first SGLang in which mrl's adapters work."""


@dataclass(frozen=True)
class Name:
    """A name inside a library that is no part of its public interface."""

    paths: Mapping[str, str]
    """The dotted path from each release on. Empty: from there on it is gone, and mrl does without."""
    arguments: tuple[str, ...] = ()
    """Parameters that mrl relies on, in their order; others may stand between and after them."""
    attributes: tuple[str, ...] = ()
    """Attributes of a class that mrl reads, in every release that has the class."""

    def path(self, release: str) -> str:
        """Return the path in a release; empty if it has no such name."""
        found = [path for since, path in self.paths.items() if numbers(since) <= numbers(release)]
        return found[-1] if found else ""


def since(release: str, path: str, *arguments: str, attributes: tuple[str, ...] = ()) -> Name:
    """Return a name that has one path from `release` on, and that earlier releases lack."""
    return Name({release: path}, arguments, attributes)


def locate(path: str) -> tuple[Any, str]:
    """Return what holds the last name of a dotted path, a module or a class, and that name. Raises
    ImportError or AttributeError if there is none."""
    parts = path.split(".")
    for number in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:number])
        try:
            owner: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # what it imports is not there
            continue
        for part in parts[number:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1]
    raise ImportError(f"{path} cannot be found")


def numbers(release: str) -> tuple[int, ...]:
    """Return the first three numbers of a release: `0.16.1rc2+cu12` gives (0, 16, 1)."""
    found = [re.match(r"\d+", part) for part in release.split(".")[:3]]
    return tuple(int(match[0]) for match in found if match)


def newest(package: str, python: Sequence[int] = sys.version_info[:2]) -> str:
    """Return the newest supported release that a Python can install; by default this one."""
    *_, found = (
        each
        for each in SUPPORTED[package]
        if tuple(python[:2]) >= NEEDS_PYTHON.get((package, each), (0, 0))
    )
    return found


def refusal(package: str, release: str) -> str:
    """Say in one line why a release cannot be used and what to install; empty if it can."""
    known = SUPPORTED[package]
    if numbers(release) in map(numbers, known):
        return ""
    return (
        f"{package} {release} is installed, and mrl works with {', '.join(known)}: "
        f"pip install '{package}=={newest(package)}'"
    )
