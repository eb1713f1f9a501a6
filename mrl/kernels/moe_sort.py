"""`mrl::moe_ids` and `mrl::moe_sort`, which sort the expert choices of tokens by expert.

Dimensions: n tokens, E experts, K slots for the experts of a token, m copies (one per slot that is
not empty). The kernels are in csrc/moe_permute.h. mrl/kernels/moe_permute.py uses the result to copy
token rows to their experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import mrl._C as _C  # noqa: PLR0402  (a module, and no name of the package)
from mrl.kernels import backend


class ExpertOrder(NamedTuple):
    """The copies of all tokens, sorted by expert, then by token.

    There is one copy for each expert that a token has chosen. The number of a copy is its index in
    this order.
    """

    tokens: Tensor
    """i32[m]: the token of each copy."""
    cells: Tensor
    """i32[m]: `token * E + expert` of each copy, which is a flat index into a table [n, E]."""
    copies: Tensor
    """i32[n, K]: the numbers of each token's copies, in the order in which `moe_unpermute` sums them;
    -1 for an empty slot."""
    counts: Tensor
    """i64[E]: the number of copies for each expert."""


def moe_ids(chosen: Tensor, width: int) -> Tensor:
    """Return i32[n, width]: the experts of each token in ascending order, padded with -1.

    chosen: bool[n, E] or u8[n, E], true for the experts of each token.

    Raises ValueError for a wrong shape or dtype. A token with more than `width` experts raises
    ValueError on CPUs; on GPUs the kernel aborts with a message.
    """
    return torch.ops.mrl.moe_ids(chosen, width)


def moe_sort(ids: Tensor, num_experts: int, num_copies: int | None = None) -> ExpertOrder:
    """Sort the expert choices of all tokens by expert, then by token.

    Args:
        ids: i32[n, K]: up to K different experts per token, in the order in which their outputs are
            summed; -1 for an empty slot.
        num_experts: E.
        num_copies: m, the number of ids that are not -1. None: no id is -1.

    Raises:
        ValueError: for a wrong shape, dtype or size. On CPUs also for an id out of range, an expert
            that a token has twice, or a wrong `num_copies`. On GPUs these three abort the kernel with
            a message.
    """
    num_copies = ids.numel() if num_copies is None else num_copies
    return ExpertOrder(*torch.ops.mrl.moe_sort(ids, num_experts, num_copies))


torch.library.define("mrl::moe_ids", "(Tensor chosen, int width) -> Tensor")


@torch.library.register_fake("mrl::moe_ids")
def _ids_fake(chosen: Tensor, width: int) -> Tensor:
    if chosen.dim() != 2:
        raise ValueError(f"chosen: got shape {list(chosen.shape)}, expected [n, E]")
    if chosen.dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"chosen: got dtype {chosen.dtype}, expected torch.bool or torch.uint8")
    if width < 1:
        raise ValueError(f"width: got {width}, expected at least 1")
    return chosen.new_empty((chosen.shape[0], width), dtype=torch.int32)


@torch.library.impl("mrl::moe_ids", ("cpu", "cuda"))
def _ids(chosen: Tensor, width: int) -> Tensor:
    ids = _ids_fake(chosen, width)
    num_tokens, num_experts = chosen.shape
    sizes = {"num_tokens": num_tokens, "num_experts": num_experts, "width": width}
    backend.run("moe_ids", chosen.device, chosen=chosen.contiguous(), ids=ids, **sizes)
    return ids


torch.library.define(
    "mrl::moe_sort",
    "(Tensor ids, int num_experts, SymInt num_copies) "
    "-> (Tensor tokens, Tensor cells, Tensor copies, Tensor counts)",
)


@torch.library.register_fake("mrl::moe_sort")
def _sort_fake(
    ids: Tensor, num_experts: int, num_copies: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if ids.dim() != 2:
        raise ValueError(f"ids: got shape {list(ids.shape)}, expected [n, K]")
    if ids.dtype != torch.int32:
        raise ValueError(f"ids: got dtype {ids.dtype}, expected torch.int32")
    if num_experts < 1:
        raise ValueError(f"num_experts: got {num_experts}, expected at least 1")
    copies = ids.new_empty((num_copies,))
    counts = ids.new_empty((num_experts,), dtype=torch.int64)
    return copies, torch.empty_like(copies), torch.empty_like(ids), counts


@torch.library.impl("mrl::moe_sort", ("cpu", "cuda"))
def _sort(ids: Tensor, num_experts: int, num_copies: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens, topk = ids.shape if ids.dim() == 2 else (0, 0)
    if not 0 <= num_copies <= ids.numel():
        raise ValueError(f"num_copies: got {num_copies}, expected 0 to {ids.numel()}")
    if max(num_tokens * num_experts, ids.numel()) >= 2**31:
        raise ValueError(
            f"ids: got {num_tokens} tokens x {num_experts} experts, expected fewer than 2^31 cells"
        )
    tokens, cells, copies, counts = _sort_fake(ids, num_experts, num_copies)
    copies = copies.contiguous()
    num_chunks = -(-num_tokens // _C.MOE_CHUNK)
    backend.run(
        "moe_sort",
        ids.device,
        ids=ids.contiguous(),
        num_tokens=num_tokens,
        topk=topk,
        num_experts=num_experts,
        num_copies=num_copies,
        scratch=tokens.new_empty((num_experts, num_chunks)),
        tokens=tokens,
        cells=cells,
        copies=copies,
        counts=counts,
    )
    return tokens, cells, copies, counts
