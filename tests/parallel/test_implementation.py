"""Which layers run: TransformerEngine is imported, not looked for; its fusions where it has them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mrl.errors import InputError
from parallel import cpu_mode, implementation
from parallel.implementation import choose_implementation, find_transformer_engine, fusions

GPU = torch.device("cuda")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[object]:
    """Put a TransformerEngine of some version on the path whose `pytorch` is this source."""

    def write(version: str, source: str) -> None:
        package = tmp_path / "transformer_engine"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "pytorch.py").write_text(source)
        info = tmp_path / f"transformer_engine-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: transformer-engine\nVersion: {version}\n")

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    find_transformer_engine.cache_clear()
    yield write
    find_transformer_engine.cache_clear()
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]


def test_a_broken_one_is_named_with_its_error(install) -> None:
    install("2.8.0", "raise OSError('libcudnn.so.9: cannot open\\nsecond line')")
    chosen, why = choose_implementation("auto")
    assert chosen == "local"
    assert why == (
        "auto: transformer-engine 2.8.0 does not import (OSError: libcudnn.so.9: cannot open)"
    )
    with pytest.raises(InputError, match=r"libcudnn\.so\.9: cannot open") as error:
        choose_implementation("transformer_engine")
    assert "\n" not in str(error.value)
    assert choose_implementation("local") == ("local", "asked for")
    cpu_mode.hide_broken_transformer_engine()
    with pytest.raises(ImportError):  # what Megatron catches
        importlib.import_module("transformer_engine")


def test_an_old_one_is_not_used(install) -> None:
    install("2.4.0", "")
    assert choose_implementation("auto") == (
        "local",
        "auto: transformer-engine 2.4.0 is older than 2.6",
    )


def test_a_whole_one_is_used_with_its_fusions(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("2.8.0", "")
    assert choose_implementation("auto") == ("transformer_engine", "auto")
    assert choose_implementation("transformer_engine")[0] == "transformer_engine"
    on = fusions("transformer_engine", GPU, torch.bfloat16, is_latent=False)
    assert on == {
        "bias_activation_fusion": True,
        "apply_rope_fusion": True,
        "moe_permute_fusion": True,
        "gradient_accumulation_fusion": False,  # no apex here
    }
    latent = fusions("transformer_engine", GPU, torch.bfloat16, is_latent=True)
    assert latent == on | {"apply_rope_fusion": False}
    native = fusions("local", GPU, torch.bfloat16, is_latent=False)
    assert native == on | {"apply_rope_fusion": False, "moe_permute_fusion": False}
    apex = types.ModuleType("fused_weight_gradient_mlp_cuda")
    monkeypatch.setitem(sys.modules, apex.__name__, apex)
    with_apex = fusions("local", GPU, torch.bfloat16, is_latent=False)
    assert with_apex == native | {"gradient_accumulation_fusion": True}
    full = fusions("local", GPU, torch.float32, is_latent=False)
    assert full["gradient_accumulation_fusion"] is False


def test_true_on_policy_names_the_version_that_it_needs(install) -> None:
    install("2.8.0", "")
    with pytest.raises(InputError, match=r"transformer-engine is 2\.8\.0.*needs 2\.10 or newer"):
        implementation.check_batch_invariant()


def test_true_on_policy_takes_a_newer_one(install) -> None:
    install("2.10.1", "")
    implementation.check_batch_invariant()
    off = fusions("transformer_engine", GPU, torch.bfloat16, False, true_on_policy=True)
    assert off == {"bias_activation_fusion": False}


def test_a_cpu_fuses_nothing() -> None:
    for kind in ("local", "transformer_engine"):
        found = fusions(kind, torch.device("cpu"), torch.float32, False)
        assert found == {"bias_activation_fusion": False}


def test_no_cuda_device_and_none_installed() -> None:
    assert choose_implementation("auto") == (
        "local",
        "auto: no CUDA device and no transformer-engine",
    )
    assert importlib.util.find_spec("transformer_engine") is None
