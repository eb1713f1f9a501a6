"""Run kernels with several threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch


@contextmanager
def kernel_threads(num: int) -> Iterator[None]:
    """Let mrl's kernels use `num` threads. torch keeps its own number, so that no pool of its threads
    is left to the tests that fork."""
    with patch.object(torch, "get_num_threads", lambda: num):
        yield
