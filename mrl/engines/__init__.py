"""Rollout engines by name. `rollout.engine: NAME` means NAME.py or NAME/engine.py in this folder.

base.py has the contract that every engine fulfils.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from mrl.errors import InputError
from mrl.system.plugins import Kind, resolve

if TYPE_CHECKING:  # it imports torch, which the process of a server imports later or not at all
    from mrl.engines.base import RolloutEngine, RolloutNode

_KIND = Kind(
    noun="rollout.engine",
    package="mrl.engines",
    not_plugins=frozenset(
        {
            "__init__",
            "base",
            "gate",
            "gate_times",
            "handles",
            "admission",
            "sampling",
            "crashed_requests",
            "top_logprobs",
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
    """Import the module of an engine, and return its class `Engine` or its function `build_engine`.

    The class or function takes an `EngineConfig`. Raises InputError for an unknown name, or for a
    module with neither an `Engine` nor a `build_engine`. mrl/system/plugins.py describes how a name
    is looked up.
    """
    engine: Any = resolve(_KIND, name)
    if not callable(engine):
        raise InputError(
            f"rollout.engine {name!r} is a {type(engine).__name__}, expected a class `Engine` or a "
            "function `build_engine`"
        )
    return cast("Callable[..., RolloutEngine]", engine)


def node_class(engine: Callable[..., RolloutEngine], name: str) -> Callable[..., RolloutNode]:
    """Return an engine's `Node`, the class of its process on each node other than the first.

    The class takes an `EngineConfig` and the node's rank. Raises InputError, with `name` in the
    message, for an engine that cannot span nodes.
    """
    found = getattr(engine, "Node", None)
    if found is None:
        raise InputError(
            f"rollout.engine {name}: it has no `Node`, so it cannot span nodes; lower "
            "rollout.tensor_parallel_size to the ranks of a node"
        )
    return found
