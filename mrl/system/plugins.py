"""Finds the plug-ins that a recipe names: rewards, environments, algorithms and engines.

A spec is one of

    NAME                    a file of the kind's folder (`gspo`: mrl/algorithms/gspo.py)
    package.module          a module on the Python path
    package.module:OBJECT   an object in it
    path/file.py            a file
    path/file.py:OBJECT     an object in it

Without OBJECT the plug-in is the first of `Kind.attributes` that the module has, or the module itself
if `Kind.attributes` is empty.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from mrl.errors import InputError
from mrl.system.worker_user import check_open

_ROOT = Path(__file__).parents[2]
_TEXT = "__mrl_digest__"
"""Name of an attribute of modules loaded from a file. It holds the digest of the source that ran."""


@dataclass(frozen=True)
class Kind:
    """A kind of plug-in: where its built-in plug-ins are, and how messages name it."""

    noun: str
    """The name of the kind in messages, such as `reward` or `rollout.engine`."""
    package: str
    """The package whose files are the built-in plug-ins, such as `mrl.rewards`."""
    not_plugins: frozenset[str]
    """Names of the files in the package that are not plug-ins."""
    attributes: tuple[str, ...] = ()
    """Names of attributes of a module that can be its plug-in; the first one that exists is used. If
    this is empty, the module itself is the plug-in."""
    form: str = "function"
    """The word for a plug-in object in messages: `function`, `class` or `object`."""
    example: str = "NAME"
    """Placeholder in messages for the name of an object."""
    inner: str = ""
    """Name (without `.py`) of the file that is imported if a plug-in is a folder; empty if a plug-in
    cannot be a folder."""

    def names(self) -> list[str]:
        """Return the names of the built-in plug-ins, sorted."""
        return sorted(self._modules())

    def module(self, name: str) -> str:
        """Return the dotted module name of a built-in plug-in."""
        return self._modules()[name]

    def _modules(self) -> dict[str, str]:
        folder = _ROOT / self.package.replace(".", "/")
        found = {file.stem: f"{self.package}.{file.stem}" for file in folder.glob("*.py")}
        if self.inner:
            inner = folder.glob(f"*/{self.inner}.py")
            found |= {f.parent.name: f"{self.package}.{f.parent.name}.{self.inner}" for f in inner}
        return {name: module for name, module in found.items() if name not in self.not_plugins}


def resolve(kind: Kind, spec: str) -> Any:
    """Import and return the plug-in that `spec` names.

    Raises InputError, with a one-line message, if the plug-in is not found or cannot be imported.
    """
    target, colon, name = spec.rpartition(":")
    if not colon:
        return _pick(kind, spec, _find_module(kind, spec), kind.attributes)
    if not target or not name:
        raise InputError(
            f"{kind.noun} {spec!r}: expected NAME, path/file.py:{kind.example} or "
            f"package.module:{kind.example}"
        )
    module = (
        _import_file(kind, spec, Path(target))
        if _is_file(target)
        else _guarded(kind, spec, lambda: importlib.import_module(target))
    )
    return _pick(kind, spec, module, (name,))


def resolve_builtin(kind: Kind, name: str, otherwise: str) -> Any:
    """Import and return a built-in plug-in.

    Unlike `resolve`, this function is safe if `name` comes from data, because it imports no other code.
    Raises InputError if no built-in plug-in has this name; `otherwise` is the advice in the message.
    """
    if name not in kind.names():
        raise InputError(_unknown(kind, name, otherwise))
    module = _guarded(kind, name, lambda: importlib.import_module(kind.module(name)))
    return _pick(kind, name, module, kind.attributes)


def _is_file(target: str) -> bool:
    return target.endswith(".py") or "/" in target


def _find_module(kind: Kind, spec: str) -> ModuleType:
    if _is_file(spec):
        return _import_file(kind, spec, Path(spec))
    if spec in kind.names():
        return _guarded(kind, spec, lambda: importlib.import_module(kind.module(spec)))
    if "." not in spec or not all(spec.split(".")) or not _exists(spec):
        yours = f"path/file.py:{kind.example} or package.module:{kind.example}"
        raise InputError(_unknown(kind, spec, f"name your own as {yours}"))
    return _guarded(kind, spec, lambda: importlib.import_module(spec))


def _exists(module: str) -> bool:
    """Return whether a module exists. Its package is imported to find out."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        # If another module is missing, `module` may exist, and its package may fail to import that one.
        return error.name is None or not f"{module}.".startswith(f"{error.name}.")
    except (Exception, SystemExit):  # the later import will report the error
        return True


