"""Check, before a run starts, that the trackers of its recipe can be used."""

from __future__ import annotations

import importlib.util

from mrl.config import LoggingConfig
from mrl.errors import InputError
from mrl.trackers.base import JSONL, KIND, load_tracker


def check_trackers(config: LoggingConfig) -> None:
    """Raise InputError if a tracker is unknown, or needs a package that is not installed."""
    for name in config.trackers:
        if name == JSONL:
            continue
        missing = [each for each in load_tracker(name).packages(config) if not _is_there(each)]
        if missing:
            extra = f"pip install 'mrl[{name}]'" if name in KIND.names() else "install it"
            raise InputError(
                f"logging: {name} needs the package {missing[0]}, which is not installed; {extra}, or "
                f"leave {name} out of logging.trackers"
            )


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
