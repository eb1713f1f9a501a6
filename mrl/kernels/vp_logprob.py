"""Log-probs and entropy under vocab-parallel logits: `mrl::vp_logprob_stats`, `..._combine`, `..._bwd`.

Dimensions: T rows, V vocabulary, V_loc this tensor-parallel rank's slice of it. The kernels are
csrc/vp_logprob.h.
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
"""Tiles of the whole vocabulary, where its size allows: bits are equal on up to so many ranks."""
TILE_UNIT = 8
"""Columns: a multiple of it is a multiple of the GPU kernels' 16-byte loads in any dtype."""
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
    """log softmax(logits / temperature)[labels] and the entropy of that softmax, both differentiable.

    Element math is fp32 whatever the logits are: bf16 log-softmax alone can use up GSPO's whole clip
    range. Nothing of the logits' size is kept for the backward but the logits. One all-gather of 512
    bytes a row at most unites the ranks; log-probs, entropies and gradients are the same bits on any
    number of ranks that divides the number of tiles (`tile_size`): 32 where the vocabulary divides by
    256, 16 for the 151,936 of Qwen3.

    Args:
        logits: [T, V_loc], f32, bf16 or f16, rows contiguous; rank r of `group` holds the columns
            from r * V_loc on.
        labels: i64[T], 0 to V-1 wherever `mask` is true.
        mask: bool[T] or u8[T]; rows where it is false are never read: log-prob and entropy 0, and
            gradient 0. None: every row counts.
        temperature: above 0; that of sampling, so that the numbers compare with the engine's.
        group: the tensor-parallel ranks. None: the logits are whole.
        inplace_backward: write the gradient over the logits. Another backward that needs them
            afterwards raises, as after any operation in place.

    Returns:
        (logprobs f32[T], entropy f32[T] in nats).

    Raises:
        ValueError: names the argument, what was given and what was expected. On GPUs labels are not
            checked, which would wait for the device: one outside the vocabulary gives NaN.
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
    """Gather f32[T, tiles of a rank, 4] of each rank of `group` into f32[ranks, T, tiles of a
    rank, 4]."""
    tiles = tiles.unsqueeze(0)
    if group is None or group.size() == 1:
        return tiles
    gathered = tiles.new_empty((group.size(), *tiles.shape[1:]))
    dist.all_gather_into_tensor(gathered, tiles, group=group)
    return gathered


def tile_size(num_columns: int, num_ranks: int) -> int:
    """Columns per tile, a divisor of V_loc: V / 32, or V / 16 and so on, where that is a multiple of
    TILE_UNIT; V / 32 or more, without that, where the ranks or the vocabulary do not allow it."""
    size = num_columns * num_ranks
    for unit in (TILE_UNIT, 1):
        if size % unit == 0:
            num_tiles = math.gcd(size // unit, NUM_TILES)
            if num_tiles % num_ranks == 0:
                return size // num_tiles
    # Tiles would straddle ranks: right, but with bits of its own.
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
    """f32[T, V_loc / tile, 4]: of each tile a shift near its largest x, sum e, sum e (x - shift), and
    the label's logit where it is inside; x = logit / temperature, e = exp(x - shift)."""
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
    """logprobs, lse, entropy f32[T] from the tiles of all ranks; the logits are here for autograd."""
    _combine_fake(logits, labels, mask, tiles, vocab_start, tile, temperature, inplace_backward)
    return united(tiles, labels, mask, tile, temperature)


def united(
    tiles: Tensor, labels: Tensor, mask: Tensor | None, tile: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Unite f32[ranks, T, tiles of a rank, 4] and labels i64[T] into logprobs, lse and entropy f32[T],
    without autograd."""
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
    """d logits = [g (1[label] - p) - g_H p (log p + H)] / temperature, in the logits' dtype."""
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
            "vp_logprob: got a backward with create_graph, but has no second gradient"
        )
    logits, labels, mask, lse, entropy = ctx.saved_tensors
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(lse)
    arguments = (labels, mask, lse, entropy, grad_logprobs, grad_entropy)
    if ctx.inplace:
        torch.ops.mrl.vp_logprob_bwd_(logits, *arguments, ctx.vocab_start, ctx.temperature)
        # Whoever else has saved the logits, and a second backward, must see that they are gone.
        torch.autograd.graph.increment_version(logits)
        grad = logits
    else:
        grad = torch.ops.mrl.vp_logprob_bwd(logits, *arguments, ctx.vocab_start, ctx.temperature)
    return grad, *[None] * 7


torch.library.register_autograd("mrl::vp_logprob_combine", _backward, setup_context=_save)
