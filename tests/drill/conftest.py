"""The toy model and the recorded run of tests/loop."""

from tests.loop.conftest import recorded, toy

__all__ = ["recorded", "toy"]
