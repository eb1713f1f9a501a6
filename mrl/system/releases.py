"""Supported releases of the libraries that mrl builds on, and tables of their private names."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

SUPPORTED: dict[str, tuple[str, ...]] = {
    "sglang": ("0.5.12", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
    "megatron-core": ("0.16.1", "0.19.2"),
}
"""Supported releases by package, oldest first. Every private name that mrl uses exists in all of
them (`make compat`). The tests run with the last release that this Python can install (`newest`),
and the docs recommend that release. Preflight refuses other releases."""
NEEDS_PYTHON: dict[tuple[str, str], tuple[int, int]] = {("megatron-core", "0.19.2"): (3, 12)}
"""The minimum Python version of a supported release, if it is newer than mrl's own minimum."""
ADAPTERS_SINCE = "0.5.20"
"""The first SGLang release that can serve mrl's LoRA adapters."""


@dataclass(frozen=True)
class Name:
    """A name inside a library that is not part of the library's public interface."""

    paths: Mapping[str, str]
    """Dotted paths by the first release in which they are valid. An empty path means that the name no
    longer exists and mrl works without it."""
    arguments: tuple[str, ...] = ()
    """Names of the parameters that mrl relies on, in order. The function may have other parameters
    before, between and after these."""
    attributes: tuple[str, ...] = ()
    """If the name is a class, the attributes that mrl reads. They exist in every release that has the
    class."""

    def path(self, release: str) -> str:
        """Return the dotted path of the name in a release; empty if the release has no such name."""
        found = [path for since, path in self.paths.items() if numbers(since) <= numbers(release)]
        return found[-1] if found else ""


def since(release: str, path: str, *arguments: str, attributes: tuple[str, ...] = ()) -> Name:
    """Return a Name that has the dotted path `path` in `release` and in all later releases, and no
    path in earlier releases."""
    return Name({release: path}, arguments, attributes)


@dataclass(frozen=True)
class NameTable:
    """The private names of one package that mrl uses, looked up in the installed release."""

    package: str
    names: Mapping[str, Name]
    missing: str = "{package} {release} has no {name}"
    """The message for a name that the installed release lacks."""

    def path(self, name: str) -> str:
        """Return the dotted path of a name; empty if the installed release has no such name."""
        return self.names[name].path(_installed(self.package))

    def has(self, name: str) -> bool:
        """Return whether the installed release has a name."""
        return bool(self.path(name))

    def take(self, name: str) -> Any:
        """Import the module of a name, and return the object that the name refers to.

        Raises ImportError or AttributeError if the installed release does not have the name.
        """
        owner, last = locate(self.required(name))
        return getattr(owner, last)

    def replace(self, name: str, value: Any) -> None:
        """Make a name of the library refer to `value`.

        Raises ImportError or AttributeError if the installed release does not have the name.
        """
        owner, last = locate(self.required(name))
        getattr(owner, last)
        setattr(owner, last, value)

    def required(self, name: str) -> str:
        """Return the dotted path of a name. Raises ImportError if the installed release lacks it."""
        if not (path := self.path(name)):
            release = _installed(self.package)
            raise ImportError(self.missing.format(package=self.package, release=release, name=name))
        return path


@cache
def _installed(package: str) -> str:
    return importlib.metadata.version(package)


def locate(path: str) -> tuple[Any, str]:
    """Return the module or class that contains the last part of a dotted path, and that last part.

    Raises ImportError or AttributeError if the module or class does not exist.
    """
    parts = path.split(".")
    for number in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:number])
        try:
            owner: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # a module that it imports is missing
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
    """Return the newest supported release of a package for a Python version.

    The default is the version of the Python that runs this process.
    """
    *_, found = (
        each
        for each in SUPPORTED[package]
        if tuple(python[:2]) >= NEEDS_PYTHON.get((package, each), (0, 0))
    )
    return found


def refusal(package: str, release: str) -> str:
    """Return one line that says that a release is not supported, and what to install instead.

    The result is empty if the release is supported.
    """
    known = SUPPORTED[package]
    if numbers(release) in map(numbers, known):
        return ""
    return (
        f"{package} {release} is installed, but mrl works with {', '.join(known)}: "
        f"pip install '{package}=={newest(package)}'"
    )
