"""Compute the results of `vp_logprob` from hidden states instead of logits, in chunks of rows.

The logits of a chunk of rows are computed, used and freed. The backward computes the logits again,
overwrites them with their gradient, and adds the chunk's contribution to the gradients of the
hidden states and the weight. Each chunk thus needs four matrix products with the size of its logits
instead of three, but only the logits of one chunk are in memory at a time.

Dimensions: n hidden states, R selected rows, c rows of a chunk, h hidden size, V vocabulary, V_loc
the part of the vocabulary on this tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from mrl.kernels.truncated_logprob import KeptLogits
from mrl.kernels.vp_logprob import check_temperature, gather_tiles, tile_size, united


class WeightGradient(Protocol):
    """Accumulates the gradient of the weight, chunk by chunk."""

    def add(self, grad_logits: Tensor, rows: Tensor) -> None:
        """Add `grad_logits.T @ rows` to the gradient [V_loc, h].

        grad_logits: [c, V_loc]. rows: [c, h].
        """
        ...

    def result(self) -> Tensor | None:
        """Return the gradient for autograd, after the last chunk.

        The result is None if autograd must get no gradient, for example because `add` adds the
        gradient directly to a gradient buffer.
        """
        ...


class SummedGradient:
    """A `WeightGradient` that sums in fp32, and returns the sum in the dtype of the weight."""

    def __init__(self, weight: Tensor) -> None:
        self._sum = torch.zeros_like(weight, dtype=torch.float32)
        self._dtype = weight.dtype

    def add(self, grad_logits: Tensor, rows: Tensor) -> None:
        add_product(self._sum, grad_logits, rows)

    def result(self) -> Tensor:
        return self._sum.to(self._dtype)


VOCAB_SLICE = 8192
"""The number of rows of the weight's gradient that `add_product` computes at a time, if the gradient
is accumulated in another dtype than the logits have."""


def add_product(total: Tensor, grad_logits: Tensor, rows: Tensor) -> None:
    """Add `grad_logits.T @ rows` to `total` [V_loc, h], for grad_logits [c, V_loc] and rows [c, h].

    If `total` has another dtype than `grad_logits` (such as fp32 and bf16), the product is computed
    `VOCAB_SLICE` rows at a time, so that no temporary tensor is as large as the weight.
    """
    if total.dtype == grad_logits.dtype:
        total.addmm_(grad_logits.t(), rows)
        return
    slices = zip(total.split(VOCAB_SLICE), grad_logits.split(VOCAB_SLICE, dim=1), strict=True)
    for part, grad in slices:
        part.add_(grad.t() @ rows)


@dataclass(frozen=True)
class Chunked:
    """Settings of `linear_logprob`."""

    chunk_rows: int
    """c: the number of rows whose logits are in memory at a time."""
    temperature: float
    group: ProcessGroup | None
    """The tensor-parallel ranks; rank r has the vocabulary columns that start at `r * V_loc`. None:
    the weight is not sharded."""
    project: Callable[[Tensor, Tensor], Tensor] = F.linear
    """A function that returns the logits [c, V_loc] of rows [c, h] and weight [V_loc, h]. The
    backward assumes that they are `rows @ weight.T`."""
    weight_gradient: Callable[[Tensor], WeightGradient] = SummedGradient
    """A function that is called with the weight once per backward, and creates the accumulator of the
    weight's gradient."""

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    def parts(self, num_rows: int) -> Iterator[slice]:
        for start in range(0, num_rows, self.chunk_rows):
            yield slice(start, start + self.chunk_rows)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: Tensor,
    how: Chunked,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `vp_logprob` of the logits `hidden[rows] @ weight.T`. Both results are differentiable.

    The gradient of `hidden` covers only this rank's columns of the logits; the caller must sum it
    over the tensor-parallel ranks. The logits of a row may differ in the last bit from those of a
    single product over all rows, because each chunk is multiplied separately. From the logits on,
    the computation is the same as in `vp_logprob`.

    Args:
        hidden: [n, h], f32, bf16 or f16.
        weight: [V_loc, h], of the same dtype.
        labels: i64[R], 0 to V-1: the next token of each selected row.
        rows: i64[R], the selected rows: indices from 0 to n-1, each at most once. Other rows are
            not read, and their gradient is 0.
        how: chunk size, temperature and tensor-parallel group.
        kept: i64[R, K]: for each row the distinct tokens among which the label was sampled, padded
            with -1. The log-probs are then those of the distribution over these tokens
            (`mrl.kernels.truncated_logprob`), and NaN for a label that is not one of them. The
            entropy is still that of the full distribution. None: the label was sampled from the
            whole vocabulary.

    Returns:
        (logprobs f32[R], entropy f32[R] in nats).

    Raises:
        ValueError: an argument has a wrong shape, dtype or value. On GPUs labels are not checked.
    """
    check_temperature(how.temperature)
    if how.chunk_rows < 1:
        raise ValueError(f"chunk_rows: got {how.chunk_rows}, expected 1 or more")
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden, weight: got {list(hidden.shape)}, {list(weight.shape)}, "
            "expected [n, h], [V_loc, h]"
        )
    for name, tensor in (("labels", labels), ("rows", rows)):
        if tensor.dtype != torch.int64 or tensor.shape != rows.shape or tensor.dim() != 1:
            raise ValueError(
                f"{name}: got {tensor.dtype} {list(tensor.shape)}, expected i64[R], R = {rows.numel()}"
            )
    if kept is not None and (kept.dtype != torch.int64 or kept.shape[:1] != rows.shape):
        raise ValueError(
            f"kept: got {kept.dtype} {list(kept.shape)}, expected i64[R, K], R = {rows.numel()}"
        )
    return _LinearLogprob.apply(hidden, weight, labels, rows, how, kept)  # pyright: ignore


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        rows: Tensor,
        how: Chunked,
        kept: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        columns = weight.shape[0]
        tile = tile_size(columns, how.size)
        tiles = hidden.new_empty((len(rows), columns // tile, 4), dtype=torch.float32)
        truncated = hidden.new_empty(len(rows), dtype=torch.float32)
        normalisers = hidden.new_empty((len(rows), 2), dtype=torch.float32)
        for part in how.parts(len(rows)):
            logits = how.project(hidden[rows[part]], weight)
            tiles[part] = torch.ops.mrl.vp_logprob_stats(
                logits,
                labels[part],
                None,
                how.rank * columns,
                how.size * columns,
                tile,
                how.temperature,
            )
            if kept is not None:
                here = KeptLogits.of(logits, kept[part], how.rank * columns, how.temperature)
                found = here.logprobs(kept[part], labels[part], how.group)
                truncated[part], normalisers[part] = found
            del logits  # free them before the next chunk
        tiles = gather_tiles(tiles, how.group)
        logprobs, lse, entropy = united(tiles, labels, None, tile, how.temperature)
        ctx.how = how
        ctx.save_for_backward(hidden, weight, labels, rows, lse, entropy, kept, normalisers)
        ctx.set_materialize_grads(False)
        return logprobs if kept is None else truncated, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, rows, lse, entropy, kept, normalisers = ctx.saved_tensors
        how: Chunked = ctx.how
        grad_logprobs, grad_entropy = grads
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(lse)
        # Log-probs of the truncated distribution get their gradient from `add_gradient` below.
        of_whole = grad_logprobs if kept is None else torch.zeros_like(lse)
        first = how.rank * weight.shape[0]
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = how.weight_gradient(weight) if needs_weight else None
        for part in how.parts(len(rows)):
            chosen = hidden[rows[part]]
            logits = how.project(chosen, weight)
            here = None
            if kept is not None:
                here = KeptLogits.of(logits, kept[part], first, how.temperature)
            torch.ops.mrl.vp_logprob_bwd_(
                logits,
                labels[part],
                None,
                lse[part],
                entropy[part],
                of_whole[part],
                None if grad_entropy is None else grad_entropy[part],
                first,
                how.temperature,
            )
            if here is not None and kept is not None:
                given = (kept[part], labels[part], normalisers[part], grad_logprobs[part])
                here.add_gradient(logits, *given)
            if grad_hidden is not None:
                grad_hidden.index_copy_(0, rows[part], logits @ weight)
            if grad_weight is not None:
                grad_weight.add(logits, chosen)
            del logits  # free them before the next chunk
        return grad_hidden, grad_weight.result() if grad_weight else None, *[None] * 4
