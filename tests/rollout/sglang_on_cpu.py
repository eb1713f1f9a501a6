"""Compute layers as SGLang does on a CPU: `python sglang_on_cpu.py CALLS RESULTS`.

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


def normalise(name: str, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> Tensor:
    """Call RMSNorm.forward_native: `tensors` are x and a residual, or x; `options` the attributes of
    the layer. The sum is returned below the normalised rows."""
    out = take(name)(SimpleNamespace(**options), *tensors)
    return out if isinstance(out, Tensor) else torch.cat(out)


def rotate(name: str, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> Tensor:
    """Call RotaryEmbedding.forward_native: `tensors` are positions, queries and keys, and `options`
    the attributes of the layer. Queries and keys are returned beside each other."""
    from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb

    rope = SimpleNamespace(**options, _apply_rotary_emb_wrapped=apply_rotary_emb)
    return torch.cat(take(name)(rope, *tensors), dim=-1)


def main() -> None:
    """Run every call."""
    calls, results = sys.argv[1:]
    runners: dict[str, Callable[..., Tensor]] = {
        "moe_forward_native": run_experts,
        "RMSNorm.forward_native": normalise,
        "RotaryEmbedding.forward_native": rotate,
    }
    torch.save([runners.get(call[0], attend)(*call) for call in torch.load(calls)], results)


if __name__ == "__main__":
    main()
