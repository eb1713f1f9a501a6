"""This module asks an engine for a trace of what it generates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mrl.config.profiling import ProfileConfig
from mrl.rollout.base import EngineLost, RolloutEngine
from mrl.run import console
from mrl.system.profiler import profile_folder


@contextmanager
def engine_profiled(
    config: ProfileConfig, root: Path, step: int, engine: RolloutEngine, number: int
) -> Iterator[None]:
    """Let the engine profile what runs inside, where `config` asks for this step.

    An engine that cannot, or fails to, is one warning. Raises EngineLost where it is lost.
    """
    if not config.engine or step not in config.steps:
        yield
        return
    folder = profile_folder(root, step)
    try:
        if not hasattr(engine, "start_profile"):
            raise RuntimeError("it has no method start_profile")
        engine.start_profile(folder, f"engine_{number:02d}", with_stack=config.with_stack)
    except EngineLost:
        raise
    except RuntimeError as error:
        console.warning(f"profile: rollout engine {number} writes no trace: {error}")
        yield
        return
    yield
    try:
        engine.stop_profile()
    except EngineLost:
        raise
    except RuntimeError as error:
        console.warning(f"profile: rollout engine {number} wrote no trace: {error}")
