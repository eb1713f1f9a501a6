"""The toy model of tests/loop."""

from tests.loop.conftest import toy

__all__ = ["toy"]
