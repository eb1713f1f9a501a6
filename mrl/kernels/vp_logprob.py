"""Log-probs and entropy of vocab-parallel logits: `mrl::vp_logprob_stats`, `..._combine`, `..._bwd`.

Dimensions: T rows, V vocabulary, V_loc vocabulary columns of this rank. Kernels: csrc/vp_logprob.h.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mrl.kernels import backend

NUM_TILES = 32
"""The number of tiles into which `tile_size` divides the vocabulary if its size permits."""
TILE_UNIT = 8
"""A tile permits aligned 16-byte loads in any dtype if its number of columns is a multiple of this."""
_TILE_FIELDS = 4
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def vp_logprob(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    group: ProcessGroup | None = None,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return each label's log-prob under `softmax(logits / temperature)`, and the softmax's entropy.

    Both results are f32[T], in nats, and differentiable. They are computed in fp32, because the error
    of a bf16 log-softmax can exceed GSPO's whole clip range. No other tensor as large as the logits is
    kept for the backward. Each rank contributes at most 512 bytes per row to one all-gather. The
    vocabulary is reduced in tiles of `tile_size` columns (32 tiles if 256 divides V). Results and
    gradients are bit-identical on any number of ranks that divides the number of tiles.

    Args:
        logits: [T, V_loc], f32, bf16 or f16, with contiguous rows; rank r of `group` has the columns
            that start at r * V_loc.
        labels: i64[T], 0 to V-1 where `mask` is true.
        mask: bool[T] or u8[T]. A row where it is false is not read; its results and gradient are 0.
            None: all rows are used.
        temperature: above 0; the temperature of the rollout's sampling.
        group: the tensor-parallel ranks. None: the logits are not sharded.
        inplace_backward: overwrite the logits with their gradient in the backward. Another backward
            that needs the logits then raises RuntimeError, as after any in-place operation.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device, stride or value. Labels on GPUs are
            not checked, to avoid waiting for the device; a label outside the vocabulary gives NaN.
    """
    size, rank = (group.size(), group.rank()) if group is not None else (1, 0)
    _check(logits, labels, mask)
    check_temperature(temperature)
    if inplace_backward and logits.shape[0] > 1 and logits.stride(0) < logits.shape[1]:
        raise ValueError(
            f"logits: got strides {logits.stride()}, expected rows that do not overlap: "
            "inplace_backward writes over them"
        )
    columns = logits.shape[1]
    tile = tile_size(columns, size)
    tiles = torch.ops.mrl.vp_logprob_stats(
        logits.detach(), labels, mask, rank * columns, size * columns, tile, temperature
    )
    tiles = gather_tiles(tiles, group)
    logprobs, _, entropy = torch.ops.mrl.vp_logprob_combine(
        logits, labels, mask, tiles, rank * columns, tile, temperature, inplace_backward
    )
    return logprobs, entropy


def check_temperature(temperature: float) -> None:
    if not 1e-30 < temperature < 1e30:  # its inverse is an fp32 number
        raise ValueError(f"temperature: got {temperature}, expected above 0 and finite")


def gather_tiles(tiles: Tensor, group: ProcessGroup | None) -> Tensor:
    """All-gather results of `_stats`, f32[T, tiles, 4]. Return f32[ranks, T, tiles, 4]."""
    tiles = tiles.unsqueeze(0)
    if group is None or group.size() == 1:
        return tiles
    gathered = tiles.new_empty((group.size(), *tiles.shape[1:]))
    dist.all_gather_into_tensor(gathered, tiles, group=group)
    return gathered


