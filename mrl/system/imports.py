"""Imports modules without collecting garbage."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage while the `with` block imports modules.

    Collections look at all objects that the imports make, again and again, and find nothing. What has
    been imported is also left out of later collections, the one at exit included (`gc.freeze`).
    """
    was_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
        if was_enabled:
            gc.enable()
