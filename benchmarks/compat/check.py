"""Looks the private names of a library up in the source of one release."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from benchmarks.compat.source import Definition, Source
from mrl.system.releases import Name, numbers


def missing(names: Mapping[str, Name], release: str, source: Source) -> Iterator[str]:
    """Yield one line for each name, argument or attribute that the release lacks."""
    oldest = min((since for each in names.values() for since in each.paths), key=numbers)
    for name, each in names.items():
        path = each.path(max(release, oldest, key=numbers))  # an older one should have its names
        if not path:
            continue
        found = source.find(path)
        if found is None:
            yield f"{name}: there is no {path}"
            continue
        given = _arguments(source, path, found)
        if each.arguments and given is None:
            yield f"{name}: {path} is no function any more"
        if given is not None and not _are_in_order(each.arguments, given):
            yield (
                f"{name}: {path} takes ({', '.join(given)}), and mrl relies on "
                f"({', '.join(each.arguments)})"
            )
        for attribute in each.attributes:
            if source.find(f"{path}.{attribute}") is None:
                yield f"{name}: {path} has no attribute {attribute}"


def _arguments(source: Source, path: str, found: Definition) -> list[str] | None:
    """Return the parameters of a function, or of the constructor of a class; None if they are not in
    the source."""
    if isinstance(found.statement, ast.ClassDef):
        constructor = source.find(f"{path}.__init__")
        return None if constructor is None else constructor.arguments()
    return found.arguments()


def _are_in_order(wanted: tuple[str, ...], given: list[str]) -> bool:
    rest = iter(given)
    return all(name in rest for name in wanted)
