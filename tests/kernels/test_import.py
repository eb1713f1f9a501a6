"""An unbuilt extension is an error, not a slow path."""

from __future__ import annotations

import importlib
import sys

import pytest


def test_missing_extension_fails_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mrl._C", None)
    monkeypatch.delitem(sys.modules, "mrl.kernels", raising=False)
    with pytest.raises(ImportError, match="run `make setup` to build it"):
        importlib.import_module("mrl.kernels")
