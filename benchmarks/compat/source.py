"""Finds names in the source of a package that is not installed, without importing it.

A release may need other versions of torch or transformers than those at hand, so an import would say
little. Names are followed through imports, `import *` and base classes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mrl.errors import InputError

MAX_DEPTH = 20
"""Imports that are followed for one name; more are a cycle."""


class Definition(NamedTuple):
    """A statement that binds a name, and the module in which it is."""

    module: str
    statement: ast.AST

    def arguments(self) -> list[str] | None:
        """Return the names of a function's parameters, with `*` and `**` before those that take the
        rest; None for what is no function."""
        if not isinstance(self.statement, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        given = self.statement.args
        names = [each.arg for each in (*given.posonlyargs, *given.args)]
        names += [f"*{given.vararg.arg}"] if given.vararg else []
        names += [each.arg for each in given.kwonlyargs]
        return names + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


class Source:
    """The source files below a folder, which holds packages as `site-packages` does."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[str, ast.Module] = {}

    def find(self, path: str, depth: int = 0) -> Definition | None:
        """Return the definition of a dotted path, such as `package.module.Class.method`; None if there
        is none. An attribute of a class may be one that a method assigns to `self`."""
        parts = path.split(".")
        for number in range(len(parts), 0, -1):
            if self._file(module := ".".join(parts[:number])):
                return self._below(module, parts[number:], depth)
        return None

    def _below(self, module: str, names: Sequence[str], depth: int) -> Definition | None:
        here: Definition | None = Definition(module, self._module(module))
        for name in names:
            if here is None or depth > MAX_DEPTH:
                return None
            here = self._member(here, name, depth)
        return here

    def _member(self, owner: Definition, name: str, depth: int) -> Definition | None:
        module, statement = owner
        if not isinstance(statement, ast.Module | ast.ClassDef):
            return None
        stars = []
        for bound, each in reversed(list(_bindings(statement.body))):  # the last binding counts
            if isinstance(each, ast.Delete) and bound == name:
                return None
            if bound == "*":
                stars.append(each)
            elif bound == name and (found := self._followed(module, name, each, depth)):
                return found
        for star in stars:
            if found := self.find(f"{self._origin(module, star)}.{name}", depth + 1):
                return found
        if isinstance(statement, ast.ClassDef):
            if (assigned := _assigned_to_self(statement, name)) is not None:
                return Definition(module, assigned)
            for base in statement.bases:
                text = ast.unparse(base).split("[")[0].split(".")
                found = self._below(module, text, depth + 1)
                if found and (inherited := self._member(found, name, depth + 1)):
                    return inherited
        return None

    def _followed(self, module: str, name: str, each: ast.AST, depth: int) -> Definition | None:
        """Return what a binding stands for: the definition itself, or what an import brings."""
        if isinstance(each, ast.ImportFrom):
            original = next(a.name for a in each.names if (a.asname or a.name) == name)
            return self.find(f"{self._origin(module, each)}.{original}", depth + 1)
        if isinstance(each, ast.Import):
            original = next(a.name for a in each.names if (a.asname or a.name) == name)
            return self.find(original, depth + 1)
        return Definition(module, each)

    def _origin(self, module: str, statement: ast.ImportFrom) -> str:
        """Return the absolute name of the module that `from ... import` names."""
        if not statement.level:
            return statement.module or ""
        package = module.split(".")
        file = self._file(module)
        drop = statement.level - (file is not None and file.name == "__init__.py")
        return ".".join([*package[: len(package) - drop], *filter(None, [statement.module])])

    def _module(self, dotted: str) -> ast.Module:
        if dotted not in self._modules:
            file = self._file(dotted)
            try:
                self._modules[dotted] = ast.parse(file.read_bytes() if file else b"")
            except SyntaxError as error:
                raise InputError(f"{file}: this Python cannot read it: {error}") from None
        return self._modules[dotted]

    def _file(self, dotted: str) -> Path | None:
        place = self._root.joinpath(*dotted.split("."))
        files = (place.with_suffix(".py"), place / "__init__.py")
        return next((file for file in files if file.is_file()), None)


def _bindings(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.ImportFrom | ast.AST]]:
    """Yield (name, statement) of what the statements bind, also below `if`, `try` and `with`; `*` for
    `import *`."""
    for each in body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield each.name, each
        elif isinstance(each, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name, each) for alias in each.names)
        elif isinstance(each, ast.Assign | ast.Delete):
            yield from ((t.id, each) for t in each.targets if isinstance(t, ast.Name))
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id, each
        elif isinstance(each, ast.If | ast.With):
            yield from _bindings([*each.body, *getattr(each, "orelse", [])])
        elif isinstance(each, ast.Try):
            handled = [line for handler in each.handlers for line in handler.body]
            yield from _bindings([*handled, *each.body, *each.orelse, *each.finalbody])


def _assigned_to_self(statement: ast.ClassDef, name: str) -> ast.AST | None:
    for each in ast.walk(statement):
        if not isinstance(each, ast.Assign | ast.AnnAssign):
            continue
        targets = each.targets if isinstance(each, ast.Assign) else [each.target]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute) and ast.unparse(part) == f"self.{name}":
                    return each
    return None
