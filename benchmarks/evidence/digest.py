"""This module digests the code behind a result, so that a result can be seen to be out of date.

The digest is taken over definitions, not over files: a Python file is cut into its top-level
statements, and each gives one hash of its syntax tree. So whatever cannot change a measurement leaves
the digest as it is: comments, formatting, docstrings, imports, the texts of raised errors, and where a
definition lies, so that a move, a split or a new name of a file does not count. Every other
change of syntax counts, with three exceptions: what a name was imported from, the order of
top-level statements, and definitions that ask for their file's own place.

C++ and CUDA sources are hashed without comments, `#include` lines and spaces; YAML and JSON by their
values; other files by their bytes. No history of Git is needed: a shallow clone gives the same digest.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
SUFFIXES = (".py", ".h", ".hpp", ".cpp", ".cc", ".cu", ".cuh", ".yaml", ".json", ".jsonl", ".sh")


def measured_files(patterns: Iterable[str], root: Path = ROOT) -> dict[str, bytes]:
    """Return the contents of the files under `root` that one of `patterns` names, by relative path."""
    found: dict[str, bytes] = {}
    for pattern in patterns:
        top = root / pattern.split("*")[0].rstrip("/")
        top = top if top.exists() else top.parent
        for file in sorted(top.rglob("*")) if top.is_dir() else [top]:
            name = file.relative_to(root).as_posix()
            if matches(name, pattern) and file.is_file():
                found[name] = file.read_bytes()
    return found


def matches(path: str, pattern: str) -> bool:
    """Tell whether `pattern` is `path`, a folder that it is in, or fits it with `*` within a folder."""
    if not path.endswith(SUFFIXES):
        return False
    if "*" not in pattern:
        return path == pattern or path.startswith(pattern + "/")
    return re.fullmatch("[^/]*".join(map(re.escape, pattern.split("*"))), path) is not None


def digest(files: Mapping[str, bytes]) -> str:
    """Return the digest of all definitions in `files`, as 16 hexadecimal digits."""
    parts = {part for path, content in files.items() for part in definitions(path, content)}
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:16]


@lru_cache(maxsize=4096)
def definitions(path: str, content: bytes) -> frozenset[str]:
    """Return a hash of each definition in a file; what cannot change a measurement has none."""
    suffix = Path(path).suffix
    cut: Callable[[str], list[str]] = CUTTERS.get(suffix, lambda text: [text])
    parts = (f"{suffix}\0{part}" for part in cut(content.decode()) if part)
    return frozenset(hashlib.sha256(part.encode()).hexdigest() for part in parts)


class _Bare(ast.NodeTransformer):
    """Drops docstrings, imports and the texts of raised errors from a syntax tree."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                setattr(node, field, [line for line in block if not _is_idle(line)])
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return ast.Raise(exc=error, cause=node.cause)


def _is_idle(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):  # a docstring, of a field as well
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Import | ast.ImportFrom | ast.Pass)


def _of_python(text: str) -> list[str]:
    tree = _Bare().visit(ast.parse(text))
    parts = [_dump(node) for node in tree.body]
    # `Path(__file__).parents[2]` says where the file lies, and changes when it is moved.
    return [part for part in parts if "id='__file__'" not in part]


def _dump(node: ast.AST) -> str:
    """Return `ast.dump` of a node as Python 3.11 prints it, so that every Python gives one digest."""
    for each in ast.walk(node):
        if (
            getattr(each, "type_params", None) == []
        ):  # Python 3.12 adds the field to each definition
            del each.type_params  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(
            each, ast.JoinedStr
        ):  # Python 3.12.1 ends some format specs with an empty text
            each.values = [part for part in each.values if getattr(part, "value", None) != ""]
    options = {"show_empty": True} if sys.version_info >= (3, 13) else {}
    return ast.dump(node, **options)


def _of_cpp(text: str) -> list[str]:
    bare = re.sub(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', r"\1", text, flags=re.S)
    lines = (
        line for line in bare.splitlines() if not re.match(r"\s*#\s*(include|pragma once)", line)
    )
    return ["".join("".join(lines).split())]


def _of_yaml(text: str) -> list[str]:
    return [json.dumps(yaml.safe_load(text), sort_keys=True, default=str)]


def _of_json(text: str) -> list[str]:
    return [json.dumps(json.loads(text), sort_keys=True)]


CUTTERS: dict[str, Callable[[str], list[str]]] = {
    ".py": _of_python,
    ".yaml": _of_yaml,
    ".json": _of_json,
    **dict.fromkeys((".h", ".hpp", ".cpp", ".cc", ".cu", ".cuh"), _of_cpp),
}
