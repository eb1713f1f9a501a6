"""What `mrl check` says about versions: the installed ones, and others given in."""

from __future__ import annotations

import importlib.metadata

import pytest

from parallel.versions import import_failure, version_rows


def rows(
    python: str = "3.12.1", failures: dict[str, str] | None = None, **versions: str
) -> dict[str, tuple[str, str]]:
    """`failures`: by module, what importing it raises."""
    known = {name.replace("_", "-"): version for name, version in versions.items()}
    found = version_rows(known.get, python, (failures or {}).get)
    return {name: (v, text) for name, v, text in found}


def test_the_installed_versions_are_read() -> None:
    found = {name: version for name, version, _ in version_rows()}
    assert found["torch"] == importlib.metadata.version("torch")
    assert found["megatron-core"] == importlib.metadata.version("megatron-core")


@pytest.mark.parametrize(
    ("version", "says"),
    [
        (
            "0.15.3",
            "warning: megatron-core 0.15.3 is installed, but mrl works with 0.16.1, 0.19.2:",
        ),
        ("0.16.1", "tested"),
        ("0.19.2", "tested"),
        ("0.17.0", "warning: megatron-core 0.17.0 is installed"),
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


def test_what_is_compiled_counts_only_if_it_can_be_imported() -> None:
    assert rows()["transformer-engine"] == (
        "(not installed)", "mrl's own layers are used, which need none"
    )  # fmt: skip
    assert "apex" not in rows()
    good = rows(transformer_engine="2.20.2", sglang_kernel="0.4", torch_memory_saver="0.0.10")
    assert good["transformer-engine"][1] == "its layers on GPUs, with fused rope and permutation"
    assert good["sglang-kernel"] == ("0.4", "SGLang's kernels")
    assert "true_on_policy needs 2.10" in rows(transformer_engine="2.9.0")["transformer-engine"][1]
    broken = rows(
        transformer_engine="2.20.2",
        failures={"transformer_engine.pytorch": "OSError: undefined symbol: _ZN2at4_ops"},
    )
    assert broken["transformer-engine"][1] == (
        "warning: transformer_engine.pytorch cannot be imported (OSError: undefined symbol: "
        "_ZN2at4_ops): mrl's own layers are used, which need none"
    )
    without = rows(torch_memory_saver="0.0.10", failures={"torch_memory_saver": "ImportError: x"})
    assert without["torch-memory-saver"][1].endswith("it cannot give its memory back")


def test_an_import_that_fails_is_one_line(tmp_path, monkeypatch) -> None:
    """One is the package that the index calls apex, another takes its process down."""
    for name, text in (
        ("apex", "import pyramid_of_another_project"),
        ("crashes", "import os; os.abort()"),
        ("well", ""),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = import_failure("apex.multi_tensor_apply")
    assert found == "ModuleNotFoundError: No module named 'pyramid_of_another_project'"
    assert import_failure("crashes") == "the process ended with -6"
    assert import_failure("well") is None
    monkeypatch.setattr("parallel.versions.import_failure", lambda module: None)
    assert rows(apex="0.1")["apex"][1].startswith("NVIDIA's: gradients are accumulated")
