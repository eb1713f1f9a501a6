"""Finds what the source of mrl imports from a library."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path


def imported(files: Iterable[Path], package: str) -> Iterator[tuple[str, str]]:
    """Yield (file:line, dotted path) of every import from `package`, once for each path."""
    seen: set[str] = set()
    for file in files:
        source = file.read_bytes()
        if package.split(".", maxsplit=1)[0].encode() not in source:
            continue
        for each in ast.walk(ast.parse(source)):
            paths: list[str] = []
            if isinstance(each, ast.ImportFrom) and not each.level and each.module:
                paths = [f"{each.module}.{alias.name}" for alias in each.names]
            elif isinstance(each, ast.Import):
                paths = [alias.name for alias in each.names]
            for path in paths:
                if f"{path}.".startswith(f"{package}.") and path not in seen:
                    seen.add(path)
                    yield f"{file}:{getattr(each, 'lineno', 0)}", path
