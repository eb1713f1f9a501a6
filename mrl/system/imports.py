"""Imports modules without garbage collections."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Suspend garbage collection while the `with` block imports modules.

    Collections would scan all objects that the imports create, again and again, and free nothing. The
    objects are also excluded from later collections, including the one at exit (`gc.freeze`).
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