def _pick(kind: Kind, spec: str, module: ModuleType, names: tuple[str, ...]) -> Any:
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    if not names:
        return module
    near = difflib.get_close_matches(names[0], dir(module), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    wanted = " or ".join(map(repr, names))
    if not hint and _is_file(spec):
        own = _own_names(kind, module)
        hint = f"; it has {', '.join(own)}" if own else ""
        if ":" not in spec:
            hint = f"{hint}; write {spec}:{own[0] if len(own) == 1 else kind.example}"
    raise InputError(f"{kind.noun} {spec!r}: no {kind.form} {wanted} in it{hint}")


def _own_names(kind: Kind, module: ModuleType) -> list[str]:
    """Return the names of the functions (or classes) that the module itself defines, sorted."""
    wanted = type if kind.form == "class" else FunctionType
    return sorted(
        name
        for name, value in vars(module).items()
        if isinstance(value, wanted)
        and not name.startswith("_")
        and value.__module__ == module.__name__
    )


def _folder(kind: Kind) -> str:
    return f"{kind.package.replace('.', '/')}/"


def _unknown(kind: Kind, spec: str, otherwise: str) -> str:
    names = kind.names()
    near = difflib.get_close_matches(spec, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return (
        f"{kind.noun} {spec!r} is not in {_folder(kind)}: expected one of {', '.join(names)}; or "
        f"{otherwise}{hint}"
    )


def _import_file(kind: Kind, spec: str, path: Path) -> ModuleType:
    """Import a file as a module. The file is run again only if its contents have changed."""
    check_open(path, f"{kind.noun} {spec!r}")
    if not path.is_file():
        raise InputError(f"{kind.noun} {spec!r}: no file {path}{_near_file(path)}")
    path = path.resolve()
    # The folder's digest distinguishes files of the same name.
    digest = hashlib.sha256(str(path.parent).encode()).hexdigest()[:8]
    name = f"mrl_plugin_{path.stem}_{digest}"
    text = hashlib.sha256(path.read_bytes()).hexdigest()
    known = sys.modules.get(name)
    if known is not None and getattr(known, _TEXT, "") == text:
        return known
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise InputError(f"{kind.noun} {spec!r}: {path} is not a Python file")
    module, loader = importlib.util.module_from_spec(found), found.loader
    setattr(module, _TEXT, text)
    if known is not None:  # cached bytecode is compared by whole seconds
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last, so that its neighbours shadow nothing
    sys.modules[name] = module  # dataclasses and typing look modules up here
    try:
        _guarded(kind, spec, lambda: loader.exec_module(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _near_file(path: Path) -> str:
    """Return what to do about a missing file: a file with a similar name, or where paths begin."""
    try:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=1)
    except OSError:
        near = []
    if near:
        return f"; did you mean {path.parent / near[0]}?"
    if path.is_absolute():
        return ""
    return "; give its path from the current directory, or in a recipe from the recipe's folder"


def _guarded(kind: Kind, spec: str, load: Callable[[], Any]) -> Any:
    """Return the result of `load`, which imports user code. Turn its exceptions into InputError."""
    try:
        return load()
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        message = " ".join(str(error).split())
        raise InputError(
            f"{kind.noun} {spec!r} cannot be imported: {type(error).__name__}: {message}"
        ) from None
