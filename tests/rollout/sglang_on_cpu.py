"""Compute attention or experts as SGLang does on a CPU: `python sglang_on_cpu.py CALLS RESULTS`.

CALLS is a torch file with a list of (name of the function, tensors, options), RESULTS gets a list of
outputs. In a process of its own, because importing SGLang needs stand-ins for packages and changes
torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mrl.engines.sglang.compat import take


def attend(name: str, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> Tensor:
    """Call one of the functions of the torch_native backend."""
    backend = take("TorchNativeAttnBackend")
    return take(name)(backend.__new__(backend), *tensors, None, **options)


def run_experts(name: str, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> Tensor:
    """Call the loop over the experts: `tensors` are x, ids and weights, and `options` the attributes
    of the layer and of its `config`."""
    x, ids, weights = tensors
    layer = SimpleNamespace(**options)
    return take(name)(layer, x, (weights, ids, None), SimpleNamespace(**options["config"]))


def main() -> None:
    """Run every call."""
    calls, results = sys.argv[1:]
    runners: dict[str, Callable[..., Tensor]] = {"moe_forward_native": run_experts}
    torch.save([runners.get(call[0], attend)(*call) for call in torch.load(calls)], results)


if __name__ == "__main__":
    main()
