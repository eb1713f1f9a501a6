"""The toy model of the tests of the loop."""

from tests.loop import conftest

toy = conftest.toy
