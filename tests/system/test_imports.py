"""Garbage collection is off while modules are imported, and then as it was before."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from mrl.system.imports import importing


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.enable()
    gc.unfreeze()


def test_it_is_off_for_the_block_only() -> None:
    def fail() -> None:
        with importing():
            assert not gc.isenabled()
            raise ImportError

    with pytest.raises(ImportError):
        fail()
    assert gc.isenabled()
    gc.disable()
    with importing():
        pass
    assert not gc.isenabled()


def test_only_what_was_imported_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    with importing():
        pass
    assert gc.get_freeze_count() == 0  # garbage of a caller would stay for ever
    with importing():
        monkeypatch.setitem(sys.modules, "a_new_module", sys)
    assert gc.get_freeze_count() > 0
