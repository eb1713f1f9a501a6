"""mrl's models with TransformerEngine's own modules, built and loaded on a CPU (`te_stand_in.py`).

What it takes to build them is Python; what they compute is compiled and needs a GPU.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.system.releases import numbers
from parallel.architectures import load_architecture
from parallel.versions import import_failure
from tests.parallel.models import DENSE, SETTINGS, write_tiny

ROOT = Path(__file__).parents[2]
SITE = Path(sys.prefix) / "te"
pytestmark = pytest.mark.skipif(
    not (SITE / "transformer_engine").is_dir(),
    reason=f"TransformerEngine's Python is not in {SITE}: make .venv/.te",
)
IS_OLD = numbers(importlib.metadata.version("megatron-core")) < (0, 19)
NOT_FOUND = {"megatron.core.transformer.moe.moe_utils.te_general_gemm"} if IS_OLD else set()
"""Megatron 0.16.1 imports it beside `get_workspace`, which TransformerEngine 2.20 has no more: its
router then multiplies in torch, in fp32."""
TAKEN_AWAY = {"cp_group", "local_cp_size"} | (
    set() if IS_OLD else {"seq_idx", "tokens_per_sample", "total_tokens"}
)
"""Fields of packed batches that Megatron's `TEDotProductAttention` keeps to itself."""


BUILT = [name for name in SETTINGS if not load_architecture(name).needs_native]


@pytest.fixture(scope="module")
def found(made_once: Callable[..., Path]) -> dict[str, Any]:
    """What te_stand_in reports of a tiny model of every architecture."""

    def make(folder: Path) -> None:
        for model_type in BUILT:
            write_tiny(model_type, folder / model_type)
        command = [sys.executable, "-m", "tests.parallel.te_stand_in", str(SITE), str(folder)]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]

    return json.loads((made_once("te_stand_in", make) / "found.json").read_text())


@pytest.mark.parametrize("model_type", BUILT)
def test_its_parameters_have_rules_and_take_the_weights(found, model_type) -> None:
    """They are the local layers' parameters by mrl's table of names, and hold the same bits."""
    model = found["models"][model_type]
    assert (model["missing"], model["unknown"], model["differ"]) == ([], [], [])
    experts = [name for name in model["names"] if ".experts." in name]
    assert bool(experts) == (model_type not in DENSE)
    assert all(name.split(".weight")[1].isdigit() for name in experts)
    assert all(f"{kind}.weight0" in " ".join(experts) for kind in ("fc1", "fc2") if experts)
    for name, is_dense in model["flags"].items():
        assert is_dense == (name not in experts), name  # whose gradients are summed over whom


def test_megatron_finds_what_its_fusions_stand_on(found) -> None:
    assert found["have_te"]
    assert {name for name, is_there in found["functions"].items() if not is_there} == NOT_FOUND
    assert found["adam"] == "transformer_engine.pytorch.optimizers.fused_adam"


def test_its_attention_takes_packed_batches(found) -> None:
    """All that Megatron passes on."""
    assert set(found["not_taken"]) == TAKEN_AWAY


def test_without_its_compiled_part_it_is_reported_as_broken(monkeypatch) -> None:
    """Found and of a good version, yet of no use: what choosing by `find_spec` would miss."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SITE), str(ROOT)]))
    error = import_failure("transformer_engine.pytorch")
    assert error is not None
    assert error.startswith("RuntimeError: Found empty `transformer-engine` meta package installed")
