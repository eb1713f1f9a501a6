"""Reads the fields of SGLang's ServerArgs from its source: names, types and choices.

The source is parsed, because an import would need the GPU libraries of SGLang's own process. Up to
SGLang 0.5.19, the class ServerArgs itself declares the fields. Since then the classes in
arg_groups/fields/ declare them, in the form `name: A[TYPE, Arg(choices=...)]`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
}


@dataclass(frozen=True)
class Field:
    """The types and choices of a field of ServerArgs, as far as the parser understands them."""

    types: tuple[str, ...] = ()
    """Names of the allowed types if all of them are simple Python types or `None`; empty
    otherwise."""
    choices: tuple[Any, ...] = ()
    """The allowed values; empty if all are allowed."""

    def problem(self, value: Any) -> str:
        """Return what is expected instead of `value`, in words; empty if `value` fits."""
        if value is None:
            return "" if not self.types or "None" in self.types else self._words()
        if self.choices and value not in self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        fits = any(
            isinstance(value, TYPES[name]) and (name == "bool") == isinstance(value, bool)
            for name in self.types
            if name in TYPES
        )
        return "" if fits or not self.types else self._words()

    def _words(self) -> str:
        return " or ".join("null" if name == "None" else name for name in self.types)


def read_fields(srt: Path) -> dict[str, Field]:
    """Return the fields of ServerArgs by name. `srt` is the folder sglang/srt."""
    constants = dict(_constants(srt / "arg_groups" / "choices.py"))
    found = dict(_fields(srt / "server_args.py", constants, only="ServerArgs"))
    for file in sorted((srt / "arg_groups" / "fields").glob("*.py")):
        found.update(_fields(file, constants))
    return found


def _constants(file: Path) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield (name, values) of each module-level constant of a file; the values are empty unless the
    constant is a list or a set."""
    for node in _parse(file):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, _literal(node.value)


def _fields(
    file: Path, constants: dict[str, tuple[Any, ...]], *, only: str | None = None
) -> Iterator[tuple[str, Field]]:
    """Yield the annotated fields of all classes of a file, or only of the class `only`."""
    for node in _parse(file):
        if isinstance(node, ast.ClassDef) and only in (None, node.name):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id, _field(line.annotation, constants)


def _parse(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_bytes()).body if file.is_file() else []


def _field(annotation: ast.expr, constants: dict[str, tuple[Any, ...]]) -> Field:
    """Return the field that an annotation of the form `TYPE` or `A[TYPE, Arg(...)]` declares."""
    choices: tuple[Any, ...] = ()
    if _name(annotation) == "A" and isinstance(annotation, ast.Subscript):
        annotation, *rest = _elements(annotation.slice)
        for call in rest:
            for keyword in call.keywords if isinstance(call, ast.Call) else ():
                if keyword.arg == "choices":
                    value = keyword.value
                    named = constants.get(value.id, ()) if isinstance(value, ast.Name) else None
                    choices = _literal(value) if named is None else named
    types, literal = _types(annotation)
    return Field(types, choices or literal)


def _types(annotation: ast.expr) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Return (names of the simple types in an annotation, values of its Literal types). Both are empty
    if the annotation contains a type that is neither simple nor a Literal."""
    if isinstance(annotation, ast.Constant) and annotation.value is None:
        return ("None",), ()
    if isinstance(annotation, ast.BinOp):
        return _joined([annotation.left, annotation.right])
    name = _name(annotation)
    if isinstance(annotation, ast.Name):
        return ((name,), ()) if name in TYPES else ((), ())
    if not isinstance(annotation, ast.Subscript):
        return (), ()
    inner = _elements(annotation.slice)
    if name == "Literal":
        values = tuple(each.value for each in inner if isinstance(each, ast.Constant))
        names = ("None" if value is None else type(value).__name__ for value in values)
        return tuple(dict.fromkeys(names)), values
    if name == "Optional":
        return _joined([*inner, ast.Constant(None)])
    return _joined(inner) if name == "Union" else ((), ())


def _joined(parts: list[ast.expr]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    read = [_types(part) for part in parts]
    if not all(types for types, _ in read):
        return (), ()
    types = tuple(dict.fromkeys(name for types, _ in read for name in types))
    return types, tuple(value for _, values in read for value in values)


def _elements(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


def _name(node: ast.expr) -> str:
    base = node.value if isinstance(node, ast.Subscript) else node
    return base.id if isinstance(base, ast.Name) else ""


def _literal(node: ast.expr) -> tuple[Any, ...]:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return ()
    is_set = isinstance(value, set)
    return tuple(sorted(value) if is_set else value) if is_set or isinstance(value, list) else ()
