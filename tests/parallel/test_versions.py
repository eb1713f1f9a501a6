"""What `mrl check` says about versions: the installed ones, and others given in."""

from __future__ import annotations

import importlib.metadata

import pytest

from parallel.versions import version_rows


def rows(python: str = "3.12.1", **versions: str) -> dict[str, tuple[str, str]]:
    known = {name.replace("_", "-"): version for name, version in versions.items()}
    return {name: (v, text) for name, v, text in version_rows(known.get, python)}


def test_the_installed_versions_are_read() -> None:
    found = {name: version for name, version, _ in version_rows()}
    assert found["torch"] == importlib.metadata.version("torch")
    assert found["megatron-core"] == importlib.metadata.version("megatron-core")


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.15.3", "warning: older than 0.16.1"),
        ("0.16.1", "tested"),
        ("0.17.0", "warning: untested"),
        ("0.19.2", "passed once"),
        ("0.20.0", "warning: newer"),
        ("1.0", "warning: newer"),
    ],
)
def test_megatron_versions(version: str, says: str) -> None:
    assert says in rows(megatron_core=version)["megatron-core"][1]


def test_missing_and_odd_packages() -> None:
    found = rows(python="3.10.4", torch="2.13.0+cpu", transformer_engine="2.4.0.dev0")
    assert found["python"][1].startswith("warning: mrl needs 3.11")
    assert found["torch"] == ("2.13.0+cpu", "tested, CPU build: no GPU is used")
    assert found["transformer-engine"][1].startswith("warning: older than 2.6")
    for name in ("megatron-core", "sglang"):
        assert found[name][0] == "(not installed)"
        assert found[name][1].startswith("warning")
    assert "0.16.1 is the last for 3.11" in rows(python="3.11.9")["python"][1]
    assert rows(torch="2.12.1")["torch"][1] == "warning: tests ran with 2.13"
    assert rows(torch="2.9.0")["torch"][1].startswith("warning: older than 2.11")
    assert rows(sglang="0.5.20", apex="0.1")["apex"][1] == "fused Adam on GPUs"
