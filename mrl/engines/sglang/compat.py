"""Imports SGLang's internals through the table in names.py, for plug-ins and the server process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from mrl.engines.sglang.names import NAMES
from mrl.system.releases import SUPPORTED, NameTable

TABLE = NameTable(
    "sglang",
    NAMES,
    f"SGLang {{release}} has no {{name}}; mrl works with {', '.join(SUPPORTED['sglang'])}",
)
path_of = TABLE.path
take = cache(TABLE.take)  # the scheduler takes names with every request


def hook(name: str, function: Callable[..., Any], kind: str) -> None:
    """Register `function` as a hook on the SGLang function that names.py lists as `name`. `kind` is
    BEFORE, AFTER, AROUND or REPLACE. Raises ImportError if this SGLang has no such function."""
    path = TABLE.required(name)
    take("HookRegistry.register")(path, function, getattr(take("HookType"), kind))


def parallelism_info(checker: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank's indices in its parallel groups, for the answer to POST /weights_checker.
    `options` are the keyword arguments that SGLang passed to the hooked function; since 0.5.21 they
    contain the model's `role`."""
    role = {"role": options["role"]} if "role" in options else {}
    return checker._parallelism_info(**role).model_dump()
