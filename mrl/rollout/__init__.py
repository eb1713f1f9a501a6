"""Finds rollout engines by name (`NAME.py` or `NAME/engine.py`). base.py says what one must do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from mrl.errors import InputError
from mrl.rollout.base import RolloutEngine, RolloutNode
from mrl.system.plugins import Kind, resolve

_KIND = Kind(
    noun="rollout.engine",
    package="mrl.rollout",
    not_plugins=frozenset(
        {
            "__init__",
            "base",
            "beside",
            "engine_group",
            "gate",
            "gate_times",
            "line",
            "sampling",
            "crashed_requests",
        }
    ),
    attributes=("Engine", "build_engine"),
    form="class or function",
    example="Engine",
    inner="engine",
)


def engine_names() -> list[str]:
    """Return the names of the engines that come with mrl."""
    return _KIND.names()


def load_engine(name: str) -> Callable[..., RolloutEngine]:
    """Import an engine: its class `Engine`, or its function `build_engine`; see mrl/system/plugins.py.

    Raises InputError for an unknown name, or a module that offers neither.
    """
    engine: Any = resolve(_KIND, name)
    if not callable(engine):
        raise InputError(
            f"rollout.engine {name!r} is a {type(engine).__name__}, expected a class `Engine` or a "
            "function `build_engine`"
        )
    return cast(Callable[..., RolloutEngine], engine)


def node_class(engine: Callable[..., RolloutEngine], name: str) -> Callable[..., RolloutNode]:
    """Return what runs on the further nodes of an engine.

    Raises InputError for an engine that stays on one node.
    """
    found = getattr(engine, "Node", None)
    if found is None:
        raise InputError(
            f"rollout.engine {name}: it has no `Node`, so it cannot span nodes; lower "
            "rollout.tensor_parallel_size to the ranks of a node"
        )
    return found
