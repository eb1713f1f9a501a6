"""A server on CPUs whose torch is a CUDA build."""

from __future__ import annotations

import pytest
import torch
from test_adapter_plugins import plugin_of


def test_it_synchronises_with_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch 2.14 finds there; the test's own torch may know better."""
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", torch.get_device_module)
    assert torch.get_device_module() is torch.cuda
    plugin_of("cpu", "mrl_sglang_cpu").give_cpu_module()
    assert torch.get_device_module() is torch.cpu
    assert torch.get_device_module("cuda") is torch.cuda
