"""Finds the plug-ins that a recipe names: rewards, environments, algorithms and engines.

A spec is one of

    NAME                    a file of the kind's folder (`gspo`: mrl/algorithms/gspo.py)
    package.module          a module on the Python path
    package.module:OBJECT   an object in it
    path/file.py            a file
    path/file.py:OBJECT     an object in it

Without OBJECT the plug-in is what the kind's own files call theirs (`Kind.attributes`), or the module.
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
from types import ModuleType
from typing import Any

from mrl.errors import InputError
from mrl.system.worker_user import check_open

_ROOT = Path(__file__).parents[2]
_TEXT = "__mrl_digest__"
"""The attribute of a module from a file with the digest of the text that was run."""


@dataclass(frozen=True)
class Kind:
    """A `Kind` says where the plug-ins of one kind are and what messages call them."""

    noun: str
    """What messages call it, such as `reward` or `rollout.engine`."""
    package: str
    """The package whose files are the plug-ins that come with mrl, such as `mrl.rewards`."""
    not_plugins: frozenset[str]
    """Names of the files of the package that are no plug-ins."""
    attributes: tuple[str, ...] = ()
    """What a file calls its plug-in: the first of these that it has; empty: the module itself."""
    form: str = "function"
    """What messages call the object: `function`, `class` or `object`."""
    example: str = "NAME"
    """How messages write the name of an object."""
    inner: str = ""
    """The file of a plug-in that is a folder, without `.py`; empty where a folder cannot be one."""

    def names(self) -> list[str]:
        """Return the names of the plug-ins that come with mrl, sorted."""
        return sorted(self._modules())

    def module(self, name: str) -> str:
        """Return the dotted module of a plug-in that comes with mrl."""
        return self._modules()[name]

    def _modules(self) -> dict[str, str]:
        folder = _ROOT / self.package.replace(".", "/")
        found = {file.stem: f"{self.package}.{file.stem}" for file in folder.glob("*.py")}
        if self.inner:
            inner = folder.glob(f"*/{self.inner}.py")
            found |= {f.parent.name: f"{self.package}.{f.parent.name}.{self.inner}" for f in inner}
        return {name: module for name, module in found.items() if name not in self.not_plugins}


def resolve(kind: Kind, spec: str) -> Any:
    """Import what `spec` names. Raises InputError, one line: not found, or does not import."""
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
    """Import a plug-in that comes with mrl, where `name` is from data and must not name other code.

    Raises InputError where there is none of this name; `otherwise` says there what else to do.
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
    if "." not in spec or not all(spec.split(".")) or not _exists(kind, spec):
        yours = f"path/file.py:{kind.example} or package.module:{kind.example}"
        raise InputError(_unknown(kind, spec, f"name your own as {yours}"))
    return _guarded(kind, spec, lambda: importlib.import_module(spec))


def _exists(kind: Kind, module: str) -> bool:
    """Whether there is such a module; its package is imported to find out."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        # Otherwise the module may be there, and something that its package imports is not.
        return error.name is None or not f"{module}.".startswith(f"{error.name}.")
    except (Exception, SystemExit):  # its package does not import: the import will say why
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
    raise InputError(f"{kind.noun} {spec!r}: no {kind.form} {wanted} in it{hint}")


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
    """Run a file, once for each text that it has while the process lives."""
    check_open(path, f"{kind.noun} {spec!r}")
    if not path.is_file():
        raise InputError(f"{kind.noun} {spec!r}: no file {path}")
    path = path.resolve()
    # The folder's digest tells files of one name apart.
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
    if known is not None:  # cached bytecode goes by whole seconds, and an edit may be faster
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: its neighbours import, and shadow nothing
    sys.modules[name] = module  # dataclasses and typing look their module up here
    try:
        _guarded(kind, spec, lambda: loader.exec_module(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _guarded(kind: Kind, spec: str, load: Callable[[], Any]) -> Any:
    """Import user code. Raises InputError with what it raised."""
    try:
        return load()
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # user code at import: anything can happen
        message = " ".join(str(error).split())
        raise InputError(
            f"{kind.noun} {spec!r} does not import: {type(error).__name__}: {message}"
        ) from None
