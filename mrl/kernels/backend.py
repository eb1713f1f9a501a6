"""Calls into `mrl._C`, and the checks that every op makes of its arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mrl import _C  # pyright: ignore[reportAttributeAccessIssue]


def run(kernel: str, device: torch.device, /, **arguments: Any) -> None:
    """Call `_C.KERNEL_cpu` or `_C.KERNEL_cuda`, on torch's threads or its current stream.

    Tensors go in as addresses (they must be contiguous, or their strides passed beside), None as 0.
    Raises RuntimeError for a GPU tensor where the extension has no GPU kernels.
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
    """Allocate u8 scratch of `_C.KERNEL_workspace_bytes(*sizes)` for a GPU kernel; CPU ones need
    none."""
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
    """Raise ValueError that names the argument, what was given and what was expected.

    `legend` explains the sizes, e.g. "N = 5 tokens, B = 2 sequences".
    """
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name}: got shape {list(tensor.shape)}, expected {list(shape)} ({legend})"
        )
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name}: got dtype {tensor.dtype}, expected {wanted}")
    if tensor.device != device:
        raise ValueError(f"{name}: got device {tensor.device}, expected {device}, as the others")


def check_packed(
    tokens: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, name: str
) -> tuple[int, int]:
    """Return (N, B) of f32[N] packed `tokens` (the argument `name`), bool[N] or u8[N], i32[B+1].

    Raises ValueError; the values of `cu_seqlens` are the kernel's to check.
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
        raise ValueError(f"cu_seqlens: got no sequence for {num_tokens} tokens, expected some")
    return num_tokens, num_sequences


def check_constant(**tensors: Tensor | None) -> None:
    """Raise ValueError where a tensor requires grad: the op has no gradient for it."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"{name}: got a tensor that requires grad, expected a constant")
