"""What a recipe names: a file of one of mrl's folders, or the user's `file.py:NAME`, `module:NAME`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mrl.errors import InputError


@dataclass(frozen=True)
class Kind:
    """One kind of plug-in."""

    noun: str
    """`reward`."""
    package: str
    """`mrl.rewards`, whose files are the plug-ins that come with mrl ..."""
    not_plugins: frozenset[str]
    """... but for these."""
    attribute: str
    """What a file of the package calls its plug-in."""
    form: str
    """What it is: `function` or `class`."""
    example: str
    """How messages call one from outside: `func`."""

    def names(self) -> list[str]:
        """Those that come with mrl."""
        files = (Path(__file__).parents[2] / self.package.replace(".", "/")).glob("*.py")
        return sorted(file.stem for file in files if file.stem not in self.not_plugins)


def resolve(kind: Kind, spec: str) -> Any:
    """Import it. Raises InputError, one line: not found, or does not import."""
    target, colon, name = spec.rpartition(":")
    if not colon:
        module, name = _builtin(kind, spec), kind.attribute
    elif not target or not name:
        raise InputError(
            f"{kind.noun} {spec!r}: expected NAME, path/file.py:{kind.example} or "
            f"module:{kind.example}"
        )
    elif target.endswith(".py") or "/" in target:
        module = _load(kind, spec, lambda: _from_file(kind, spec, Path(target)))
    else:
        module = _load(kind, spec, lambda: importlib.import_module(target))
    found = getattr(module, name, None)
    if found is None:
        near = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"{kind.noun} {spec!r}: no {kind.form} {name!r} in it{hint}")
    return found


def _builtin(kind: Kind, spec: str) -> ModuleType:
    names = kind.names()
    if spec not in names:
        near = difflib.get_close_matches(spec, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
        raise InputError(
            f"{kind.noun} {spec!r} is not a file of {kind.package.replace('.', '/')}/; {hint} "
            f"(your own: path/file.py:{kind.example} or package.module:{kind.example})"
        )
    return _load(kind, spec, lambda: importlib.import_module(f"{kind.package}.{spec}"))


def _from_file(kind: Kind, spec: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"{kind.noun} {spec!r}: no file {path}")
    loader = importlib.util.spec_from_file_location(f"mrl_{kind.noun}_{path.stem}", path)
    if loader is None or loader.loader is None:
        raise InputError(f"{kind.noun} {spec!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(loader)
    sys.modules[loader.name] = module  # dataclasses and typing look their module up here
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last: its neighbours import, and shadow nothing
    loader.loader.exec_module(module)
    return module


def _load(kind: Kind, spec: str, load: Any) -> ModuleType:
    try:
        return load()
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # user code at import: anything can happen
        message = " ".join(str(error).split())
        raise InputError(
            f"{kind.noun} {spec!r} does not import: {type(error).__name__}: {message}"
        ) from None
