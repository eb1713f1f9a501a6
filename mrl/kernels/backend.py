"""Functions that call kernels of `mrl._C`, and argument checks that the ops share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mrl._C as _C  # noqa: PLR0402  (a module, and no name of the package)

FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that inference ops accept, in the order of FloatType in csrc/elements.h."""


def run(kernel: str, device: torch.device, /, **arguments: Any) -> None:
    """Call `_C.KERNEL_cpu` with torch's thread count, or `_C.KERNEL_cuda` on torch's current stream.

    kernel: the name KERNEL. device: the device of the tensors; it decides which of the two
    functions is called. arguments: the kernel's arguments by name. A tensor is passed as its
    address, and None as 0. A tensor must be contiguous, or its strides must be passed as further
    arguments.

    Raises RuntimeError for a GPU if the extension was built without GPU kernels, and ValueError if
    the kernel rejects an argument.
    """
    values = {name: _address(value) for name, value in arguments.items()}
    if device.type == "cpu":
        getattr(_C, f"{kernel}_cpu")(**values, num_threads=torch.get_num_threads())
        return
    if not _C.has_cuda:
        raise RuntimeError(
            f"{kernel}: got tensors on {device}, but mrl._C was built without CUDA, because there "
            "was no nvcc or MRL_CUDA=0; build again with MRL_CUDA=1"
        )
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        getattr(_C, f"{kernel}_cuda")(**values, stream=stream)


def workspace(kernel: str, device: torch.device, *sizes: int) -> Tensor | None:
    """Allocate a GPU kernel's workspace: u8[`_C.KERNEL_workspace_bytes(*sizes)`].

    Returns None if the device is a CPU, because CPU kernels need no workspace, or if the extension
    was built without GPU kernels.
    """
    if device.type == "cpu" or not _C.has_cuda:
        return None
    num_bytes = getattr(_C, f"{kernel}_workspace_bytes")(*sizes)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _address(value: Any) -> Any:
    if value is None:
        return 0
    return value.data_ptr() if isinstance(value, Tensor) else value


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    legend: str,
) -> None:
    """Raise ValueError if the shape, dtype or device of a tensor is wrong.

    The message contains the given and the expected value. legend: text that explains the sizes in
    the message, for example "N = 5 tokens, B = 2 sequences".
    """
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name}: got shape {list(tensor.shape)}, expected {list(shape)} ({legend})"
        )
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name}: got dtype {tensor.dtype}, expected {wanted}")
    if tensor.device != device:
        raise ValueError(f"{name}: got device {tensor.device}, expected {device}, like the others")


def check_packed(
    tokens: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, name: str
) -> tuple[int, int]:
    """Check the tensors of B packed sequences with N tokens in total; return (N, B).

    `tokens` must be f32[N], `loss_mask` bool[N] or u8[N], and `cu_seqlens` i32[B+1]. The values of
    `cu_seqlens` are checked by the kernels, not here. name: what error messages call `tokens`.
    Raises ValueError for a wrong shape, dtype or device.
    """
    if tokens.dim() != 1:
        raise ValueError(f"{name}: got shape {list(tokens.shape)}, expected [N]")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens: got shape {list(cu_seqlens.shape)}, expected [B+1]")
    num_tokens, num_sequences = tokens.shape[0], cu_seqlens.shape[0] - 1
    legend = f"N = {num_tokens} tokens, B = {num_sequences} sequences"
    device = tokens.device
    check_tensor(name, tokens, (num_tokens,), (torch.float32,), device, legend)
    mask_dtypes = (torch.bool, torch.uint8)
    check_tensor("loss_mask", loss_mask, (num_tokens,), mask_dtypes, device, legend)
    check_tensor("cu_seqlens", cu_seqlens, (num_sequences + 1,), (torch.int32,), device, legend)
    if num_tokens and not num_sequences:
        raise ValueError(
            f"cu_seqlens: got no sequence for {num_tokens} tokens, expected at least one"
        )
    return num_tokens, num_sequences


def check_constant(**tensors: Tensor | None) -> None:
    """Raise ValueError if a tensor requires grad, because the op computes no gradient for it."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"{name}: got a tensor that requires grad, expected a constant")
