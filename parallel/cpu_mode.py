"""Let Megatron-core run without CUDA.

No other file of parallel/ assigns to names inside torch or megatron-core.

Megatron names the CUDA device in many places. On a machine without CUDA, `enable()` replaces the
functions of torch that make tensors by versions that make them on the CPU where CUDA or pinned memory
is asked for, `Tensor.cuda` by one that returns the tensor itself, and those functions of `torch.cuda`
that Megatron calls by CPU versions. A `TorchFunctionMode` would do the same, but torch calls it for
every operation, 22,000 times in a step of the toy model.

With CUDA, `enable()` only repairs how megatron-core looks for TransformerEngine: it defines names
that are undefined or wrong without TransformerEngine, and hides a TransformerEngine that is
installed but cannot be imported.

Call `enable()` before the first import of megatron. A second call does nothing.
"""

from __future__ import annotations

import contextlib
import functools
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

from mrl.system.torch_names import TORCH
from parallel.implementation import find_transformer_engine
from parallel.megatron_names import MEGATRON

_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones",
    "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros",
    "zeros_like",
)  # fmt: skip
"""The functions of torch that take a `device` and make a tensor."""


class _Stream:
    """A stand-in for a CUDA stream whose work is always complete."""

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
    """Prepare this process for Megatron; return whether the CPU is used in place of CUDA."""
    hide_broken_transformer_engine()
    if torch.cuda.is_available():
        complete_megatron()
        return False
    if torch.cuda.current_device is _current_device:
        return True
    # torch.compile does not speed up these shapes, and its first call costs a minute of CPU time.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _replace_torch()
    _replace_torch_cuda()
    complete_megatron()
    _replace_megatron()
    return True


def _replace_torch() -> None:
    # `with torch.device(...)` knows the factories by identity, and keeps the list of its first call.
    TORCH.take("_device_constructors")()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor_class: Any = Tensor
    type_name = tensor_class.type

    def cuda_type_name(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron groups gradients by type string and knows only the torch.cuda.* types.
        found = type_name(tensor, *args, **kwargs)
        return found if args or kwargs else found.replace("torch.", "torch.cuda.")

    tensor_class.type = cuda_type_name
    tensor_class.cuda = lambda tensor, *args, **kwargs: tensor


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that makes the same tensors as `factory`, in plain CPU memory."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):  # torch refuses to pin memory without a GPU
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


def _current_device() -> torch.device:
    return torch.device("cpu")


def _replace_torch_cuda() -> None:
    stream = _Stream()
    stand_ins: dict[str, Any] = {
        "synchronize": lambda *a, **k: None,
        "current_device": _current_device,
        "Stream": _Stream,
        "current_stream": lambda *a, **k: stream,
        "default_stream": lambda *a, **k: stream,
        "stream": lambda *a, **k: contextlib.nullcontext(),
        "set_device": lambda *a, **k: None,
    }
    for name, value in stand_ins.items():
        TORCH.replace(f"cuda.{name}", value)


def hide_broken_transformer_engine() -> None:
    """Hide TransformerEngine if a part of it cannot be imported, because Megatron would use the
    rest. Does nothing without CUDA.

    megatron-core 0.16 imports the parts one by one, and catches only ImportError. After a failed
    import it continues with names undefined (such as `TENorm` in its `gpt_layer_specs`).
    """
    if torch.cuda.is_available() and find_transformer_engine().error is not None:
        for name in [n for n in sys.modules if n.split(".")[0] == "transformer_engine"]:
            del sys.modules[name]
        sys.modules["transformer_engine"] = None  # pyright: ignore[reportArgumentType]


def complete_megatron() -> None:
    """Repair names of megatron-core that are undefined or wrong without TransformerEngine, on any
    device.

    megatron-core 0.19 no longer needs the repairs of `te_general_gemm` and `latent.HAVE_TE`.
    """
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        # The router (`RouterGatingLinearFunction`) reads it, and TransformerEngine's import defines it.
        moe_utils.te_general_gemm = None

    # Recompute of norms asks TransformerEngine for its fp8 state even if nothing is fp8.
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    if not random.HAVE_TE:
        random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
        random.fp8_autocast = lambda **options: contextlib.nullcontext()
        random.activation_recompute_forward = lambda **options: contextlib.nullcontext()
        # The precision-aware optimizer compares TransformerEngine's version, here None, with 2.1.0.
        MEGATRON.replace("is_te_min_version", lambda *versions, **options: False)

    # 0.16.1 compares its layers with TransformerEngine's classes here even if there are none.
    MEGATRON.replace("latent.HAVE_TE", MEGATRON.take("extensions.HAVE_TE"))


def _replace_megatron() -> None:
    """Replace functions of megatron-core that do not work on CPUs or over gloo."""
    MEGATRON.replace("_get_cuda_rng_state", lambda *a, **k: torch.get_rng_state())
    MEGATRON.replace("_set_cuda_rng_state", lambda state, *a, **k: torch.set_rng_state(state))

    def split_sizes_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    # Megatron's own function returns a CPU tensor as it is, even if a numpy array is asked for.
    MEGATRON.replace("maybe_move_tensor_to_cpu", split_sizes_on_cpu)
    MEGATRON.replace("token_dispatcher.maybe_move_tensor_to_cpu", split_sizes_on_cpu)
    for name, uneven in (
        ("_gather_along_first_dim", _gather_uneven),
        ("_reduce_scatter_along_first_dim", _reduce_scatter_uneven),
    ):
        MEGATRON.replace(name, _by_sizes(MEGATRON.take(name), uneven))
    MEGATRON.replace("_get_sub_optimizer_param_groups", _offload_share)


def _offload_share(self: Any, fraction: float) -> tuple[list, list, dict, dict, dict]:
    """Divide the parameters of a HybridDeviceOptimizer into offloaded ones and ones that stay on
    the device.

    Parameters are offloaded in order until a part `fraction` of all elements is offloaded. Return
    the parameter groups of the offloaded parameters, the groups of the other parameters, and three
    dicts: from an offloaded parameter to its copy, from this copy to the parameter, and from a
    parameter to its fp32 copy.

    The optimizer's own method treats parameters that are on a CPU as already offloaded, and later
    does not find their copies on the device. Here all given parameters count as being on the
    device.
    """
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
    """Return a function that calls `uneven` if its argument `sizes` (the sizes of the parts) is
    given, and `even` if it is None."""

    def either(
        values: Tensor, group: ProcessGroup, sizes: list[int] | None = None, *args: Any, **kw: Any
    ) -> Tensor:
        if sizes is None:
            return even(values, group, None, *args, **kw)
        return uneven(values, group, sizes)

    return either


def _gather_uneven(values: Tensor, group: ProcessGroup, sizes: list[int]) -> Tensor:
    """Gather `values` [sizes[rank], ...] of every rank; return [sum(sizes), ...].

    The parts are padded, because gloo gathers only parts of equal size.
    """
    padded = values.new_zeros(max(sizes), *values.shape[1:])
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatter_uneven(values: Tensor, group: ProcessGroup, sizes: list[int]) -> Tensor:
    """Sum `values` [sum(sizes), ...] over the ranks; return this rank's part of the sum,
    [sizes[rank], ...]."""
    total = values.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total.split(sizes)[group.rank()].contiguous()