def tile_size(num_columns: int, num_ranks: int) -> int:
    """Return the number of columns of a tile, a divisor of V_loc = `num_columns`.

    With V = V_loc * `num_ranks`, it is the smallest integer among V / 32, V / 16, ..., V that divides
    V_loc and is a multiple of TILE_UNIT, or else the smallest that divides V_loc. If none of them
    divides V_loc, it is the smallest integer among V_loc / 32, V_loc / 16, ..., V_loc.
    """
    size = num_columns * num_ranks
    for unit in (TILE_UNIT, 1):
        if size % unit == 0:
            num_tiles = math.gcd(size // unit, NUM_TILES)
            if num_tiles % num_ranks == 0:
                return size // num_tiles
    # Tiles of the full vocabulary would straddle ranks, so each rank divides its own columns. The
    # result is correct, but its bits depend on the number of ranks.
    return num_columns // math.gcd(num_columns, NUM_TILES)


def _check(logits: Tensor, labels: Tensor, mask: Tensor | None) -> None:
    if logits.dim() != 2 or logits.shape[1] < 1:
        raise ValueError(f"logits: got shape {list(logits.shape)}, expected [T, V_loc], V_loc >= 1")
    if logits.dtype not in _TYPES:
        wanted = " or ".join(str(dtype) for dtype in _TYPES)
        raise ValueError(f"logits: got dtype {logits.dtype}, expected {wanted}")
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(f"logits: got strides {logits.stride()}, expected contiguous rows")
    rows, legend = (logits.shape[0],), f"T = {logits.shape[0]} rows"
    backend.check_tensor("labels", labels, rows, (torch.int64,), logits.device, legend)
    if mask is not None:
        backend.check_tensor("mask", mask, rows, (torch.bool, torch.uint8), logits.device, legend)


def _shape_arguments(
    logits: Tensor, labels: Tensor, mask: Tensor | None, start: int, size: int, temperature: float
) -> dict[str, Any]:
    return {
        "type": _TYPES.index(logits.dtype),
        "num_rows": logits.shape[0],
        "num_columns": logits.shape[1],
        "row_stride": logits.stride(0),
        "labels": labels.contiguous(),
        "mask": mask.contiguous() if mask is not None else None,
        "vocab_start": start,
        "vocab_size": size,
        "inv_temperature": 1.0 / temperature,
        "logits": logits,
    }


torch.library.define(
    "mrl::vp_logprob_stats",
    "(Tensor logits, Tensor labels, Tensor? mask, int vocab_start, int vocab_size, int tile, "
    "float temperature) -> Tensor",
)


def _stats_fake(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    vocab_start: int,
    vocab_size: int,
    tile: int,
    temperature: float,
) -> Tensor:
    _check(logits, labels, mask)
    return logits.new_empty(
        (logits.shape[0], logits.shape[1] // tile, _TILE_FIELDS), dtype=torch.float32
    )


torch.library.register_fake("mrl::vp_logprob_stats")(_stats_fake)


@torch.library.impl("mrl::vp_logprob_stats", ("cpu", "cuda"))
def _stats(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    vocab_start: int,
    vocab_size: int,
    tile: int,
    temperature: float,
) -> Tensor:
    """Return four numbers per row and tile, f32[T, V_loc / tile, 4].

    With `x = logit / temperature`, they are a shift near the tile's largest x, the sums of `e =
    exp(x - shift)` and of `e (x - shift)`, and the label's logit if the label is in the tile.
    """
    if tile < 1 or logits.shape[-1] % tile or vocab_start % tile:
        raise ValueError(
            f"tile: got {tile}, expected a divisor of V_loc = {logits.shape[-1]} and of "
            f"vocab_start = {vocab_start}"
        )
    tiles = _stats_fake(logits, labels, mask, vocab_start, vocab_size, tile, temperature)
    shape = _shape_arguments(logits, labels, mask, vocab_start, vocab_size, temperature)
    backend.run("vp_logprob_stats", logits.device, **shape, tile=tile, tiles=tiles)
    return tiles


torch.library.define(
    "mrl::vp_logprob_combine",
    "(Tensor logits, Tensor labels, Tensor? mask, Tensor tiles, int vocab_start, int tile, "
    "float temperature, bool inplace_backward) -> (Tensor logprobs, Tensor lse, Tensor entropy)",
)


def _combine_fake(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    tiles: Tensor,
    vocab_start: int,
    tile: int,
    temperature: float,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(logits, labels, mask)
    ranks = tiles.shape[0] if tiles.dim() == 4 else 1
    shape = (ranks, logits.shape[0], logits.shape[1] // tile, _TILE_FIELDS)
    legend = "[ranks, T, tiles per rank, 4]"
    backend.check_tensor("tiles", tiles, shape, (torch.float32,), logits.device, legend)
    rows = (logits.shape[0],)
    return tiles.new_empty(rows), tiles.new_empty(rows), tiles.new_empty(rows)


torch.library.register_fake("mrl::vp_logprob_combine")(_combine_fake)


@torch.library.impl("mrl::vp_logprob_combine", ("cpu", "cuda"))
def _combine(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    tiles: Tensor,
    vocab_start: int,
    tile: int,
    temperature: float,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `united`. The logits are only kept for the backward pass."""
    _combine_fake(logits, labels, mask, tiles, vocab_start, tile, temperature, inplace_backward)
    return united(tiles, labels, mask, tile, temperature)


def united(
    tiles: Tensor, labels: Tensor, mask: Tensor | None, tile: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, log-sum-exp and entropy, f32[T] each, from the result of `gather_tiles`."""
    logprobs, lse, entropy = (tiles.new_empty(tiles.shape[1]) for _ in range(3))
    backend.run(
        "vp_logprob_combine",
        tiles.device,
        tiles=tiles.contiguous(),
        labels=labels.contiguous(),
        mask=mask.contiguous() if mask is not None else None,
        num_ranks=tiles.shape[0],
        num_rows=tiles.shape[1],
        tiles_per_rank=tiles.shape[2],
        tile=tile,
        inv_temperature=1.0 / temperature,
        logprobs=logprobs,
        lse=lse,
        entropy=entropy,
    )
    return logprobs, lse, entropy


_BWD_SCHEMA = (
    "Tensor labels, Tensor? mask, Tensor lse, Tensor entropy, Tensor grad_logprobs, "
    "Tensor? grad_entropy, int vocab_start, float temperature)"
)
torch.library.define("mrl::vp_logprob_bwd", f"(Tensor logits, {_BWD_SCHEMA} -> Tensor")
torch.library.define("mrl::vp_logprob_bwd_", f"(Tensor(a!) logits, {_BWD_SCHEMA} -> ()")


@torch.library.impl("mrl::vp_logprob_bwd", ("cpu", "cuda"))
def _bwd(logits: Tensor, *rest: Any) -> Tensor:
    """Return the logits' gradient, `(g (1[label] - p) - g_H p (log p + H)) / temperature`.

    p is the softmax, H its entropy; g and g_H are the gradients of the log-prob and the entropy.
    """
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _run_bwd(logits, grad, *rest)
    return grad


@torch.library.impl("mrl::vp_logprob_bwd_", ("cpu", "cuda"))
def _bwd_(logits: Tensor, *rest: Any) -> None:
    _run_bwd(logits, logits, *rest)


def _run_bwd(
    logits: Tensor,
    grad: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    vocab_start: int,
    temperature: float,
) -> None:
    _check(logits, labels, mask)
    backend.run(
        "vp_logprob_bwd",
        logits.device,
        **_shape_arguments(logits, labels, mask, vocab_start, 0, temperature),
        lse=lse.contiguous(),
        entropy=entropy.contiguous(),
        grad_logprobs=grad_logprobs.contiguous(),
        grad_entropy=grad_entropy.contiguous() if grad_entropy is not None else None,
        grad=grad,
        grad_stride=grad.stride(0),
    )


@torch.library.register_fake("mrl::vp_logprob_bwd")
def _bwd_fake(logits: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.register_fake("mrl::vp_logprob_bwd_")
def _bwd_inplace_fake(logits: Tensor, *rest: Any) -> None:
    return None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, labels, mask, _, ctx.vocab_start, _, ctx.temperature, ctx.inplace = inputs
    _, lse, entropy = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(logits, labels, mask, lse, entropy)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_logprobs: Tensor | None, _: Any, grad_entropy: Tensor | None
) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "vp_logprob: got a backward with create_graph, but has no second derivative"
        )
    logits, labels, mask, lse, entropy = ctx.saved_tensors
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(lse)
    arguments = (labels, mask, lse, entropy, grad_logprobs, grad_entropy)
    if ctx.inplace:
        torch.ops.mrl.vp_logprob_bwd_(logits, *arguments, ctx.vocab_start, ctx.temperature)
        # A second backward, or another op that saved the logits, must notice that they are overwritten.
        torch.autograd.graph.increment_version(logits)
        grad = logits
    else:
        grad = torch.ops.mrl.vp_logprob_bwd(logits, *arguments, ctx.vocab_start, ctx.temperature)
    return grad, *[None] * 7


torch.library.register_autograd("mrl::vp_logprob_combine", _backward, setup_context=_save)
