"""Takes names from inside SGLang by the table of names.py, for the plug-ins and the server process."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from mrl.rollout.sglang.names import NAMES
from mrl.system.releases import SUPPORTED, locate


@cache
def installed() -> str:
    """Return the release of SGLang that an import would find. Read once: the scheduler asks for names
    with every request."""
    return importlib.metadata.version("sglang")


def path_of(name: str) -> str:
    """Return the dotted path of a name of `NAMES` in the installed release; empty if it has none."""
    return NAMES[name].path(installed())


@cache
def take(name: str) -> Any:
    """Import a name of `NAMES`. Raises AttributeError or ImportError if the release lacks it."""
    owner, last = locate(_required(name))
    return getattr(owner, last)


def _required(name: str) -> str:
    path = path_of(name)
    if not path:
        raise ImportError(
            f"SGLang {installed()} has no {name}; mrl works with {', '.join(SUPPORTED['sglang'])}"
        )
    return path


def hook(name: str, function: Callable[..., Any], kind: str) -> None:
    """Register a hook of SGLang's registry; `kind` is BEFORE, AFTER, AROUND or REPLACE. Raises
    ImportError if the release lacks the name."""
    path = _required(name)
    take("HookRegistry.register")(path, function, getattr(take("HookType"), kind))


def parallelism_info(checker: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return where a rank is, as the answer of POST /weights_checker has it; `options` are those of the
    call, which name the model's role since 0.5.21."""
    role = {"role": options["role"]} if "role" in options else {}
    return checker._parallelism_info(**role).model_dump()
