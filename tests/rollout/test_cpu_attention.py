"""The CPU plug-in's attention beside SGLang's own, which it replaces, and the calls that it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from test_adapter_plugins import plugin_of
from torch import Tensor

from mrl.engines.sglang.compat import path_of
from mrl.engines.sglang.settings import CPU_STUBS

LENGTHS, NEW = (1, 9, 64, 65, 150), (1, 3, 64, 1, 20)


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    return plugin_of("cpu", "mrl_sglang_cpu")


def make_call(extends: bool, dtype: torch.dtype, size: int = 16) -> tuple[Tensor, ...]:
    """Return the tensors of a call, query and output first. Two rows of them only pad the batch."""
    torch.manual_seed(0)
    lengths, new = torch.tensor(LENGTHS), torch.tensor(NEW)
    num_slots, num_queries = int(lengths.sum()), int(new.sum()) if extends else len(new)
    slots = torch.randperm(num_slots).int()
    table = torch.zeros(9, 200, dtype=torch.int32)
    rows = torch.randperm(9)[: len(lengths)]
    for row, part in zip(rows, slots.split(lengths.tolist()), strict=True):
        table[row, : len(part)] = part
    query = torch.randn(num_queries + 2, 6, size).to(dtype)
    k, v = (torch.randn(num_slots, 2, size).to(dtype) for _ in range(2))
    lens = (lengths - new, new) if extends else ()
    return query, torch.zeros_like(query), k, v, table, rows, lengths, *lens


def of_sglang(calls: list[Any], folder: Path) -> list[Tensor]:
    """Return what SGLang's own functions return."""
    torch.save(calls, folder / "calls.pt")
    path = os.pathsep.join((str(CPU_STUBS), os.environ.get("PYTHONPATH", "")))
    script = Path(__file__).with_name("sglang_attention.py")
    subprocess.run(
        [sys.executable, script, folder / "calls.pt", folder / "results.pt"],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        timeout=120,
    )
    return torch.load(folder / "results.pt")


def test_the_kernel_computes_what_sglang_computes(plugin: ModuleType, tmp_path: Path) -> None:
    def loop(*_: Any, **__: Any) -> None:
        pytest.fail("SGLang's loop was called")

    calls, got = [], []
    for extends, dtype, window in product(
        (False, True), (torch.float32, torch.bfloat16), (None, 20)
    ):
        query, output, *cache = make_call(extends, dtype)
        options = {"scaling": 0.3, "enable_gqa": True, "causal": extends, "is_cross_attn": False}
        options["sliding_window_size"] = window
        name = "extend" if extends else "decode"
        tensors = (query[:-2], output[:-2].clone(), *cache)
        calls.append((f"_run_sdpa_forward_{name}", tensors, options))
        ours = getattr(plugin, f"attend_{name}")
        assert ours(loop, None, query, output, *cache, None, **options) is output
        assert not output[-2:].any()
        got.append(output[:-2])
    for output, expected, call in zip(got, of_sglang(calls, tmp_path), calls, strict=True):
        error = 1e-5 if output.dtype == torch.float32 else 2e-2
        message = str(call[2])
        torch.testing.assert_close(output, expected, atol=error, rtol=error, msg=message)


@pytest.mark.parametrize(
    ("extends", "why"),
    [*product((False, True), ("encoder", "head size", "dtype of the cache")), (True, "mask")],
)
def test_other_calls_stay_with_sglang(plugin: ModuleType, extends: bool, why: str) -> None:
    ours = plugin.attend_extend if extends else plugin.attend_decode
    call = list(make_call(extends, torch.float32, size=12 if why == "head size" else 16))
    if why == "dtype of the cache":
        call[2:4] = call[2].bfloat16(), call[3].bfloat16()
    encoder_lens = torch.ones(len(LENGTHS)) if why == "encoder" else None
    options = {"scaling": 0.3, "causal": extends and why != "mask", "sliding_window_size": None}
    got = ours(lambda *given, **named: (given, named), "backend", *call, encoder_lens, **options)
    given, named = got
    assert given[0] == "backend"
    assert all(a is b for a, b in zip(given[1:], [*call, encoder_lens], strict=True))
    assert named == options


@pytest.mark.parametrize("is_on_policy", [False, True])
def test_invariant_modes_keep_their_attention(
    plugin: ModuleType, is_on_policy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook around the function would wrap the one that plugins/on_policy puts in its place."""
    hooked = []
    monkeypatch.setattr(plugin, "hook", lambda name, *_: hooked.append(name))
    for name in ("give_padding_value", "give_cpu_module"):
        monkeypatch.setattr(plugin, name, lambda: None)
    monkeypatch.setattr(plugin, "take", lambda name: {})
    monkeypatch.setattr(plugin, "find_spec", lambda name: object() if is_on_policy else None)
    plugin.register()
    names = {"_run_sdpa_forward_decode", "_run_sdpa_forward_extend"}
    assert names & set(hooked) == (set() if is_on_policy else names)
    assert all(path_of(name) for name in names)
