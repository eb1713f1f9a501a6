"""Finds rollout engines by name (`NAME.py` or `NAME/engine.py`). base.py says what one must do."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

from mrl.errors import InputError
from mrl.rollout.base import RolloutEngine, RolloutNode

NOT_ENGINES = {"__init__", "base", "engine_group"}


def engine_names() -> list[str]:
    """The engines of this folder."""
    room = Path(__file__).parent
    files = {file.stem for file in room.glob("*.py")} - NOT_ENGINES
    folders = {file.parent.name for file in room.glob("*/engine.py")}
    return sorted(files | folders)


def load_engine(name: str) -> Callable[..., RolloutEngine]:
    """The engine class or `build_engine` of a file of this folder, or of a dotted module outside.

    Raises InputError for an unknown name, or a module that offers neither.
    """
    if "." not in name:
        if name not in engine_names():
            near = difflib.get_close_matches(name, engine_names(), n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(
                f"rollout.engine {name!r}: expected one of {', '.join(engine_names())}, or a "
                f"dotted module{hint}"
            )
        module_name = f"mrl.rollout.{name}"
        if (Path(__file__).parent / name).is_dir():
            module_name += ".engine"
    else:
        module_name = name
        if not _exists(module_name):
            raise InputError(
                f"rollout.engine {name!r}: there is no such module; expected package.module on "
                "the Python path"
            )
    module = importlib.import_module(module_name)
    for attribute in ("Engine", "build_engine"):
        if callable(getattr(module, attribute, None)):
            return getattr(module, attribute)
    raise InputError(
        f"rollout.engine {name!r}: expected a class `Engine` or a function `build_engine` in "
        f"{module_name}, found neither"
    )


def _exists(module_name: str) -> bool:
    try:
        return importlib.util.find_spec(module_name) is not None
    except ModuleNotFoundError:
        return False


def node_class(engine: Callable[..., RolloutEngine], name: str) -> Callable[..., RolloutNode]:
    """What runs on the further nodes of an engine. Raises InputError for one that stays on a node."""
    found = getattr(engine, "Node", None)
    if found is None:
        raise InputError(
            f"rollout.engine {name}: it has no `Node`, so it cannot span nodes; lower "
            "rollout.tensor_parallel_size to the ranks of a node"
        )
    return found
