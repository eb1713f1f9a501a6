"""This module makes Megatron-core run without CUDA. No other file replaces parts of other packages.

Megatron names the CUDA device in many places. Where there is no CUDA, `enable()` makes torch send
`device="cuda"` and `.cuda()` to the CPU (through torch's own override mode) and gives the handful of
`torch.cuda` functions that Megatron calls a CPU stand-in.

With CUDA it only mends megatron-core's search for TransformerEngine: names that stay undefined or wrong
where there is none, and one that is installed but does not import.

Call it before the first import of megatron. It is idempotent.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode

from parallel.implementation import find_engine
from parallel.megatron_names import read, replace

_active: list[TorchFunctionMode] = []


class CpuInPlaceOfCuda(TorchFunctionMode):
    """Sends tensors that ask for CUDA, or for memory pinned for it, to the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs:
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "cuda":
                kwargs = {**kwargs, "device": "cpu"}
            if kwargs.get("pin_memory"):  # memory for copies to a GPU; torch refuses it without one
                kwargs = {**kwargs, "pin_memory": False}
        elif func is torch.Tensor.type and len(args) == 1:
            # Megatron sorts gradients by type string and knows the torch.cuda.* names only.
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **(kwargs or {}))


class _Stream:
    """A stream on which everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def wait_stream(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, *args: Any) -> _Stream:
        return self

    def query(self) -> bool:
        return True


def enable() -> bool:
    """Turn the mode on where there is no CUDA. Returns whether it is on."""
    hide_broken_engine()
    if torch.cuda.is_available():
        complete_megatron()
        return False
    if _active:
        return True
    # torch.compile buys nothing on these shapes and its first call costs a minute of CPU time.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _replace_torch_cuda()
    complete_megatron()
    _replace_megatron()
    mode = CpuInPlaceOfCuda()
    mode.__enter__()
    _active.append(mode)
    return True


def _replace_torch_cuda() -> None:
    stream = _Stream()
    stand_ins: dict[str, Any] = {
        "synchronize": lambda *a, **k: None,
        "current_device": lambda: torch.device("cpu"),
        "Stream": _Stream,
        "current_stream": lambda *a, **k: stream,
        "default_stream": lambda *a, **k: stream,
        "stream": lambda *a, **k: contextlib.nullcontext(),
        "set_device": lambda *a, **k: None,
    }
    for name, value in stand_ins.items():
        setattr(torch.cuda, name, value)


def hide_broken_engine() -> None:
    """Let Megatron find no TransformerEngine where the installed one does not import.

    megatron-core 0.16 asks for its parts one by one and catches ImportError only: of one that imports
    half it takes some names and leaves others undefined (`TENorm` in its `gpt_layer_specs`).
    """
    if torch.cuda.is_available() and find_engine().error is not None:
        for name in [n for n in sys.modules if n.split(".")[0] == "transformer_engine"]:
            del sys.modules[name]
        sys.modules["transformer_engine"] = None  # pyright: ignore[reportArgumentType]


def complete_megatron() -> None:
    """Names of megatron-core that fail without TransformerEngine, whatever the device.

    0.19 defines the first and the last itself.
    """
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        # The router (`RouterGatingLinearFunction`) reads it, and only a successful import defines it.
        moe_utils.te_general_gemm = None

    # Recompute of norms asks TransformerEngine for its fp8 state even where nothing is fp8.
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    if not random.HAVE_TE:
        random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
        random.fp8_autocast = lambda **options: contextlib.nullcontext()
        random.activation_recompute_forward = lambda **options: contextlib.nullcontext()
        # The precision-aware optimizer compares TransformerEngine's version, here None, with 2.1.0.
        replace("is_te_min_version", lambda *versions, **options: False)

    # 0.16.1 tests its layers against TransformerEngine's classes here even where there are none.
    replace("latent.HAVE_TE", read("extensions.HAVE_TE"))


def _replace_megatron() -> None:
    """Names of megatron-core that have no CPU branch, or one that gloo cannot do."""
    replace("_get_cuda_rng_state", lambda *a, **k: torch.get_rng_state())
    replace("_set_cuda_rng_state", lambda state, *a, **k: torch.set_rng_state(state))

    def split_sizes_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    # Megatron's returns the tensor itself on a CPU.
    replace("maybe_move_tensor_to_cpu", split_sizes_on_cpu)
    replace("token_dispatcher.maybe_move_tensor_to_cpu", split_sizes_on_cpu)
    for name, uneven in (
        ("_gather_along_first_dim", _gather_uneven),
        ("_reduce_scatter_along_first_dim", _reduce_scatter_uneven),
    ):
        replace(name, _by_sizes(read(name), uneven))
    replace("_get_sub_optimizer_param_groups", _offload_share)


def _offload_share(self: Any, fraction: float) -> tuple[list, list, dict, dict, dict]:
    """HybridDeviceOptimizer's split of its parameters, of which it takes those on a CPU for offloaded
    already and then misses the device's copy of them. Here what it is given counts as the device's."""
    groups: tuple[list, list] = ([], [])
    copies, originals, in_fp32 = {}, {}, {}
    limit = fraction * sum(p.numel() for group in self.param_groups for p in group["params"])
    num_offloaded = 0
    for group in self.param_groups:
        parts: tuple[list, list] = ([], [])
        for parameter in group["params"]:
            offloads, stepped = num_offloaded < limit, parameter
            if offloads:
                num_offloaded += parameter.numel()
                stepped = parameter.detach().clone()
            if self.param_update_in_fp32 and stepped.dtype != torch.float32:
                stepped = in_fp32[parameter] = stepped.detach().clone().float()
            if offloads:
                copies[parameter], originals[stepped] = stepped, parameter
            parts[not offloads].append(stepped)
        for collected, part in zip(groups, parts, strict=True):
            if part:
                collected.append({**group, "params": part})
    return *groups, copies, originals, in_fp32


def _by_sizes(even: Callable[..., Tensor], uneven: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Megatron's own function for equal parts, ours where it is given their sizes."""

    def either(
        values: Tensor, group: ProcessGroup, sizes: list[int] | None = None, *args: Any, **kw: Any
    ) -> Tensor:
        if sizes is None:
            return even(values, group, None, *args, **kw)
        return uneven(values, group, sizes)

    return either


def _gather_uneven(values: Tensor, group: ProcessGroup, sizes: list[int]) -> Tensor:
    """[sizes[rank], ...] of every rank -> [sum(sizes), ...]; gloo itself gathers equal parts only."""
    padded = values.new_zeros(max(sizes), *values.shape[1:])
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatter_uneven(values: Tensor, group: ProcessGroup, sizes: list[int]) -> Tensor:
    """[sum(sizes), ...] of every rank -> this rank's [sizes[rank], ...] of their sum."""
    total = values.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total.split(sizes)[group.rank()].contiguous()
